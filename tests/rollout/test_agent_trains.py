"""mini-swe-agent from PyPI, unmodified, in a sandbox: one optimiser step is taken on what its model saw and sampled,
token for token, also if everything was killed in the middle of it and restored."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from rollout.decide.engines.routing import RoutingRules
from rollout.engine.client import Generation, Sampling, WeightSpan
from rollout.engine.embedded.model import ModelConfig, Qwen3
from rollout.pool.endpoints import Endpoints
from rollout.pool.pool import EnginePool
from rollout.pool.recorder import RecordedSample, SampleRecorder
from sandbox import Client, Sandbox
from sandbox.messages import Gateway
from sandbox.messages import Upstream as Address
from tests.daemon.gateway.test_agents import (
    COMMANDS,
    TIMEOUT,
    _recorded,
    _turn,
    agents,
    daemon,
    end_inside,
    start_inside,
    workshop,
)
from tests.support.chat_models import need_models, renderer
from tests.support.daemon_host import kill_everything, tasks_of, until
from tests.support.endpoint_engines import Complete, Served
from trainer.batches.sample import Sample
from trainer.learner import Learner
from trainer.models.scorer import Scorer
from trainer.objectives import named
from trainer.settings import OptimiserSettings

__all__ = ["agents", "daemon"]  # fixtures

pytestmark = pytest.mark.filterwarnings("default")


@dataclass
class Forced(Complete):
    """An engine whose model really computes, and that is made to say what a test wants, letter by letter.

    Its log-probabilities are those of its weights, so the trainer must find the same for the same tokens.
    """

    model: Qwen3
    renderer: Any
    texts: list[str]
    hold_at: int = 0  # which answer waits for `gate`
    requested: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "") -> Generation:
        self.requested += 1
        if self.requested == self.hold_at:
            await self.gate.wait()
        ids = [*self._spelt(self.texts[self.requested - 1]), self.renderer.stops[0]]
        logprobs = await asyncio.to_thread(self._logprobs, prompt_ids, ids)
        spans = [WeightSpan(0, 0, len(ids))]
        return Generation(token_ids=ids, logprobs=logprobs, spans=spans, finish_reason="stop")

    def _spelt(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            piece = next((mark for mark in self.renderer._marked if text.startswith(mark)), text[0])
            ids += self.renderer._encoder.encode(piece, add_special_tokens=False).ids
            text = text[len(piece) :]
        return ids

    def _logprobs(self, prompt: list[int], ids: list[int]) -> list[float]:
        with torch.no_grad():
            tokens = torch.tensor([prompt + ids])
            hidden = self.model.hidden(tokens, torch.arange(tokens.shape[1]), _causal)[0, len(prompt) - 1 : -1]
            result = torch.log_softmax(self.model.head(hidden), dim=-1)
        return [float(result[n, token]) for n, token in enumerate(ids)]


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def call(command: str, words: str) -> str:
    """As no template would write it: two spaces, no space."""
    return f'{words}\n<tool_call>\n{{"name":  "bash","arguments":{json.dumps({"command": command})}}}\n</tool_call>'


REPAIR = [call(command, f"Step {n}.") for n, command in enumerate(COMMANDS)]
GIVE_UP = [call(COMMANDS[-1], "I give up.")]


@asynccontextmanager
async def work(host: Client, engine: Forced, name: str) -> AsyncIterator[tuple[Sandbox, SampleRecorder]]:
    """An agent at work in a sandbox, its model behind the gateway, a door and a pool."""
    async with EnginePool(rules=RoutingRules(silence=10 * TIMEOUT)) as pool:  # a test holds the engine
        await pool.join("only", Served(engine))
        recorder = SampleRecorder(pool, engine.renderer, length=8000)
        async with at_the_limiter(host, recorder, name) as sandbox:
            yield sandbox, recorder


@asynccontextmanager
async def at_the_limiter(host: Client, recorder: SampleRecorder, name: str) -> AsyncIterator[Sandbox]:
    async with Endpoints(recorder) as endpoints:
        await host.gateway.put(name, Address(url=endpoints.url(name)))
        async with await workshop(host, Gateway(upstream=name)) as sandbox:
            await start_inside(sandbox)
            yield sandbox
        await host.gateway.drop(name)


async def undisturbed(host: Client, engine: Forced, name: str) -> tuple[list[RecordedSample], float]:
    async with work(host, engine, name) as (sandbox, recorder):
        await end_inside(sandbox)
        reward = float((await sandbox.exec("python3 check.py", cwd="/srv")).exit_code == 0)
        return recorder.session(name).samples, reward


async def killed_and_restored(host: Client, engine: Forced, name: str) -> tuple[list[RecordedSample], float]:
    """Killed while its model thinks about the third answer, which comes while nobody is there."""
    engine.hold_at = 3
    async with work(host, engine, name) as (sandbox, recorder):
        await until(lambda: engine.requested == 3, "it has repaired and asks again", TIMEOUT)

        turn = await until(lambda: _turn(sandbox, 3), "that ended a turn")
        await sandbox.captured(turn)
        kill_everything(sandbox.id)
        await until(lambda: not tasks_of(sandbox.id), "all of it is dead")
        engine.gate.set()
        await until(lambda: _recorded(sandbox, 3), "the answer is recorded")
        await sandbox.restore()
        await end_inside(sandbox)
        reward = float((await sandbox.exec("python3 check.py", cwd="/srv")).exit_code == 0)
        return recorder.session(name).samples, reward


async def test_an_unmodified_agent_s_work_is_one_optimiser_step(host: Client) -> None:
    need_models()
    torch.set_num_threads(1)
    shown = renderer("qwen2.5")
    size = -(-shown._encoder.get_vocab_size() // 64) * 64
    model = Qwen3(
        ModelConfig(
            vocab_size=size, hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1,
            head_dim=16, max_position_embeddings=8192,
        )
    )  # fmt: skip
    model.initialise(0)

    calm, reward = await undisturbed(host, Forced(model, shown, REPAIR), "calm")
    lazy, nothing = await undisturbed(host, Forced(model, shown, GIVE_UP), "lazy")
    injected, again = await killed_and_restored(host, Forced(model, shown, REPAIR), "injected")
    assert (reward, nothing, again) == (1.0, 0.0, 1.0)
    assert len(calm) == len(lazy) == 1 and calm[0].answers == len(COMMANDS)
    assert calm == injected  # tokens, masks, log-probabilities, versions
    for text in REPAIR:
        assert text in shown.decode(calm[0].tokens)

    scored = [(calm, reward), (lazy, nothing), (injected, again)]
    samples = [
        Sample(
            tokens=item.tokens, mask=item.mask, logprobs=item.logprobs, reward=reward, group="calc",
            temperature=item.temperature, version=min(v for v in item.versions if v >= 0), name=f"calc/{n}",
        )
        for n, (recorded, reward) in enumerate(scored)
        for item in recorded
    ]  # fmt: skip
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stats = Learner(Scorer(model), named("pooled"), OptimiserSettings(rate=1e-3)).step(samples)
    assert stats.refused == {} and stats.trajectories == 3
    assert stats.summary.mismatch_kl < 1e-9  # the trainer's model finds the engine's numbers for these very tokens
    assert stats.grad_norm > 0
    assert any(not torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
