"""What the whole stack costs beside its engines: the same conversations through it, and bare.

Owns: pairs of runs, which goes first, the figures. Does not own: conversations (bench.conversations.played), servers.

The stack renders messages by the model's template, routes, hears streams, checks them and puts answers together. Bare
is an HTTP client and no stream: the requests of a conversation, with the token ids that the stack sent, go to one
server, half of the conversations to each. Each answer has a number of tokens that is known before, so both sides ask
the same of the engines; their prefix caches are emptied before each run. Who goes first alternates;
`engine_efficiency` is the median over pairs of the bare time over the stack's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from bench.conversations.played import MODEL, Played, play
from rollout.engine.client import EngineClient, Sampling
from rollout.engine.launch import embedded, vllm
from rollout.engine.protocol import RESET_CACHE
from rollout.engine.supervisor import EngineSupervisor
from rollout.episode.renderer import ChatRenderer
from rollout.pool.pool import Pool
from sandbox.errors import NotFound

CONVERSATIONS, TURNS, LENGTH = 32, 2, 512
SLOTS = 32  # of a server
START = 450.0  # seconds

Trace = list[list[list[int]]]  # the prompts of each conversation


@dataclasses.dataclass
class Took:
    """One run: seconds, and seconds of the processor in this process."""

    seconds: float
    cpu: float


def length(number: int, turn: int) -> int:
    """Tokens of an answer, 8 to 40. Conversations end their turns at different steps of an engine, and all have 48: no
    side's time is that of one that is longest."""
    first = 8 + 13 * number % 33
    return 48 - first if turn else first


async def efficiency(engine: str, *, pairs: int, threads: int) -> dict[str, Any]:
    """`engine`: vllm, which serves SmolLM2-135M, or embedded: a Qwen3 of its shape with random weights."""
    if not (MODEL / "config.json").exists():
        raise NotFound(f"no model at {MODEL}", remedy="run `make setup-models`")
    renderer = await asyncio.to_thread(ChatRenderer.load, MODEL)
    with tempfile.TemporaryDirectory(prefix="pagurus-efficiency-") as home:
        folder, kind = MODEL, vllm(slots=SLOTS, length=LENGTH, threads=threads)
        if engine == "embedded":
            folder, kind = Path(home) / "model", embedded(slots=SLOTS, length=LENGTH)
            await asyncio.to_thread(_model_of_its_shape, folder)
        kind = dataclasses.replace(kind, start_timeout=START)
        async with AsyncExitStack() as stack:
            servers = {n: EngineSupervisor(kind, folder, 0, log=Path(home) / f"{n}.log") for n in "ab"}
            await asyncio.gather(*(stack.enter_async_context(server) for server in servers.values()))
            pool = await stack.enter_async_context(Pool())
            for name, server in servers.items():
                await pool.join(name, server)
            clients = [await server.wait_serving() for server in servers.values()]
            stacked, bare = await _pairs(pool, clients, renderer, pairs)
    ratios = [b.seconds / s.seconds for s, b in zip(stacked, bare, strict=True)]
    return {
        "efficiency_engine": engine,
        "engine_efficiency": round(statistics.median(ratios), 3),
        "efficiency_pairs": [round(ratio, 3) for ratio in ratios],
        "stack_s": round(statistics.median(each.seconds for each in stacked), 2),
        "bare_s": round(statistics.median(each.seconds for each in bare), 2),
        "stack_cpu_s": round(statistics.median(each.cpu for each in stacked), 3),
        "bare_cpu_s": round(statistics.median(each.cpu for each in bare), 3),
    }


async def _pairs(
    pool: Pool, clients: list[EngineClient], renderer: ChatRenderer, count: int
) -> tuple[list[Took], list[Took]]:
    stacked, bare = list[Took](), list[Took]()
    _, trace = await _stacked(pool, clients, renderer)  # both are warmed up
    await _bare(clients, trace)
    for number in range(count):
        if number % 2:
            bare.append(await _bare(clients, trace))
            took, trace = await _stacked(pool, clients, renderer)
            stacked.append(took)
        else:
            took, trace = await _stacked(pool, clients, renderer)
            stacked.append(took)
            bare.append(await _bare(clients, trace))
    return stacked, bare


async def _stacked(pool: Pool, clients: list[EngineClient], renderer: ChatRenderer) -> tuple[Took, Trace]:
    played = [Played() for _ in range(CONVERSATIONS)]
    await _emptied(clients)
    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(
        *(play(pool, renderer, n, each, turns=TURNS, tokens=0, exactly=length) for n, each in enumerate(played))
    )
    took = Took(time.perf_counter() - began, time.process_time() - cpu)
    return took, [[each.ids[:at] for at, _ in each.answers] for each in played]


async def _bare(clients: list[EngineClient], trace: Trace) -> Took:
    async def follow(number: int) -> None:
        for turn, ids in enumerate(trace[number]):
            sampling = Sampling(max_tokens=length(number, turn), ignore_eos=True)
            await clients[number % len(clients)].generate(ids, sampling)

    await _emptied(clients)
    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(follow(number) for number in range(len(trace))))
    return Took(time.perf_counter() - began, time.process_time() - cpu)


async def _emptied(clients: list[EngineClient]) -> None:
    for client in clients:
        await client._request("POST", RESET_CACHE)


def _model_of_its_shape(folder: Path) -> None:
    from rollout.engine.embedded.model import ModelConfig, Qwen3, save_model

    config = ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        eos_token_id=2,
        max_position_embeddings=LENGTH,
    )
    model = Qwen3(config)
    model.initialise(0)
    save_model(model, folder)
