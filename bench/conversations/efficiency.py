"""What the whole stack costs beside its engines: the same conversations through it, and bare.

The stack renders messages by the model's template, routes, hears streams, checks them and puts answers together. Bare
is an HTTP client and no stream: the requests of a conversation, with the token ids that the stack sent, go to one
server, half of the conversations to each. Each answer has a number of tokens that is known before, so both sides ask
the same of the engines; their prefix caches are emptied before each run. Who goes first alternates;
`engine_efficiency` is the median over pairs of the bare time over the stack's. `engine_efficiency_cpu` is the same of
the processor seconds that servers and this process used: other programs of a busy machine disturb it less. vLLM's
processes also wait for one another with a busy processor, so for them it tells less.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import statistics
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from bench.conversations.played import MODEL, Played, play
from bench.harness import aftermath
from rollout.engine.client import EngineClient, Sampling
from rollout.engine.launch import embedded, vllm
from rollout.engine.protocol import RESET_CACHE
from rollout.engine.supervisor import EngineSupervisor
from rollout.episode.renderer import ChatRenderer
from rollout.pool.pool import EnginePool
from sandbox.errors import NotFound

CONVERSATIONS, TURNS, LENGTH = 32, 2, 512
SLOTS = 32  # of a server
START = 450.0  # seconds

Trace = list[list[list[int]]]  # the prompts of each conversation


@dataclasses.dataclass
class Took:
    """Of one run: seconds, processor seconds of this process, and of the servers too."""

    seconds: float
    own: float
    all: float


@dataclasses.dataclass
class Servers:
    clients: list[EngineClient]
    groups: set[int]  # of processes

    async def emptied(self) -> None:
        for client in self.clients:
            await client._request("POST", RESET_CACHE)

    def clocks(self) -> Took:
        """What they show now."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # a process that ended meanwhile
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[2]) in self.groups:
                    ticks += int(fields[11]) + int(fields[12])
        own = time.process_time()
        return Took(time.perf_counter(), own, own + ticks / os.sysconf("SC_CLK_TCK"))

    def took(self, since: Took) -> Took:
        now = self.clocks()
        return Took(now.seconds - since.seconds, now.own - since.own, now.all - since.all)


def length(number: int, turn: int) -> int:
    """Tokens of an answer, 8 to 40. Conversations end their turns at different steps of an engine, and all have 48: no
    side's time is that of one that is longest."""
    first = 8 + 13 * number % 33
    return 48 - first if turn else first


async def efficiency(engine: str, *, pairs: int, threads: int) -> dict[str, Any]:
    """`engine`: vllm, which serves SmolLM2-135M, or embedded: a Qwen3 of its shape with random weights."""
    if not (MODEL / "config.json").exists():
        raise NotFound(f"no model at {MODEL}", hint="run `make setup-models`")
    renderer = await asyncio.to_thread(ChatRenderer.load, MODEL)
    with aftermath.TemporaryDirectory("pagurus-efficiency-") as home:
        directory, kind = MODEL, vllm(slots=SLOTS, length=LENGTH, threads=threads)
        if engine == "embedded":
            directory, kind = Path(home) / "model", embedded(slots=SLOTS, length=LENGTH)
            await asyncio.to_thread(_model_of_its_shape, directory)
        kind = dataclasses.replace(kind, start_timeout=START)
        async with AsyncExitStack() as stack:
            servers = {n: EngineSupervisor(kind, directory, 0, log=Path(home) / f"{n}.log") for n in "ab"}
            await asyncio.gather(*(stack.enter_async_context(server) for server in servers.values()))
            pool = await stack.enter_async_context(EnginePool())
            for name, server in servers.items():
                await pool.join(name, server)
            clients = [await server.wait_serving() for server in servers.values()]
            groups = {os.getpgid(server.pid) for server in servers.values() if server.pid is not None}
            stacked, bare = await _pairs(pool, Servers(clients, groups), renderer, pairs)
    ratios = [b.seconds / s.seconds for s, b in zip(stacked, bare, strict=True)]
    return {
        "efficiency_engine": engine,
        "engine_efficiency": round(statistics.median(ratios), 3),
        "efficiency_pairs": [round(ratio, 3) for ratio in ratios],
        "engine_efficiency_cpu": round(statistics.median(b.all / s.all for s, b in zip(stacked, bare, strict=True)), 3),
        "stack_s": round(statistics.median(item.seconds for item in stacked), 2),
        "bare_s": round(statistics.median(item.seconds for item in bare), 2),
        "stack_cpu_s": round(statistics.median(item.own for item in stacked), 3),
        "bare_cpu_s": round(statistics.median(item.own for item in bare), 3),
    }


async def _pairs(
    pool: EnginePool, servers: Servers, renderer: ChatRenderer, count: int
) -> tuple[list[Took], list[Took]]:
    stacked, bare = list[Took](), list[Took]()
    _, trace = await _stacked(pool, servers, renderer)  # both are warmed up
    await _bare(servers, trace)
    for number in range(count):
        if number % 2:
            bare.append(await _bare(servers, trace))
        took, trace = await _stacked(pool, servers, renderer)
        stacked.append(took)
        if not number % 2:
            bare.append(await _bare(servers, trace))
    return stacked, bare


async def _stacked(pool: EnginePool, servers: Servers, renderer: ChatRenderer) -> tuple[Took, Trace]:
    played = [Played() for _ in range(CONVERSATIONS)]
    await servers.emptied()
    began = servers.clocks()
    await asyncio.gather(
        *(play(pool, renderer, n, item, turns=TURNS, tokens=0, exactly=length) for n, item in enumerate(played))
    )
    return servers.took(began), [[item.ids[:at] for at, _ in item.answers] for item in played]


async def _bare(servers: Servers, trace: Trace) -> Took:
    async def follow(number: int) -> None:
        for turn, ids in enumerate(trace[number]):
            sampling = Sampling(max_tokens=length(number, turn), ignore_eos=True)
            await servers.clients[number % len(servers.clients)].generate(ids, sampling)

    await servers.emptied()
    began = servers.clocks()
    await asyncio.gather(*(follow(number) for number in range(len(trace))))
    return servers.took(began)


def _model_of_its_shape(directory: Path) -> None:
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
    save_model(model, directory)
