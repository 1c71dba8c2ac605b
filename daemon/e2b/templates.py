"""E2B's templates: images, built from the steps that a client sends, and what is started in them.

Guarantee: a build has the rights of the key that requested it and no others, as it goes through the daemon's own API
with that key. An archive is its owner's alone: what one uploads under a hash, no other copies.

::

    POST /v3/templates ▸ GET files/HASH ▸ PUT to a signed address ▸ POST builds/BUILD ▸ GET status ... ▸ image NAME
                                                                     with a start command: its state as a checkpoint
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import hmac
import re
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web

from daemon.auth.visibility import caller_owner
from daemon.e2b import bodies
from daemon.e2b.prepare import made, retain
from daemon.e2b.steps import SHELL, BuildBody, StartState, written
from daemon.host.host import Host
from sandbox.errors import Invalid, NotFound, PagurusError, TooMany
from sandbox.image.store import StoredImage
from sandbox.messages import ExecRequest, Network, ProcessRequest
from sandbox.sdk.client import Client
from sandbox.tree.space import Reserve

MAX_ARCHIVE = 8 << 30  # bytes of one
RETAINED = 86_400.0  # seconds for which an unused archive is retained
MAX_BUILDS = 100  # of one owner that are known at a time
MAX_LOG = 10_000  # lines of one build
READY_TIMEOUT = 300.0
READY_INTERVAL = 0.5
_LINE = re.compile(r"line (\d+)")


class Build:
    """One build, from its request until it is forgotten."""

    def __init__(self, owner: str, names: list[str], labels: dict[str, str]) -> None:
        self.id = str(uuid.uuid4())
        self.owner, self.names, self.labels = owner, names, labels
        self.made_at = time.time()
        self.status = "waiting"
        self.log: list[dict[str, str]] = []
        self.reason: dict[str, str] | None = None
        self.task: asyncio.Task[None] | None = None

    def say(self, line: str, level: str = "info") -> None:
        if len(self.log) < MAX_LOG:
            self.log.append({"timestamp": _now(), "level": level, "message": line[:4000]})


class Templates:
    """The builds and archives of one host. `address`: of its own socket."""

    def __init__(self, host: Host, secret: bytes, address: str) -> None:
        self._host, self._secret, self.address = host, secret, address
        self._directory = host.places.stored.parent / "e2b-files"
        self._builds: dict[str, Build] = {}
        self._starting = asyncio.Lock()

    # ----------------------------------------------------------------- archives

    def archive(self, holder: str, number: str) -> Path:
        """`holder`: see :func:`holder_of`."""
        return self._directory / holder / number

    def ticket(self, holder: str, number: str, until: int) -> str:
        said = f"archive {holder} {number} {until}".encode()
        return hmac.new(self._secret, said, hashlib.sha256).hexdigest()

    async def store(self, holder: str, number: str, data: AsyncIterator[bytes]) -> None:
        place = self.archive(holder, number)
        await asyncio.to_thread(self._prepare, place.parent)
        with tempfile.NamedTemporaryFile(dir=place.parent, prefix=".new-", delete=False) as spool:
            try:
                reserve = Reserve(spool.fileno())
                async for part in data:
                    reserve.take(len(part))
                    await asyncio.to_thread(spool.write, part)
                spool.flush()
                await asyncio.to_thread(Path(spool.name).rename, place)
            finally:
                await asyncio.to_thread(Path(spool.name).unlink, missing_ok=True)

    def _prepare(self, place: Path) -> None:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        for old in self._directory.glob("*/*"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - old.stat().st_mtime > RETAINED:
                    old.unlink()

    # ----------------------------------------------------------------- builds

    def admit(self, build: Build) -> Build:
        """Know a build. Raises TooMany."""
        own = sorted((b for b in self._builds.values() if b.owner == build.owner), key=lambda b: b.made_at)
        for old in own[: max(0, len(own) + 1 - MAX_BUILDS)]:
            if old.task is not None and not old.task.done():
                raise TooMany(f"{MAX_BUILDS} builds at a time", hint="wait until some of them have ended")
            del self._builds[old.id]
        self._builds[build.id] = build
        return build

    def build(self, number: str) -> Build:
        result = self._builds.get(number)
        if result is None or result.owner != caller_owner():
            raise NotFound(f"no such build: {number[:100]}", hint="a daemon that is started again forgets builds")
        return result

    def running(self, name: str) -> Build | None:
        """The build of this name that is under way, or the latest one."""
        own = [b for b in self._builds.values() if b.owner == caller_owner() and name in b.names]
        return max(own, key=lambda b: b.made_at, default=None)

    async def carry_out(self, build: Build, body: BuildBody, key: str | None, base: tuple[str, str, str]) -> None:
        """Build the image, give it its names, and save what is started in it."""
        first_lines: list[int] = []
        try:
            name, user, workdir = base
            text = written(body, base=name, user=user, workdir=workdir, labels=build.labels)
            first_lines = text.first_lines
            async with Client(self.address, token=key) as client:
                with tempfile.TemporaryDirectory(prefix=".e2b-build-", dir=self._host.images.directory) as directory:
                    await asyncio.to_thread(self._lay_out, Path(directory), text.text, text.hashes, build.owner)
                    image = await client.images.build(
                        build.names[0],
                        directory,
                        network=Network.open(),
                        replace=True,
                        cache=not (body.force or any(step.force for step in body.steps)),
                        output=build.say,
                    )
                for other in build.names[1:]:
                    await client.images.give_name(image.name, other, config=image.config, replace=True)
            if StartState.of(image.config.labels) is not None:
                build.say("start the command and wait until it is ready")
                existing = await asyncio.to_thread(self._host.images.resolve, build.names[0])
                await self.started(build.names[0], existing)
            build.say(f"{', '.join(build.names)}: ready")
            build.status = "ready"
        except (PagurusError, OSError) as error:
            step = _step(str(error), first_lines)
            build.reason = {"message": str(error)[:4000], "step": step}
            build.say(str(error), "error")
            build.status = "error"
        except asyncio.CancelledError:
            build.status, build.reason = "error", {"message": "the daemon ended", "step": "base"}
            raise

    def _lay_out(self, directory: Path, text: str, hashes: list[str], owner: str) -> None:
        for number in hashes:
            archive = self.archive(holder_of(owner), number)
            if not archive.is_file():
                raise Invalid(f"the files of {number} were not uploaded", hint="upload them first")
            (directory / number).hardlink_to(archive)
            archive.touch()
        (directory / "Dockerfile").write_text(text)

    # ----------------------------------------------------------------- what is started

    async def started(self, name: str, image: StoredImage) -> str | None:
        """The checkpoint of a template whose command runs and is ready; None: it starts nothing."""
        start = StartState.of(image.config.labels)
        if start is None:
            return None
        label = "e2b.start " + hashlib.sha256(f"{image.digest} {start.label}".encode()).hexdigest()[:40]
        async with self._starting:
            with contextlib.suppress(NotFound):
                return self._host.checkpoint(label).id
            return await self._start(name, image, start, label)

    async def _start(self, name: str, image: StoredImage, start: StartState, label: str) -> str:
        live = await made(self._host, name, image)
        try:
            await _run(self._host, live.row.id, start)
            inflight = await live.checkpoint(label)
            await inflight.finalized(durable=True)
            if (trouble := inflight.trouble(durable=True)) is not None:
                raise trouble
            await retain(self._host, live, inflight.row)
            return inflight.row.id
        finally:
            await asyncio.shield(self._host.remove(live.row.id))


async def _run(host: Host, sandbox: str, start: StartState) -> None:
    """Start the command of a template in a new sandbox, and wait until it is ready."""
    live = host.live(sandbox)
    shell = ["/bin/sh", "-c", SHELL]
    await live.programs.start(ProcessRequest(command=[*shell, start.command]))
    if not start.ready:
        return
    try:
        async with asyncio.timeout(READY_TIMEOUT):
            while True:
                request = ExecRequest(command=[*shell, start.ready], timeout=READY_TIMEOUT, ends_turn=False)
                if (await live.exec(request)).exit_code == 0:
                    return
                await asyncio.sleep(READY_INTERVAL)
    except TimeoutError:
        raise Invalid(f"the template was not ready within {READY_TIMEOUT:g} s", hint="see its ready command") from None


def holder_of(owner: str) -> str:
    """Where the archives of an owner lie."""
    return hashlib.sha256(owner.encode()).hexdigest()[:32]


def _step(error: str, first_lines: list[int]) -> str:
    """The step that an error is about, counted from 1 as the clients do; "base" for what stands before them."""
    named = _LINE.search(error)
    if named is None:
        return "finalize" if first_lines else "base"
    return str(sum(first <= int(named[1]) for first in first_lines) or "base")


def _now() -> str:
    return bodies.written(datetime.datetime.now(datetime.UTC))


TEMPLATES: web.AppKey[Templates] = web.AppKey("e2b builds", Templates)
