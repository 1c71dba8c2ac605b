"""An engine that pulls its weights: exact changes between two steps, bit for bit, while requests are in flight."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollout.engine.client import EngineClient, Generation, Sampling, wait_healthy
from rollout.engine.embedded.model import ModelConfig, Qwen3
from rollout.engine.supervisor import free_port
from rollout.weights.store import VersionStore
from sandbox.errors import Invalid, PagurusError
from trainer.weights import Publisher

CONFIG = ModelConfig(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_attention_heads=2, num_key_value_heads=2, head_dim=32,
    eos_token_id=1, tie_word_embeddings=True,
)  # fmt: skip


class Policy:
    """A model that is trained, what was published of each version, and what it says."""

    def __init__(self, store: VersionStore, **options: int):
        self.model = Qwen3(CONFIG)
        self.model.initialise(0)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(5)
        self._publisher = Publisher(store, **options)
        self._random = torch.Generator().manual_seed(1)
        self.versions: dict[int, dict[str, Tensor]] = {}

    def publish(self, version: int, size: float = 1e-3) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                chosen = torch.rand(parameter.shape, generator=self._random) < 0.02
                parameter += chosen * torch.randn(parameter.shape, generator=self._random) * size
        state = self.model.state_dict()
        self._publisher.publish(version, state, {"config.json": json.dumps(CONFIG.to_json()).encode()})
        self.versions[version] = {name: tensor.bfloat16() for name, tensor in state.items()}

    def digests(self, version: int) -> dict[str, str]:
        """As the engine computes with them: widened to float32."""
        result = {
            name: hashlib.sha256(tensor.float().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
            for name, tensor in self.versions[version].items()
        }
        return {"lm_head.weight": result["model.embed_tokens.weight"], **result}

    def logprobs(self, version: int, tokens: list[int]) -> Tensor:
        """Of each token but the first."""
        reference = Qwen3(CONFIG)
        reference.load_state_dict({name: tensor.float() for name, tensor in self.versions[version].items()})
        with torch.no_grad():
            every = torch.log_softmax(reference(torch.tensor([tokens]))[0], dim=-1)
        return every[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


@contextlib.asynccontextmanager
async def engine(weights: Path, mirror: Path, *arguments: str) -> AsyncIterator[tuple[EngineClient, int]]:
    port = free_port()
    command = [sys.executable, "-m", "rollout.engine.embedded.server", "--model", mirror, "--port", str(port)]
    process = await asyncio.create_subprocess_exec(
        *command, "--weights", weights, *arguments, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        async with EngineClient(f"http://127.0.0.1:{port}") as client:
            await asyncio.wait_for(wait_healthy(client), 300)
            yield client, process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    return VersionStore(tmp_path / "weights")


async def test_versions_change_in_flight(store: VersionStore, tmp_path: Path) -> None:
    policy = Policy(store, complete_every=3)
    policy.publish(0)
    async with engine(store.directory, tmp_path / "mirror") as (client, _):
        assert await client.version() == 0
        assert await client.checksums() == policy.digests(0)
        sampling = Sampling(max_tokens=600, ignore_eos=True)
        changed = asyncio.Event()

        async def keep_asking(number: int) -> list[Generation]:
            result = [await client.generate([5, 6 + number], sampling)]
            while not changed.is_set():
                result.append(await client.generate([5, 6 + number], sampling))
            return result

        flights = [asyncio.create_task(keep_asking(n)) for n in range(4)]
        while not (await client.statistics()).generated_tokens:  # noqa: ASYNC110 - another process's
            await asyncio.sleep(0.01)
        kinds = set()
        for version in range(1, 6):
            policy.publish(version)
            if version != 4:  # one is skipped: two steps at once
                kinds.add((await client.pull(version)).complete)
                applied = await client.apply(version)
                assert applied.version == version == await client.version()
                assert await client.checksums() == policy.digests(version)
        assert kinds == {False}
        changed.set()
        answers = await asyncio.gather(*flights)
    observed = set()
    for number, answer in [(number, item) for number, result in enumerate(answers) for item in result]:
        tokens = [5, 6 + number, *answer.token_ids]
        for span in answer.spans:
            observed.add(span.version)
            expected = policy.logprobs(span.version, tokens[: 2 + span.end])[1 + span.start :]
            assert torch.allclose(torch.tensor(answer.logprobs[span.start : span.end]), expected, atol=1e-3)
    assert len(observed) >= 2 and observed <= {0, 1, 2, 3, 5}


async def test_an_engine_that_was_killed_begins_where_it_is_told(store: VersionStore, tmp_path: Path) -> None:
    policy = Policy(store, complete_every=10, keep=5)
    policy.publish(0)
    policy.publish(1)
    async with engine(store.directory, tmp_path / "mirror", "--at", "0") as (client, pid):
        assert await client.version() == 0
        pulled = await client.pull()
        assert pulled.version == 1
        os.kill(pid, signal.SIGKILL)  # the mirror is ahead of what was served
    policy.publish(2)
    async with engine(store.directory, tmp_path / "mirror", "--at", "1") as (client, _):
        assert await client.version() == 1
        assert await client.checksums() == policy.digests(1)
        await client.pull(2)
        await client.apply(2)
        assert await client.checksums() == policy.digests(2)
        await client.pull(0)  # and back
        await client.apply(0)
        assert await client.checksums() == policy.digests(0)


async def test_pulls_that_were_not_applied_add_up(store: VersionStore, tmp_path: Path) -> None:
    policy = Policy(store, complete_every=10)
    policy.publish(0)
    async with engine(store.directory, tmp_path / "mirror") as (client, _):
        for version in (1, 2, 3):
            policy.publish(version)
            await client.pull(version)
        with pytest.raises(Invalid, match="version 2 is not ready"):
            await client.apply(2)
        assert await client.checksums() == policy.digests(0)
        await client.apply(3)
        assert await client.checksums() == policy.digests(3)


async def test_a_mirror_that_was_damaged_is_not_served(store: VersionStore, tmp_path: Path) -> None:
    policy = Policy(store, complete_every=10)
    policy.publish(0)
    async with engine(store.directory, tmp_path / "mirror") as (client, _):
        with (tmp_path / "mirror" / "model.safetensors").open("r+b") as file:
            file.seek(-300, os.SEEK_END)
            file.write(bytes(range(200)))
        policy.publish(1)
        assert (await client.pull(1)).complete
        await client.apply(1)
        assert await client.checksums() == policy.digests(1)


async def test_a_version_whose_content_vanished_is_said_and_the_old_one_is_served(
    store: VersionStore, tmp_path: Path
) -> None:
    policy = Policy(store, complete_every=10)
    policy.publish(0)
    async with engine(store.directory, tmp_path / "mirror") as (client, _):
        policy.publish(1)
        for path in store.directory.glob("chunks/??/*"):
            path.unlink()
        with pytest.raises(PagurusError, match=r"has no weights .*publish again"):
            await client.pull(1)
        assert (await client.version(), await client.checksums()) == (0, policy.digests(0))
