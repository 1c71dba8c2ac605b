"""Where an engine server's weights come from, and how it takes a version.

Guarantee: after `take` or `adopt` the server serves exactly the version, or an error was raised (I9).

=========  ==========================================================================================
Fixed      a model directory that never changes, as version 0 or whichever it is called
Pulling    a server that pulls versions by itself while it generates, and applies them between two steps
Mirrored   a server that reloads directories (vLLM): a mirror is pulled next to it while it generates
Patched    the same, but its workers write the changes into their weights (vLLM on GPUs)
=========  ==========================================================================================
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import time
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from rollout.engine.client import EngineClient, PublishResult
from rollout.engine.launch import Launch
from rollout.engine.patches import write_patches
from rollout.weights import adapter
from rollout.weights.adapter import base_of
from rollout.weights.mirror import Mirror, Write
from rollout.weights.process import PullerProcess
from rollout.weights.puller import PulledVersion
from rollout.weights.store import is_store
from sandbox.errors import Invalid, NotFound

CHANGES = ".patches"  # in the mirror: what the server's workers read


class Weights(Protocol):
    place: str  # directory or URL

    @property
    def model(self) -> Path:
        """The directory that the server loads."""

    async def ready(self, version: int) -> None:
        """Before a server starts: `model` is there, or the server makes it."""

    def arguments(self, version: int) -> list[str]:
        """For the server's command line."""

    async def begin(self, client: EngineClient, version: int) -> None:
        """A server that was just started: it serves this version, checked, when this returns."""

    async def fetch(self, client: EngineClient, version: int) -> None:
        """Have a version here that will be taken, while the server generates."""

    async def take(self, client: EngineClient, version: int) -> PublishResult:
        """Have a server that generates serve this version."""

    async def adopt(self, client: EngineClient, version: int) -> None:
        """Have a server that another process left serve this version, whatever it was in the middle of."""

    async def close(self) -> None: ...


def weights_of(launch: Launch, place: Path | str, home: Path) -> Weights:
    """`place`: a directory or URL of versions, or a model directory. `home`: the mirror will be there."""
    place = named(place)
    if "://" not in place and not is_store(Path(place)):
        return FixedWeights(place)
    if launch.pulls:
        return Pulling(place, home)
    return InPlaceWeights(place, home) if launch.patches else AdapterWeights(place, home)


def named(place: Path | str) -> str:
    """One name for one place."""
    return str(place) if "://" in str(place) else str(Path(place).resolve())


class FixedWeights:
    def __init__(self, place: str):
        self.place, self.model = place, Path(place)

    async def ready(self, version: int) -> None:
        if not (self.model / "config.json").exists():
            raise NotFound(f"{self.model} has neither versions of weights nor a model", hint="publish weights there")

    def arguments(self, version: int) -> list[str]:
        return []

    async def begin(self, client: EngineClient, version: int) -> None:
        await _labelled(client, self.model, version)

    async def fetch(self, client: EngineClient, version: int) -> None:
        return None

    async def take(self, client: EngineClient, version: int) -> PublishResult:
        raise Invalid(f"{self.model} is one model, not a directory of versions", hint="publish versions of it")

    async def adopt(self, client: EngineClient, version: int) -> None:
        await client.resume()
        await client.set_version(version)
        await client.check(self.model, version)

    async def close(self) -> None:
        return None


class Pulling:
    def __init__(self, place: str, home: Path):
        self.place, self.model = place, home

    async def ready(self, version: int) -> None:
        self.model.mkdir(parents=True, exist_ok=True)

    def arguments(self, version: int) -> list[str]:
        return ["--weights", self.place, "--at", str(version), "--reader", reader_of(self.model)]

    async def begin(self, client: EngineClient, version: int) -> None:
        await _labelled(client, self.model, version)

    async def fetch(self, client: EngineClient, version: int) -> None:
        await client.pull(version)

    async def take(self, client: EngineClient, version: int) -> PublishResult:
        return await client.take(version)

    async def adopt(self, client: EngineClient, version: int) -> None:
        await client.resume()
        await self.take(client, version)
        await client.check(self.model, version)

    async def close(self) -> None:
        return None


class AdapterWeights:
    """An adapter is loaded next to its base model, under a name of its own version: nothing pauses for it."""

    patches = False  # whether the server gets the changes, or reads the mirror alone

    def __init__(self, place: str, home: Path):
        self.place, self.home = place, home
        # Untied: vLLM's CPU build does not follow a tied head when weights are reloaded.
        self._puller = PullerProcess(place, home, name=reader_of(home), untie=True, changes=self.patches)

    @property
    def model(self) -> Path:
        return base_of(self.home) or self.home

    async def ready(self, version: int) -> None:
        await (self._puller.pull if self._puller.running else self._puller.first)(version)

    def arguments(self, version: int) -> list[str]:
        return []

    async def begin(self, client: EngineClient, version: int) -> None:
        await _labelled(client, self.model, version)
        if self.model != self.home:
            await self._load(client, version)

    async def fetch(self, client: EngineClient, version: int) -> None:
        await self._pull(version)

    async def _pull(self, version: int) -> PulledVersion:
        return await self._puller.pull(version)

    async def _change(self, client: EngineClient, version: int) -> float:
        """Have the server serve what the mirror has. Seconds in which it stood still."""
        if self.model == self.home:
            return await client.reload(self.home, version)
        await self._load(client, version)
        return 0.0

    async def _load(self, client: EngineClient, version: int) -> None:
        """Each version from a directory of its own: the mirror moves to the next one, and vLLM may read again."""
        directory = self.home.with_name(f"{self.home.name}.adapters") / str(version)
        await asyncio.to_thread(_copy_adapter, self.home, directory)
        loaded = await client.load_adapter(directory, version)
        await asyncio.to_thread(_forget_adapters, directory.parent, {str(item) for item in loaded})

    async def take(self, client: EngineClient, version: int) -> PublishResult:
        began = time.monotonic()
        pulled = await self._pull(version)
        paused = await self._change(client, version)
        return PublishResult(
            version=version,
            seconds=time.monotonic() - began,
            paused_s=paused,
            bytes=pulled.spent.bytes,
            fetch_s=pulled.spent.fetch_s,
            write_s=pulled.spent.write_s,
            check_s=pulled.spent.check_s,
        )

    async def adopt(self, client: EngineClient, version: int) -> None:
        if await client.version() != version or await client.is_paused():
            await self.take(client, version)
        else:
            await self._pull(version)
            await self.begin(client, version)

    async def close(self) -> None:
        await self._puller.close()


class InPlaceWeights(AdapterWeights):
    """Changes are written into the server's weights in place by an engine of ours in its workers (vLLM on GPUs).

    Where they do not build on what the server has, it loads all of the mirror.
    """

    patches = True

    def __init__(self, place: str, home: Path):
        super().__init__(place, home)
        self._since: int | None = None  # the version that the server has
        self._writes: list[Write] | None = None  # they lead from there to the mirror's version; None: nothing does
        self._digest: str | None = None  # of the mirror's version

    async def begin(self, client: EngineClient, version: int) -> None:
        await super().begin(client, version)
        await self._has(client, version)

    async def _has(self, client: EngineClient, version: int) -> None:
        """The server has loaded the mirror."""
        if self.model == self.home:
            await client.loaded(version)
            self._since, self._writes = version, []

    async def _pull(self, version: int) -> PulledVersion:
        pulled = await super()._pull(version)
        goes_on = self._writes is not None and pulled.writes is not None and self._digest in (None, pulled.since)
        self._writes = [*(self._writes or []), *(pulled.writes or [])] if goes_on else None
        self._digest = pulled.digest
        return pulled

    async def _change(self, client: EngineClient, version: int) -> float:
        file = self.home / CHANGES
        if self._since is None or self._writes is None or self.model != self.home:
            paused = await super()._change(client, version)
            await self._has(client, version)
            return paused
        tensors = Mirror(self.home).tensors()
        since, writes, self._since = self._since, self._writes, None  # until it is done
        if await asyncio.to_thread(write_patches, file, writes, tensors, since=since, version=version):
            paused = await client.patch(file, self.home, version)
            self._since, self._writes = version, []
            return paused
        paused = await super()._change(client, version)
        await self._has(client, version)
        return paused


async def _labelled(client: EngineClient, model: Path, version: int) -> None:
    await client.set_version(version)
    await client.check(model, version)


def reader_of(mirror: Path) -> str:
    """The same name for the same mirror, and no other's: `pagurus weights ls` shows it."""
    host = "".join(letter if letter.isalnum() else "-" for letter in socket.gethostname())[:40]
    return f"{mirror.stem}-{host}-{blake3(str(mirror).encode()).hexdigest(length=4)}"


def _copy_adapter(mirror: Path, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name in (adapter.WEIGHTS, adapter.CONFIG):
        shutil.copyfile(mirror / name, directory / name)


def _forget_adapters(directory: Path, loaded: set[str]) -> None:
    for path in directory.iterdir():
        if path.name not in loaded:
            shutil.rmtree(path)
