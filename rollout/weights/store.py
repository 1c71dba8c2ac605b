"""`VersionStore`: published versions in a directory, by content.

Guarantee: a version that is listed is complete and on disk; content is checked whenever it is read; what a reader is
based on or fetches is not collected. Killed at any instant, the directory lists the versions that it listed before, or
one more. A publisher that was believed dead (an older generation) cannot publish.

::

    chunks/ab/abcdef…      content, named by its blake3
    versions/000012        VersionRef: written last
    readers/NAME           what a reader is based on and fetches, until when
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from rollout.decide.weights import Hop, VersionSizes, retained
from rollout.weights.versions import Content, Ref, VersionManifest, VersionRef, Way, decode_manifest, digest, ref_of
from sandbox import durable
from sandbox.errors import Conflict, EngineFailed, Invalid, NotFound

LEASE = 600.0  # seconds for which a reader is believed without a word
HEX = frozenset("0123456789abcdef")


class ReaderLease(msgspec.Struct, kw_only=True):
    """reader -> store: what it holds on to. Digests of manifests."""

    holds: str | None = None
    fetches: str | None = None
    version: int = -1  # of `holds`
    until: float = 0.0


class WeightCollection(msgspec.Struct, frozen=True):
    versions: int
    chunks: int
    bytes: int


class VersionStore:
    """``store.put(content)``; ``store.publish(manifest)``; ``store.versions()``; ``store.get(ref)``."""

    def __init__(self, directory: Path | str):
        self.directory = Path(directory)
        self._manifests: dict[str, VersionManifest] = {}
        for name in ("chunks", "versions", "readers"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)

    # ------------------------------------------------------------------ content

    def path(self, name: str) -> Path:
        """Where content lies. Raises Invalid unless `name` is a digest: names come from other hosts."""
        if len(name) != 64 or not HEX.issuperset(name):
            raise Invalid(f"{name[:80]!r} is no digest", hint="ask for the digest that a manifest names")
        return self.directory / "chunks" / name[:2] / name

    def has(self, name: str) -> bool:
        return self.path(name).exists()

    def put(self, content: Content, *, existing: Ref | None = None) -> Ref:
        """Content is there, and on disk, when this returns. `existing`: its reference, whose hash was just checked."""
        ref = existing or ref_of(content)
        path = self.path(ref.digest)
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            self._put(path, content)
        return ref

    def _put(self, path: Path, content: Content) -> None:
        """Several processes may put the same content: each writes a file of its own, the last name stands."""
        aside = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
        try:
            aside.write_bytes(content)
            durable.sync(aside)
            aside.rename(path)
        finally:
            aside.unlink(missing_ok=True)
        durable.sync(path.parent)

    def get(self, ref: Ref) -> bytes:
        """Raises NotFound, or EngineFailed for content that was damaged; that is then removed, to be fetched again."""
        path = self.path(ref.digest)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise NotFound(f"{self.directory} has no weights {ref.digest[:12]}", hint="publish again") from None
        if digest(content) != ref.digest:
            path.unlink(missing_ok=True)
            raise EngineFailed(f"weights {ref.digest[:12]} in {self.directory} were damaged", hint="fetch them again")
        return content

    def check(self, name: str) -> None:
        """A reader found this content damaged: it is removed if it is."""
        path = self.path(name)
        if path.exists() and digest(path.read_bytes()) != name:
            path.unlink(missing_ok=True)

    def trim(self, limit: int) -> None:
        """Of a cache: what was used least recently goes, until it holds at most `limit` bytes."""
        states = [(path, _state(path)) for path in self.directory.glob("chunks/??/*")]
        result = sorted(((state.st_mtime, state.st_size, path) for path, state in states if state), reverse=True)
        held = 0
        for _, size, path in result:
            held += size
            if held > limit:
                path.unlink(missing_ok=True)

    # ------------------------------------------------------------------ versions

    def publish(self, manifest: VersionManifest, *, own: Collection[str] | None = None) -> VersionRef:
        """Make a version visible whose content is all here. Replaces a version of the same number.

        `own`: digests of what must be here, where the rest lies in the stores of other ranks.

        Raises Conflict for a publisher that another one has followed, NotFound naming content that is missing.
        """
        missing = sorted(name for name in (manifest.refs() if own is None else own) if not self.has(name))
        if missing:
            raise NotFound(
                f"version {manifest.version} lacks {len(missing)} of its parts, first {missing[0][:12]}",
                hint="put its content before its manifest",
            )
        with self._locked():
            newest = self.newest()
            if newest is not None and self.manifest(newest).generation > manifest.generation:
                raise Conflict(
                    f"version {manifest.version} comes from publisher {manifest.generation}, which was replaced",
                    hint="end this publisher",
                )
            ref = VersionRef(manifest.version, self.put(msgspec.msgpack.encode(manifest)))
            durable.publish(self._listed(manifest.version), msgspec.msgpack.encode(ref))
        return ref

    def versions(self) -> list[VersionRef]:
        """Oldest first."""
        result = []
        for path in sorted((self.directory / "versions").iterdir()):
            if path.name.isdigit():
                try:
                    result.append(msgspec.msgpack.decode(path.read_bytes(), type=VersionRef))
                except FileNotFoundError:
                    continue  # collected since
                except msgspec.MsgspecError:
                    raise EngineFailed(f"{path} was damaged", hint="remove it, or publish that version again") from None
        return result

    def newest(self) -> VersionRef | None:
        result = self.versions()
        return result[-1] if result else None

    def version(self, number: int) -> VersionRef:
        for ref in self.versions():
            if ref.version == number:
                return ref
        raise NotFound(f"{self.directory} has no version {number}", hint="list what there is: `pagurus weights ls`")

    def manifest(self, ref: VersionRef) -> VersionManifest:
        existing = self._manifests.get(ref.manifest.digest)
        if existing is None:
            existing = self._manifests[ref.manifest.digest] = decode_manifest(self.get(ref.manifest))
        return existing

    def digests(self, number: int) -> bytes:
        """Of every piece of a version: equal where, and only where, the weights are."""
        return self.manifest(self.version(number)).digests

    def withdraw(self, number: int) -> None:
        """Versions above `number` are published no longer; their content stays until it is collected."""
        with self._locked():
            for ref in self.versions():
                if ref.version > number:
                    self._listed(ref.version).unlink(missing_ok=True)
            durable.sync(self.directory / "versions")

    # ------------------------------------------------------------------ readers and collection

    def lease(self, reader: str, lease: ReaderLease) -> None:
        """Write down what a reader holds, for `LEASE` seconds. Raises Invalid for a name that is no plain word."""
        if not reader.replace("-", "").replace("_", "").isalnum() or len(reader) > 100:
            raise Invalid(f"{reader[:80]!r} is no name of a reader", hint="use letters, digits, - and _")
        lease.until = time.time() + LEASE
        # Not durable: after a loss of power the reader says it again.
        durable.publish(self.directory / "readers" / reader, msgspec.msgpack.encode(lease), durable=False)

    def release(self, reader: str) -> None:
        """It needs nothing any more."""
        (self.directory / "readers" / reader).unlink(missing_ok=True)

    def readers(self) -> dict[str, ReaderLease]:
        """Those whose lease has not ended."""
        result = {}
        for path in (self.directory / "readers").iterdir():
            if path.name.endswith(".new"):
                continue
            try:
                lease = msgspec.msgpack.decode(path.read_bytes(), type=ReaderLease)
            except FileNotFoundError:  # it was released since
                continue
            if lease.until > time.time():
                result[path.name] = lease
        return result

    def existing(self) -> list[VersionSizes]:
        return [existing_of(ref, self.manifest(ref)) for ref in self.versions()]

    def collect(self, *, keep: int) -> WeightCollection:
        """Remove what neither the last `keep` versions nor any reader needs. Waits for a publication under way."""
        with self._locked(), self._locked("publishing"):
            refs = {ref.manifest.digest: ref for ref in self.versions()}
            leases = self.readers().values()
            held = {name for lease in leases for name in (lease.holds, lease.fetches) if name in refs}
            hops = retained(self.existing(), keep=keep, leased=held)
            needed: set[str] = set()
            stored = 0
            for name, ref in refs.items():
                ways = tuple(way for way in ref.ways if Hop(name, way) in hops)
                if ways != ref.ways:
                    self._relist(ref, ways)
                if ways:
                    stored += 1
                    needed |= {name} | needed_of(self.manifest(ref), ways)
            durable.sync(self.directory / "versions")  # no version is listed whose content goes now
            return WeightCollection(len(refs) - stored, *self._sweep(needed))

    def _relist(self, ref: VersionRef, ways: tuple[Way, ...]) -> None:
        if ways:
            durable.publish(self._listed(ref.version), msgspec.msgpack.encode(msgspec.structs.replace(ref, ways=ways)))
        else:
            self._listed(ref.version).unlink()

    def _sweep(self, needed: set[str]) -> tuple[int, int]:
        chunks = size = 0
        for path in (self.directory / "chunks").glob("??/*"):
            if path.name not in needed:
                size += path.stat().st_size
                chunks += 1
                path.unlink()
        self._manifests = {name: manifest for name, manifest in self._manifests.items() if name in needed}
        return chunks, size

    def _listed(self, number: int) -> Path:
        return self.directory / "versions" / f"{number:09d}"

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Content that is put inside is not collected before the version that needs it is published."""
        with self._locked("publishing", shared=True):
            yield

    @contextmanager
    def _locked(self, name: str = "lock", *, shared: bool = False) -> Iterator[None]:
        with (self.directory / name).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            yield


def is_store(directory: Path) -> bool:
    """Whether versions are published in this directory."""
    return (directory / "versions").is_dir() and (directory / "chunks").is_dir()


def existing_of(ref: VersionRef, manifest: VersionManifest) -> VersionSizes:
    step = manifest.step_bytes if "step" in ref.ways else None
    complete = manifest.total_bytes if "complete" in ref.ways else None
    return VersionSizes(ref.version, ref.manifest.digest, manifest.base, step, complete)


def needed_of(manifest: VersionManifest, ways: Collection[Way]) -> set[str]:
    """Digests of the content that these ways into a version need."""
    needed = {manifest.layout.digest, *(ref.digest for ref in manifest.files.values())}
    if "step" in ways:
        needed |= {ref.digest for ref in manifest.steps or [] if ref is not None}
    if "complete" in ways:
        needed |= {ref.digest for ref in manifest.complete or []}
    return needed


def _state(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None
