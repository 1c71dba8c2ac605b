"""Engines behind the doors, one contract: a fake that computes nothing, the embedded engine, a real vLLM."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollout.engine.client import Delta, Generation, PublishResult, Sampling, WeightSpan
from rollout.engine.launch import VLLM_PYTHON, embedded, vllm
from rollout.pool.answer import PartialGeneration
from rollout.pool.pool import Enough
from rollout.pool.started import started
from tests.support.chat_models import SMOL

VLLM = Path(os.environ.get("PAGURUS_TEST_VLLM", VLLM_PYTHON))
NO_VLLM = pytest.mark.skipif(not VLLM.exists(), reason=f"vLLM is not installed ({VLLM}); run `make setup-vllm`")
ENGINES = ["fake", "embedded", pytest.param("vllm", marks=NO_VLLM)]
LENGTH = 512


def small_chat_model(directory: Path, version: int = 0) -> Path:
    """A tiny Qwen3 of random weights with SmolLM2's tokenizer and template."""
    from rollout.engine.embedded.model import ModelConfig, Qwen3, save_model

    config = ModelConfig(
        vocab_size=49152, hidden_size=64, intermediate_size=128, num_attention_heads=2, num_key_value_heads=2,
        head_dim=32, eos_token_id=2,
    )  # fmt: skip
    model = Qwen3(config)
    model.initialise(version)
    save_model(model, directory, untie=True)
    for path in SMOL.iterdir():
        if path.name.startswith(("token", "chat_template")):
            shutil.copyfile(path, directory / path.name)
    return directory


class Complete:
    """`stream` for an engine that has only `generate`: its answer in pieces, as long as they are wanted."""

    piece = 3  # tokens

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "") -> Generation:
        raise NotImplementedError

    async def stream(
        self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "", enough: Enough | None = None
    ) -> AsyncGenerator[Delta, None]:
        complete, answer = await self.generate(prompt_ids, sampling, request_id=request_id), PartialGeneration(sampling)
        answer.begin(0)
        for at in range(0, len(complete.token_ids), self.piece):
            there = len(answer.token_ids)
            end = at + self.piece
            answer.add(Delta(token_ids=complete.token_ids[at:end], logprobs=complete.logprobs[at:end]))
            if enough is not None and (count := enough(answer.token_ids)) is not None:
                answer.cut(count)
            yield Delta(token_ids=answer.token_ids[there:], logprobs=answer.logprobs[there:])
            if answer.enough:
                break
        answer.add(Delta(token_ids=[], logprobs=[], spans=complete.spans, finish_reason=complete.finish_reason))
        last = answer.generation
        yield Delta(token_ids=[], logprobs=[], spans=last.spans, finish_reason=last.finish_reason)


class Served:
    """An engine of this process as a server of a pool: it has version 0 and never dies."""

    slots = 8

    def __init__(self, engine: Complete):
        self.engine = engine

    async def wait_serving(self) -> Any:
        return self

    async def version(self) -> int:
        return 0

    async def healthy(self) -> bool:
        return True

    async def fetch(self, version: int) -> None:
        raise NotImplementedError

    async def publish(self, weights: Path | str, version: int) -> PublishResult:
        raise NotImplementedError

    def kill(self) -> None:
        raise NotImplementedError

    def stream(
        self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "", priority: int = 0
    ) -> AsyncGenerator[Delta, None]:
        return self.engine.stream(prompt_ids, sampling, request_id=request_id)


class Fake(Complete):
    """Tokens that follow from the prompt alone, of any kind that a tokenizer would not choose; never an end."""

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "") -> Generation:
        drawn = random.Random(repr(prompt_ids))
        ids = [drawn.randrange(100, 40_000) for _ in range(sampling.max_tokens)]
        return Generation(
            token_ids=ids,
            logprobs=[-drawn.random() for _ in ids],
            spans=[WeightSpan(0, 0, len(ids))],
            finish_reason="length",
        )


class Noted:
    """An engine, and what it was given and gave. It may be held, to see who goes away."""

    def __init__(self, engine: Any):
        self.engine = engine
        self.answered: list[tuple[list[int], Generation]] = []
        self.cancelled = 0
        self.free = asyncio.Event()
        self.free.set()

    async def stream(
        self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "", enough: Enough | None = None
    ) -> AsyncGenerator[Delta, None]:
        made = Generation(token_ids=[], logprobs=[], spans=[], finish_reason="abort")
        try:
            await self.free.wait()
            async with aclosing(
                self.engine.stream(prompt_ids, sampling, request_id=request_id, enough=enough)
            ) as deltas:
                async for delta in deltas:
                    made.token_ids += delta.token_ids
                    made.logprobs += delta.logprobs
                    if delta.finish_reason is not None:
                        made.spans, made.finish_reason = delta.spans or [], delta.finish_reason
                        self.answered.append((list(prompt_ids), made))
                    yield delta
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += made.finish_reason == "abort"
            raise


@asynccontextmanager
async def engine(kind: str, home: Path) -> AsyncIterator[Any]:
    """What generates. The real ones in a pool."""
    if kind == "fake":
        yield Fake()
        return
    directory = small_chat_model(home / "v000000", 0)
    make = {"embedded": embedded, "vllm": partial(vllm, python=VLLM)}[kind]
    async with started([make(slots=4, length=LENGTH)], directory, 0, run=home) as pool:
        yield pool
