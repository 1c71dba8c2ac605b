"""What runs inside vLLM's workers: changes reach exactly the parameters that a full load gives, on each rank."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollout.engine.client import EngineClient
from rollout.engine.launch import vllm
from rollout.engine.patches import INSIDE, write_patches
from rollout.engine.weights import InPlaceWeights
from rollout.weights.mirror import Write
from rollout.weights.store import VersionStore
from tests.rollout.test_engine import PYTHON
from tests.support.weights import FILES
from trainer.weights import Publisher

SUPPORT = Path(__file__).parents[2] / "support"
SHAPES = {"mlp.gate_proj.weight": (48, 16), "mlp.up_proj.weight": (48, 16), "mlp.down_proj.weight": (16, 48),
          "embed_tokens.weight": (100, 16), "norm.weight": (16,)}  # fmt: skip
INTERPRETERS = ["fake", pytest.param("vllm", marks=pytest.mark.skipif(not PYTHON.exists(), reason="make setup-vllm"))]


def changed(tensors: dict[str, Tensor], seed: int) -> tuple[dict[str, Tensor], list[Write]]:
    """The next version, and what differs; one tensor is written as a whole."""
    random = torch.Generator().manual_seed(seed)
    after, writes = {}, []
    for name, tensor in tensors.items():
        new = tensor.clone().view(-1)
        if name == "norm.weight":
            new = torch.randn(new.shape, generator=random).bfloat16()
            writes.append(Write(name, None, new.view(torch.int16).numpy().view("uint16")))
        else:
            positions = torch.randperm(len(new), generator=random)[: len(new) // 10].sort()[0]
            new[positions] = torch.randn(len(positions), generator=random).bfloat16()
            values = new[positions].view(torch.int16).numpy().view("uint16")
            writes.append(Write(name, positions.numpy(), values))
        after[name] = new.view(tensor.shape)
    return after, writes


def workers(kind: str, ranks: int, directory: Path, files: list[Path]) -> list:  # type: ignore[type-arg]
    """What each rank said and has, and last what rank 0 did without the first file."""
    places = [INSIDE, *([SUPPORT / "fake_vllm"] if kind == "fake" else [])]
    done = subprocess.run(
        [sys.executable if kind == "fake" else PYTHON, SUPPORT / "vllm_worker.py", str(ranks), directory, *files],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places)), "VLLM_TARGET_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", INTERPRETERS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_rank_has_what_a_full_load_gives(kind: str, ranks: int, tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    versions = [{name: torch.randn(shape, generator=random).bfloat16() for name, shape in SHAPES.items()}]
    files = []
    dtypes = {name: ("BF16", shape) for name, shape in SHAPES.items()}
    for version in (1, 2):
        after, writes = changed(versions[-1], version)
        versions.append(after)
        files.append(tmp_path / f"{version}.changes")
        write_patches(files[-1], writes, dtypes, since=version - 1, version=version)
    for version, tensors in enumerate(versions):
        torch.save(tensors, tmp_path / f"{version}.pt")
    *every, skipping = workers(kind, ranks, tmp_path, files)
    assert len(every) == ranks
    for result in every:
        assert result["said"] == [{"version": 1}, {"version": 2}]
        assert result["digests"] == result["expected"]["2"] != result["expected"]["1"]
    assert skipping["said"] == [
        {"refused": "changes from version 1 do not fit weights of version 0", "untouched": True}
    ]


class Reported(EngineClient):
    """A server that only writes down what it is told, and keeps the files of changes for a worker."""

    def __init__(self, retained: Path):
        super().__init__("http://nowhere")
        self.retained, self.calls, self.files = retained, [], []  # type: ignore[var-annotated]

    async def patch(self, file: Path, directory: Path, version: int, *, timeout: float = 0) -> float:
        self.calls.append(("patch", version))
        self.files.append(shutil.copy(file, self.retained / f"{version}.changes"))
        return 0.0

    async def reload(self, directory: Path, version: int, *, timeout: float = 0) -> float:
        self.calls.append(("reload", version))
        return 0.0

    async def loaded(self, version: int) -> None:
        self.calls.append(("loaded", version))

    async def set_version(self, version: int) -> None: ...

    async def check(self, directory: Path, version: int, *, reloaded: bool = False) -> None: ...


async def test_what_is_pulled_beside_a_server_reaches_its_workers(tmp_path: Path) -> None:
    """Published, pulled by a process of its own, written as a file, applied by two ranks: the bits of a full load."""
    random = torch.Generator().manual_seed(0)
    store = VersionStore(tmp_path / "weights")
    publisher, versions = Publisher(store, complete_every=100, keep=100), [{}]  # type: ignore[var-annotated]
    versions[0] = {name: torch.randn(shape, generator=random).bfloat16() for name, shape in SHAPES.items()}
    publisher.publish(0, versions[0], FILES)
    client, weights = Reported(tmp_path), InPlaceWeights(str(store.directory), tmp_path / "mirror")
    await weights.ready(0)
    await weights.begin(client, 0)
    for version in (1, 2, 3, 4):
        versions.append(changed(versions[-1], version)[0])
        publisher.publish(version, versions[-1], FILES)
        await weights.fetch(client, version)
        if version != 2:  # which is fetched alone: its changes are taken with those of the next
            await weights.take(client, version)
    await weights.take(client, 0)  # back: nothing leads there but the whole image
    await weights.take(client, 1)
    await weights.close()
    assert client.calls == [
        ("loaded", 0), ("patch", 1), ("patch", 3), ("patch", 4), ("reload", 0), ("loaded", 0), ("patch", 1),
    ]  # fmt: skip
    for version, tensors in enumerate(versions):
        torch.save(tensors, tmp_path / f"{version}.pt")
    for result in (await asyncio.to_thread(workers, "fake", 2, tmp_path, client.files[:3]))[:2]:
        assert [item["version"] for item in result["said"]] == [1, 3, 4]
        assert result["digests"] == result["expected"]["4"]


def test_words_of_four_bytes_are_not_changed_in_place(tmp_path: Path) -> None:
    writes = [Write("norm.weight", None, torch.zeros(32, dtype=torch.int16).numpy().view("uint16"))]
    assert not write_patches(tmp_path / "f", writes, {"norm.weight": ("F32", (16,))}, since=0, version=1)
    assert not (tmp_path / "f").exists()


def test_a_server_is_told_of_the_engine(tmp_path: Path) -> None:
    (tmp_path / "python").touch()
    command = vllm(python=tmp_path / "python", transfer=True).command(tmp_path, 1)
    assert "pagurus_vllm.WorkerExtension" in command.argv and '{"backend": "pagurus"}' in command.argv
    assert command.env["PYTHONPATH"].split(os.pathsep)[0] == str(INSIDE)
