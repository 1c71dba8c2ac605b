"""Weights on their way while publishers, relays and readers die and bytes flip: is any version ever torn?"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from bench.harness.relays import forked, free_port, relay_process
from rollout.weights.mirror import Mirror
from rollout.weights.puller import Puller
from rollout.weights.source import DirectorySource, HttpSource
from rollout.weights.store import VersionStore
from sandbox.errors import PagurusError
from trainer.weights import Publisher

FILES = {"config.json": b"{}"}
Metrics = dict[str, Any]


class Walk:
    """A small model that moves as one under training does."""

    def __init__(self, seed: int):
        self._random = torch.Generator().manual_seed(seed)
        shapes = {"model.embed_tokens.weight": (2000, 64), "model.layers.0.self_attn.q_proj.weight": (64, 64),
                  "model.layers.0.mlp.down_proj.weight": (64, 512), "model.norm.weight": (64,)}  # fmt: skip
        self.tensors = {name: torch.randn(shape, generator=self._random) * 0.02 for name, shape in shapes.items()}

    def step(self) -> dict[str, Tensor]:
        for tensor in self.tensors.values():
            tensor += torch.randn(tensor.shape, generator=self._random) * 3e-6
        return self.tensors


def holds(mirror: Path, tensors: dict[str, Tensor]) -> bool:
    got = load_file(mirror / "model.safetensors")
    return got.keys() == tensors.keys() and all(
        torch.equal(got[name].view(torch.int16), tensor.bfloat16().view(torch.int16))
        for name, tensor in tensors.items()
    )


async def versions(root: Path, count: int, seed: int) -> Metrics:
    """Bit for bit, over HTTP, whatever dies on the way."""
    chance, walk = random.Random(seed), Walk(seed)
    store = VersionStore(root / "walk")
    publisher = Publisher(store, complete_every=16, keep=4)
    origin, near = free_port(), free_port()
    url = f"http://127.0.0.1:{near}"
    tally = {
        "pulls": 0,
        "skipped": 0,
        "readers_restarted": 0,
        "publishers_restarted": 0,
        "relays_killed": 0,
        "flipped": 0,
    }
    identical = True
    relay = forked(relay_process(root / "cache", near, f"http://127.0.0.1:{origin}"))
    with forked(relay_process(store.directory, origin)):
        relay.__enter__()
        puller = Puller(HttpSource(url), Mirror(root / "mirror"), name="reader")
        for version in range(count):
            if chance.random() < 0.1:
                tally["publishers_restarted"] += 1
                publisher.close()
                publisher = Publisher(store, complete_every=16, keep=4)
                publisher.resume(walk.tensors, {name: item.shape for name, item in walk.tensors.items()})
            publisher.publish(version, walk.step(), FILES)
            if chance.random() < 0.3:
                tally["skipped"] += 1
                continue
            if chance.random() < 0.2:
                tally["readers_restarted"] += 1
                await puller.close()
                puller = Puller(HttpSource(url), Mirror(root / "mirror"), name="reader")
            if chance.random() < 0.2:
                tally["flipped"] += flip(root / "cache", chance)
            pulling = asyncio.create_task(pull_newest(puller, version))
            if chance.random() < 0.2:
                await asyncio.sleep(chance.random() * 0.05)
                tally["relays_killed"] += 1
                relay.__exit__(None, None, None)
                relay = forked(relay_process(root / "cache", near, f"http://127.0.0.1:{origin}"))
                relay.__enter__()
            await pulling
            tally["pulls"] += 1
            identical = identical and holds(root / "mirror", walk.tensors)
        relay.__exit__(None, None, None)
        await puller.close()
    publisher.close()
    return {"versions": count, **tally, "bit_identical": identical}


async def pull_newest(puller: Puller, version: int) -> None:
    """The relay's listing may be a fifth of a second old."""
    while (newest := await puller.newest()) is None or newest.version < version:  # noqa: ASYNC110 - another process's
        await asyncio.sleep(0.05)
    await puller.pull(version)


def flip(cache: Path, chance: random.Random) -> int:
    """One byte of something that a relay holds."""
    result = sorted(cache.glob("chunks/??/*"))
    if not result:
        return 0
    path = chance.choice(result)
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(bytes(content))
    return 1


async def kills(root: Path, trials: int, seed: int) -> Metrics:
    """SIGKILL at any instant of a publication, a relay's answer, a pull."""
    chance = random.Random(seed)
    torn, landed = 0, {"publisher": 0, "relay": 0, "reader": 0}
    store = VersionStore(root / "killed")
    walks: dict[int, dict[str, Tensor]] = {}
    for trial in range(trials):
        who = chance.choice(list(landed))
        walk = Walk(trial % 7)
        number = 1 + max([ref.version for ref in store.versions()], default=-1)
        walks[number] = {name: tensor.clone() for name, tensor in walk.step().items()}
        port = free_port()

        def publish(number: int = number) -> None:
            Publisher(store, complete_every=3, keep=3).publish(number, walks[number], FILES)

        def pull() -> None:
            asyncio.run(_reader(store, root / "killed-mirror").pull())

        def relayed(port: int = port) -> None:
            relay_process(store.directory, port)()

        if who != "publisher":
            publish()
        with forked({"publisher": publish, "relay": relayed, "reader": pull}[who]) as pid:
            puller = Puller(HttpSource(f"http://127.0.0.1:{port}"), Mirror(root / "killed-mirror"), name="r")
            pulling = asyncio.create_task(puller.pull()) if who == "relay" else None
            await asyncio.sleep(chance.random() * 0.06)
            landed[who] += alive(pid)
            os.kill(pid, signal.SIGKILL)
            if pulling is not None:
                pulling.cancel()
                await asyncio.gather(pulling, return_exceptions=True)
            await puller.close()
        torn += await is_torn(store, root / "killed-mirror", walks)
    return {"trials": trials, "killed_at_work": landed, "torn": torn}


def alive(pid: int) -> bool:
    """Whether a child still ran; it is left to be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


async def is_torn(store: VersionStore, mirror: Path, walks: dict[int, dict[str, Tensor]]) -> bool:
    """Whether anything is listed that is not whole, or the mirror says a version that it is not; then bring it on."""
    state = Mirror(mirror).state
    if state.version is not None and not holds(mirror, walks[state.version]):
        return True
    puller = _reader(store, mirror)
    try:
        for ref in store.versions():
            await puller.pull(ref.version)
            if not holds(mirror, walks[ref.version]):
                return True
    except PagurusError as error:
        print(f"after a kill: {error}", file=sys.stderr)
        return True
    finally:
        await puller.close()
    return False


def _reader(store: VersionStore, directory: Path) -> Puller:
    return Puller(DirectorySource(store), Mirror(directory), name="reader")
