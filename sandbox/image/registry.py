"""Images from and to registries, by skopeo: what is in one, its layers on this disk, its tree.

Credentials are skopeo's business: it reads ``$REGISTRY_AUTH_FILE``, or else what `docker login` wrote
(``~/.docker/config.json``).

Guarantee: what comes from a registry is an adversary's. An image is chosen by the digest of its manifest, which is
checked here, and every blob by its own; no file is written that is larger than the manifest said, no more than
`MAX_FETCH` in all, and nothing is fetched from an address that a manifest names. A layer that is here is not fetched.

::

    inspect --raw ─▶ index: the manifest for this machine ─▶ copy docker://…@digest ─▶ layers/blobs ─▶ oci.unpack
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sandbox.descriptors import closing
from sandbox.errors import (
    Forbidden,
    ImageNotFound,
    Invalid,
    NoSpace,
    PagurusError,
    Protocol,
    TooMany,
    Unsupported,
    hinted,
)
from sandbox.image import oci
from sandbox.image.reference import Reference
from sandbox.messages import ImageConfig
from sandbox.tree.safe_path import refused
from sandbox.tree.space import Reserve

MAX_FETCH = 64 << 30  # bytes of the layers of one image, compressed
MAX_RETAINED = 8 << 30  # bytes of layers that are kept between pulls
MAX_SILENCE = 180.0  # seconds in which nothing comes; skopeo's own pauses after a 429 are shorter
POLL_INTERVAL = 0.1  # seconds
HEADROOM = 1 << 20  # bytes that a file may be larger than declared: skopeo's own documents
_PUSH = "push it again with a current docker or podman"
INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
#: Of the environment, what skopeo is to know: where it is, whose credentials, which proxy.
PASSED_ON = re.compile(r"PATH|HOME|REGISTRY_AUTH_FILE|XDG_RUNTIME_DIR|SSL_CERT_(FILE|DIR)|(?i:https?_proxy|no_proxy)")
Report = Callable[[int, int], object]  # bytes that are here, and of how many
_FATAL = re.compile(r'level=(?:fatal|error) msg="((?:[^"\\]|\\.)*)"')
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
#: What skopeo says -> the error, and its hint. The first that fits.
_SAYS: tuple[tuple[str, type[PagurusError], str], ...] = (
    (r"no space left", NoSpace, "free disk space and pull again"),
    (r"toomanyrequests|too many requests|\b429\b", TooMany, "wait, or log in: docker login, skopeo login"),
    (r"unauthorized|authentication required|denied|\b40[13]\b", Forbidden, "log in: docker login, or skopeo login"),
    (r"manifest unknown|name unknown|not found|\b404\b", ImageNotFound, "look at its name and tag"),
    (r"x509|certificate|tls:", Unsupported, "see /etc/containers/certs.d and registries.conf"),
    (r"does not match|mismatch|unexpected eof|digest did not|file too large", Invalid, "the registry damages it"),
    (r"no such host|refused|timeout|unreachable|no route", Protocol, "is the registry reachable from this host?"),
)


@dataclass(frozen=True)
class ImageManifest:
    """Of an image for this machine."""

    reference: Reference  # by digest
    blobs: Mapping[str, int]  # configuration and layers: digest -> bytes

    @property
    def size(self) -> int:
        return sum(self.blobs.values())


@hinted(_PUSH)
def manifest(target: Reference) -> ImageManifest:
    """What the registry has under this name, for this machine. Raises ImageNotFound, Forbidden, Invalid, ..."""
    digest, document = _document(target)
    if document.get("mediaType") in INDEXES or "manifests" in document:
        named = oci.chosen(document.get("manifests"))[0].get("digest")
        if not isinstance(named, str) or _DIGEST.fullmatch(named) is None:
            raise Invalid(f"{target.name}: not a digest: {str(named)[:80]!r}")
        digest, document = _document(Reference(target.registry, target.path, target.tag, named))
    if "layers" not in document or document.get("mediaType", MANIFESTS[0]) not in MANIFESTS:
        raise Unsupported(
            f"{target.name} is of a kind that is not supported: {str(document.get('mediaType') or 'schema 1')[:80]}",
            hint=_PUSH,
        )
    return ImageManifest(Reference(target.registry, target.path, target.tag, digest), _blobs(target, document))


@hinted(_PUSH)
def fetch(result: ImageManifest, layers: Path, tree: Path, report: Report = lambda done, total: None) -> ImageConfig:
    """Fill the empty directory `tree`; `layers` keeps what was fetched. `report` is called while it is fetched."""
    with _retained(layers, result) as blobs, tempfile.TemporaryDirectory(dir=tree.parent) as directory:
        layout = Path(directory)
        (layout / "blobs").symlink_to(blobs.resolve())
        copy(result, layout, blobs, report)
        return oci.unpack(layout, tree, blobs)


def copy(result: ImageManifest, layout: Path, blobs: Path, report: Report) -> None:
    """The image as an OCI layout, whose blobs lie in `blobs`. What is there already is not fetched."""
    source, limit = result.reference, max(result.blobs.values()) + HEADROOM
    options = ["--quiet", "--src-tls-verify=false"] if source.local else ["--quiet"]
    target = f"oci:{layout}:image"
    uncompressed = "--dest-oci-accept-uncompressed-layers"
    _skopeo(
        source,
        ["copy", *options, uncompressed, f"docker://{source.address}", target],
        limit=limit,
        progress=lambda: _here(result, layout, blobs),
        report=lambda done: report(min(done, result.size), result.size),
    )


def push(target: Reference, layout: Path, tag: str) -> str:
    """Send the image that an OCI layout has under `tag`, compressed; the digest of its manifest there."""
    options = ["--quiet", "--dest-tls-verify=false"] if target.local else ["--quiet"]
    digest = layout / ".digest"
    source = f"oci:{layout}:{tag}"
    arguments = ["copy", *options, f"--digestfile={digest}", source, f"docker://{target.repository}:{target.tag}"]
    _skopeo(target, arguments, limit=MAX_FETCH, sends=True)
    return digest.read_text().strip()


# ---------------------------------------------------------------------------- manifests


def _document(target: Reference) -> tuple[str, dict[str, Any]]:
    """A manifest or an index, as it was pushed, and its digest."""
    options = ["--tls-verify=false"] if target.local else []
    raw = _skopeo(target, ["inspect", "--raw", *options, f"docker://{target.address}"], limit=oci.MAX_DOCUMENT)
    digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
    if target.digest and digest != target.digest:
        raise Invalid(f"{target.name}: the registry sent {digest}", hint="the registry damages it")
    try:
        document = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise Invalid(f"{target.name}: its manifest is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise Invalid(f"{target.name}: its manifest is no object")
    return digest, document


def _blobs(target: Reference, document: dict[str, Any]) -> dict[str, int]:
    layers = document["layers"]
    if not isinstance(layers, list) or len(layers) > oci.MAX_LAYERS:
        raise Invalid(f"{target.name}: more than {oci.MAX_LAYERS} layers, or none")
    result: dict[str, int] = {}
    for item in [document.get("config"), *layers]:
        digest, size = (item.get("digest"), item.get("size")) if isinstance(item, dict) else (None, None)
        if not isinstance(digest, str) or _DIGEST.fullmatch(digest) is None or not isinstance(size, int) or size < 0:
            raise Invalid(f"{target.name}: its manifest names a layer without digest or size")
        if item.get("urls"):
            raise Unsupported(f"{target.name} has layers that lie elsewhere", hint="images of Windows do")
        result[digest] = size
    if sum(result.values()) > MAX_FETCH:
        raise Invalid(f"{target.name} is larger than {MAX_FETCH >> 30} GiB")
    return result


# ---------------------------------------------------------------------------- layers on the disk


@contextlib.contextmanager
def _retained(layers: Path, result: ImageManifest) -> Iterator[Path]:
    """The directory of blobs, from which nothing is removed during it; afterwards what is too much, oldest first."""
    blobs = layers / "blobs"
    (blobs / "sha256").mkdir(mode=0o700, parents=True, exist_ok=True)
    with closing(os.open(layers, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        missing = sum(result.blobs.values())
        for path in _paths(result, blobs):
            with contextlib.suppress(FileNotFoundError):
                os.utime(path)
                missing -= path.stat().st_size
        try:
            Reserve(descriptor).take(max(0, missing))  # no file becomes larger than its manifest says
        except OSError as error:
            raise refused(error, result.reference.name) from error
        yield blobs
        with contextlib.suppress(BlockingIOError):  # another pull runs: it prunes at its end
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            prune(blobs, MAX_RETAINED)


def prune(blobs: Path, limit: int) -> None:
    """Remove the layers that were used longest ago, until the others are `limit` bytes."""
    total = 0
    for status, path in sorted(((path.stat(), path) for path in (blobs / "sha256").iterdir()), key=_newest):
        total += status.st_size
        if total > limit:
            path.unlink()


def _newest(entry: tuple[os.stat_result, Path]) -> int:
    return -entry[0].st_mtime_ns


def _paths(result: ImageManifest, blobs: Path) -> list[Path]:
    return [blobs / digest.replace(":", "/") for digest in result.blobs]


def _here(result: ImageManifest, layout: Path, blobs: Path) -> int:
    """Bytes that are here: of whole blobs, and of those that come just now."""
    size = 0
    for path in [*_paths(result, blobs), *layout.glob("oci-put-blob*")]:
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


# ---------------------------------------------------------------------------- skopeo


def _skopeo(
    target: Reference,
    arguments: list[str],
    *,
    limit: int,
    progress: Callable[[], int] | None = None,
    report: Callable[[int], object] = lambda done: None,
    sends: bool = False,
) -> bytes:
    """What skopeo prints. It writes no file larger than `limit`, and ends when nothing comes, or goes, for long."""
    if shutil.which("skopeo") is None:
        raise Unsupported("skopeo is missing, which fetches images", hint="apt-get install skopeo")
    architecture = oci.ARCHITECTURES.get(platform.machine(), platform.machine())
    command = ["setpriv", "--pdeathsig=KILL", "--", "prlimit", f"--fsize={limit}", "--"]  # it ends with who started it
    command += ["skopeo", f"--override-arch={architecture}", "--override-os=linux"]
    environment = {name: value for name, value in os.environ.items() if PASSED_ON.fullmatch(name)}
    environment.setdefault("HOME", os.path.expanduser("~"))
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [*command, *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=errors, env=environment
        )
        try:
            grown = (lambda: _read_by(process.pid)) if sends else (lambda: os.fstat(out.fileno()).st_size)
            _watch(process, progress or grown, report, target)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        if process.returncode:
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - 8192))
            raise _failure(target, errors.read().decode("utf-8", "replace"), process.returncode)
        out.seek(0)
        return out.read(min(limit, oci.MAX_DOCUMENT))


def _read_by(pid: int) -> int:
    """Bytes that a process of ours has read of files and sockets."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path(f"/proc/{pid}/io").read_text().split()[1])
    return 0


def _watch(
    process: subprocess.Popen[bytes], progress: Callable[[], int], report: Callable[[int], object], target: Reference
) -> None:
    done, since = -1, time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_INTERVAL)
        now = progress()
        if now != done:
            done, since = now, time.monotonic()
            report(done)
        if process.returncode is not None:
            return
        if time.monotonic() - since > MAX_SILENCE:
            raise Protocol(
                f"{target.name}: nothing came from {target.registry} for {MAX_SILENCE:g} s", hint="pull again"
            )


def _failure(target: Reference, said: str, status: int) -> PagurusError:
    """What went wrong, in skopeo's last words."""
    words = _FATAL.findall(said)
    last = words[-1].replace('\\"', '"') if words else said.strip().rpartition("\n")[2] or f"skopeo ended with {status}"
    if status == -signal.SIGXFSZ:
        last = "file too large: larger than its manifest says"
    for sign, kind, hint in _SAYS:
        if re.search(sign, last, re.IGNORECASE):
            return kind(f"{target.name}: {last[-600:]}", hint=hint)
    return Invalid(f"{target.name}: {last[-600:]}")
