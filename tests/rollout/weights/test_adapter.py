"""Adapters as versions: a few matrices travel, an engine computes base and adapter together, the base never changes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollout.engine.client import EngineClient, Sampling
from rollout.engine.embedded.adapter import load_served
from rollout.engine.embedded.model import ModelConfig, Qwen3, load_model, save_model
from rollout.engine.launch import vllm
from rollout.engine.supervisor import EngineSupervisor
from rollout.engine.weights import weights_of
from rollout.weights import adapter
from rollout.weights.export import export
from rollout.weights.mirror import Mirror
from rollout.weights.puller import Puller
from rollout.weights.source import DirectorySource
from rollout.weights.store import VersionStore
from sandbox.errors import Invalid, NotFound
from tests.rollout.test_engine import PYTHON
from tests.rollout.weights.test_engine import CONFIG, engine
from trainer.weights import Publisher

RANK, ALPHA = 8, 16
MODULES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")


class Learnt:
    """A base model and an adapter that moves, as every version of it was published."""

    def __init__(self, root: Path):
        self.base = Qwen3(CONFIG)
        self.base.initialise(0)
        with torch.no_grad():
            for parameter in self.base.parameters():
                parameter.mul_(5 if parameter.dim() == 2 else 1)
        save_model(self.base, root / "base")
        self.directory, self.store = root / "base", VersionStore(root / "weights")
        self.publisher = Publisher(self.store, complete_every=3)
        self._random = torch.Generator().manual_seed(1)
        self.versions: dict[int, dict[str, Tensor]] = {}

    def publish(self, version: int) -> None:
        tensors = {}
        for layer in range(CONFIG.num_hidden_layers):
            for kind in MODULES:
                module = f"model.layers.{layer}.{kind}"
                matrix = self.base.get_submodule(module)
                shapes = (RANK, matrix.in_features), (matrix.out_features, RANK)
                for name, shape in zip(adapter.names_of(module), shapes, strict=True):
                    tensors[name] = (torch.randn(shape, generator=self._random) * 0.3).bfloat16()
        config = {"r": RANK, "lora_alpha": ALPHA, "target_modules": [kind.rpartition(".")[2] for kind in MODULES]}
        config |= {"base_model_name_or_path": str(self.directory), "peft_type": "LORA", "bias": "none"}
        self.publisher.publish(version, tensors, {adapter.CONFIG: json.dumps(config).encode()})
        self.versions[version] = tensors

    def merged(self, version: int) -> Qwen3:
        model = load_model(self.directory)
        for name, tensor in self.versions[version].items():
            if ".lora_A." in name:
                up = self.versions[version][name.replace("lora_A", "lora_B")].float()
                model.get_submodule(adapter.module_of(name)).weight.data += ALPHA / RANK * (up @ tensor.float())
        return model

    def logprobs(self, version: int, tokens: list[int]) -> Tensor:
        """Of each token but the first."""
        with torch.no_grad():
            every = torch.log_softmax(self.merged(version)(torch.tensor([tokens]))[0], dim=-1)
        return every[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


@pytest.fixture
def learnt(tmp_path: Path) -> Learnt:
    return Learnt(tmp_path)


async def test_an_engine_takes_adapters_in_flight(learnt: Learnt, tmp_path: Path) -> None:
    learnt.publish(0)
    async with engine(learnt.store.directory, tmp_path / "mirror") as (client, _):
        sampling, changed = Sampling(max_tokens=300, ignore_eos=True), asyncio.Event()

        async def keep_asking(number: int) -> list:  # type: ignore[type-arg]
            result = [await client.generate([5, 6 + number], sampling)]
            while not changed.is_set():
                result.append(await client.generate([5, 6 + number], sampling))
            return result

        flights = [asyncio.create_task(keep_asking(number)) for number in range(3)]
        while not (await client.statistics()).generated_tokens:  # noqa: ASYNC110 - another process's
            await asyncio.sleep(0.01)
        base = {name: digest for name, digest in (await client.checksums()).items() if "lora" not in name}
        for version in (1, 2):
            learnt.publish(version)
            pulled = await client.pull(version)
            size = sum(tensor.numel() * 2 for tensor in learnt.versions[version].values())
            assert pulled.bytes < 1.3 * size + 4000  # nothing of the base
            await client.apply(version)
            await client.check(tmp_path / "mirror", version)
            live = await client.checksums()
            for name, tensor in learnt.versions[version].items():
                assert live[name] == hashlib.sha256(tensor.float().numpy().tobytes()).hexdigest()
            assert {name: live[name] for name in base} == base
        changed.set()
        answers = await asyncio.gather(*flights)
    observed = set()
    for number, answer in [(number, item) for number, result in enumerate(answers) for item in result]:
        tokens = [5, 6 + number, *answer.token_ids]
        for span in answer.spans:
            observed.add(span.version)
            expected = learnt.logprobs(span.version, tokens[: 2 + span.end])[1 + span.start :]
            assert torch.allclose(torch.tensor(answer.logprobs[span.start : span.end]), expected, atol=2e-3)
    assert len(observed) >= 2


async def test_what_is_exported_is_base_and_adapter_together(learnt: Learnt, tmp_path: Path) -> None:
    learnt.publish(0)
    learnt.publish(1)
    assert await asyncio.to_thread(export, learnt.store.directory, tmp_path / "out", 1) == 1
    result, expected = load_model(tmp_path / "out").state_dict(), learnt.merged(1).state_dict()
    assert all(torch.allclose(result[name], expected[name], atol=1e-6) for name in expected)
    assert ModelConfig.load(tmp_path / "out") == CONFIG
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


async def test_a_base_that_is_elsewhere_is_named(learnt: Learnt, tmp_path: Path) -> None:
    learnt.publish(0)
    puller = Puller(DirectorySource(learnt.store), Mirror(tmp_path / "mirror"), name="m")
    await puller.pull()
    await puller.close()
    learnt.directory.rename(tmp_path / "moved")
    with pytest.raises(NotFound, match="--base"):
        load_served(tmp_path / "mirror")
    model, weights = load_served(tmp_path / "mirror", tmp_path / "moved")
    assert set(weights) == set(learnt.versions[0])
    learnt.directory = tmp_path / "moved"
    tokens = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        assert torch.allclose(model(tokens), learnt.merged(0)(tokens), atol=1e-4)


async def test_a_mirror_goes_from_weights_to_an_adapter_and_back(learnt: Learnt, tmp_path: Path) -> None:
    """Two runs may follow one another in one place: no file of the one is taken for the other's."""
    learnt.publish(0)
    puller = Puller(DirectorySource(learnt.store), Mirror(tmp_path / "mirror"), name="m")
    await puller.pull()
    files = {"config.json": json.dumps(CONFIG.to_json()).encode()}
    for version, tensors in ((1, dict(learnt.base.state_dict())), (2, learnt.versions[0])):
        learnt.publisher.publish(version, tensors, files if version == 1 else {adapter.CONFIG: b"{}"})
        await puller.pull()
        retained = [path.name for path in (tmp_path / "mirror").glob("*.safetensors")]
        assert retained == [["model.safetensors", "adapter_model.safetensors"][version - 1]]
    await puller.close()


def adapters_on_disk(directory: Path) -> list[str]:
    return [path.name for path in directory.rglob("*.adapters/*")]


@pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make setup-vllm")
async def test_vllm_loads_adapters_beside_its_model(learnt: Learnt, tmp_path: Path) -> None:
    learnt.publish(0)
    launch = vllm(python=PYTHON, slots=8, length=256, lora=RANK)
    supervisor = EngineSupervisor(launch, learnt.store.directory, 0, log=tmp_path / "vllm.log")
    assert weights_of(launch, learnt.store.directory, tmp_path / "x").place == str(learnt.store.directory)
    async with supervisor as served:
        flight = asyncio.create_task(served.generate([5, 6], Sampling(max_tokens=200, ignore_eos=True)))
        learnt.publish(1)
        published = await served.publish(learnt.store.directory, 1)
        assert published.paused_s == 0 and published.bytes < 300_000
        later = await served.generate([5, 7], Sampling(max_tokens=12, ignore_eos=True))
        early = await flight
        assert [span.version for span in later.spans] == [1]
        for first, answer in ((6, early), (7, later)):
            expected = learnt.logprobs(answer.spans[0].version, [5, first, *answer.token_ids])[1:]
            assert torch.allclose(torch.tensor(answer.logprobs), expected, atol=5e-3)
        client: EngineClient = served.client
        learnt.publish(2)
        learnt.publish(3)
        await served.publish(learnt.store.directory, 3)
        assert await client.version() == 3
        long = [asyncio.create_task(served.generate([5, 8], Sampling(max_tokens=200, ignore_eos=True)))]
        for version in (4, 5, 6):
            learnt.publish(version)
            await served.publish(learnt.store.directory, version)
            long.append(asyncio.create_task(served.generate([5, 8], Sampling(max_tokens=200, ignore_eos=True))))
        answers = await asyncio.gather(*long)
        assert [answer.spans[0].version for answer in answers] == [3, 4, 5, 6]
        for answer in answers:  # each to its end with the adapter that it began with, four of them at once
            expected = learnt.logprobs(answer.spans[0].version, [5, 8, *answer.token_ids])[1:]
            assert torch.allclose(torch.tensor(answer.logprobs), expected, atol=5e-3)
        learnt.publish(7)
        await served.publish(learnt.store.directory, 7)
        assert adapters_on_disk(tmp_path) == ["7"]


def test_ranks_that_vllm_has_no_room_for_are_refused(tmp_path: Path) -> None:
    (tmp_path / "python").touch()
    launch = vllm(python=tmp_path / "python", lora=12)
    assert "16" in launch.command(tmp_path, 1).argv
    with pytest.raises(Invalid, match="rank 1000"):
        vllm(python=tmp_path / "python", lora=1000).command(tmp_path, 1)
