"""`Puller`: brings a mirror to a version while its engine generates.

Guarantee: after `pull` the mirror has exactly that version, every piece checked; when it raises, or is killed at any
instant, the mirror has its old version or says that it has none, and the next `pull` mends it.

::

    versions ─▶ manifests ─▶ route ─▶ for each hop: fetch segments ─▶ decode ─▶ write into the mirror ─▶ check ─▶ Pulled
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

import msgspec

from rollout.decide.weights import Hop, VersionSizes, route
from rollout.weights.codec import decode
from rollout.weights.layout import Layout
from rollout.weights.mirror import Mirror, Write
from rollout.weights.source import WeightSource
from rollout.weights.store import ReaderLease, existing_of
from rollout.weights.versions import Content, Ref, VersionManifest, VersionRef, decode_layout, decode_manifest
from sandbox.errors import EngineFailed, NotEqual, NotFound

P = ParamSpec("P")
T = TypeVar("T")

AT_ONCE = 4  # segments under way
EACH_WAY = 2  # by the cheaper way, then by the whole image


class PullCost(msgspec.Struct, kw_only=True):
    """Of one pull: seconds by phase, and what crossed the link."""

    bytes: int = 0
    fetch_s: float = 0.0  # waiting for content
    write_s: float = 0.0  # decoding it and writing it into the mirror
    check_s: float = 0.0  # hashing the result


class PulledVersion(msgspec.Struct, kw_only=True):
    """`writes`: what an engine of the version `since` has to write to be of this one; None: all, from the mirror, or
    they are not needed."""

    version: int
    digest: str  # of its manifest
    since: str | None  # digest of the manifest that the mirror was of before
    writes: list[Write] | None
    hops: int
    spent: PullCost


class Puller:
    """``puller = Puller(HttpSource(url), Mirror(directory), name="engine-3"); pulled = await puller.pull()``"""

    def __init__(self, source: WeightSource, mirror: Mirror, *, name: str, changes: bool = True):
        """Not `changes`: the engine reads the mirror alone. Where many weights change, they are larger than it."""
        self.source, self.mirror, self.name, self.changes = source, mirror, name, changes
        self._manifests: dict[str, VersionManifest] = {}
        self._layouts: dict[str, Layout] = {}
        self._pulling = asyncio.Lock()
        self._looked = False  # at what an earlier process has left in the mirror
        self._hands = ThreadPoolExecutor(1, f"weights of {name}")  # one: the engine needs the cores

    async def newest(self) -> VersionRef | None:
        listed = await self.source.versions()
        return listed[-1] if listed else None

    async def pull(self, version: int | None = None) -> PulledVersion:
        """Bring the mirror to this version; None: to the newest. Raises NotFound, EngineFailed, NotEqual."""
        async with self._pulling:
            spent = PullCost()
            for attempt in range(EACH_WAY):
                listed = await self.source.versions()
                want = _chosen(listed, version)
                stands = self.mirror.state.digest or self.mirror.state.since
                holds = None if attempt else stands
                await self._lease(stands, want)
                existing = [existing_of(ref, await self._manifest(ref, spent)) for ref in listed]
                try:
                    pulled = await self._go(existing, listed, holds, want, spent)
                except (NotEqual, NotFound, EngineFailed):  # the mirror or content was damaged, or a version collected
                    if attempt == EACH_WAY - 1:
                        raise
                    continue
                await self._lease(want.manifest.digest, None, want.version)
                return pulled
        raise AssertionError("the last attempt returned or raised")

    async def close(self) -> None:
        await asyncio.to_thread(self._hands.shutdown)
        await self.source.close()

    async def _go(
        self,
        existing: list[VersionSizes],
        listed: Sequence[VersionRef],
        holds: str | None,
        want: VersionRef,
        spent: PullCost,
    ) -> PulledVersion:
        since = holds if self.mirror.version is not None else None
        hops = route(existing, holds, want.manifest.digest)
        if hops is None:
            raise NotFound(f"nothing leads to version {want.version} of the weights", hint="publish it again")
        manifest = await self._manifest(want, spent)
        layout = await self._layout(manifest, spent)
        if not hops and self.mirror.version is not None:
            await self._poll(layout, manifest)
            return PulledVersion(
                version=want.version, digest=want.manifest.digest, since=since, writes=[], hops=0, spent=spent
            )
        by_digest = {ref.manifest.digest: ref for ref in listed}
        complete = bool(hops) and hops[0].kind == "complete"
        await self._do(self.mirror.begin, layout, None if complete else holds, want.manifest.digest)
        writes: list[Write] = []
        for hop in hops:
            writes += await self._hop(hop, await self._manifest(by_digest[hop.digest], spent), layout, spent)
            if complete:
                writes.clear()  # the engine takes all of it from the mirror
        started = time.monotonic()
        files = [(name, await self._get(ref, spent)) for name, ref in manifest.files.items()]
        await self._do(self.mirror.put_files, files)
        await self._do(self.mirror.finish, want.version, want.manifest.digest, manifest.digests)
        spent.check_s += time.monotonic() - started
        self._looked = True
        existing_since = since is not None and not complete and self.changes
        return PulledVersion(
            version=want.version,
            digest=want.manifest.digest,
            since=since if existing_since else None,
            writes=writes if existing_since else None,
            hops=len(hops),
            spent=spent,
        )

    async def _poll(self, layout: Layout, manifest: VersionManifest) -> None:
        """A mirror that an earlier process left is believed after every piece was hashed. Raises NotEqual."""
        if not self._looked:
            await self._do(self.mirror.poll, layout, manifest.digests)
            self._looked = True

    async def _hop(self, hop: Hop, manifest: VersionManifest, layout: Layout, spent: PullCost) -> list[Write]:
        """Fetch and write the segments of one version that this rank reads."""
        if manifest.layout.digest not in self._layouts or self._layouts[manifest.layout.digest] != layout:
            raise NotFound(f"version {manifest.version} is cut in another way", hint="fetch the whole image")
        refs = manifest.complete if hop.kind == "complete" else manifest.steps
        assert refs is not None
        slots = asyncio.Semaphore(AT_ONCE)

        async def segment(number: int, ref: Ref) -> list[Write]:
            async with slots:
                content = await self._get(ref, spent)
                started = time.monotonic()
                writes = await self._do(self._write, number, content, layout)
                spent.write_s += time.monotonic() - started
                return writes if self.changes else []

        needed = layout.needed(self.mirror.part, self.mirror.parts)
        tasks = [asyncio.create_task(segment(number, ref)) for number in needed if (ref := refs[number]) is not None]
        try:
            return [write for writes in await asyncio.gather(*tasks) for write in writes]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # nothing writes into the mirror after this

    def _write(self, number: int, content: Content, layout: Layout) -> list[Write]:
        return self.mirror.write(number, decode(content, layout.segments[number].words))

    async def _get(self, ref: Ref, spent: PullCost) -> Content:
        started = time.monotonic()
        content = await self.source.chunk(ref)
        spent.fetch_s += time.monotonic() - started
        spent.bytes += len(content)
        return content

    async def _manifest(self, ref: VersionRef, spent: PullCost) -> VersionManifest:
        name = ref.manifest.digest
        if name not in self._manifests:
            self._manifests[name] = decode_manifest(await self._get(ref.manifest, spent))
        return self._manifests[name]

    async def _layout(self, manifest: VersionManifest, spent: PullCost) -> Layout:
        name = manifest.layout.digest
        if name not in self._layouts:
            self._layouts = {name: decode_layout(await self._get(manifest.layout, spent))}
        return self._layouts[name]

    async def _lease(self, stands: str | None, want: VersionRef | None, version: int = -1) -> None:
        lease = ReaderLease(holds=stands, fetches=want.manifest.digest if want else None, version=version)
        await self.source.lease(self.name, lease)

    async def _do(self, act: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._hands, partial(act, *arguments, **options))


def _chosen(listed: Sequence[VersionRef], version: int | None) -> VersionRef:
    for ref in reversed(listed):
        if version is None or ref.version == version:
            return ref
    what = "no weights are published yet" if version is None else f"version {version} of the weights is not published"
    raise NotFound(what, hint="list what there is: `pagurus weights ls`")
