"""The router of a pool under thousands of live trajectories, with servers that only wait, in this process."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from rollout.calm import calm
from rollout.decide.engines.routing import RoutingRules
from rollout.engine.client import Delta, PublishResult, Sampling, WeightSpan
from rollout.pool.pool import EnginePool
from sandbox.errors import EngineFailed

PIECE = 8  # tokens of one delta
PAUSE = 1.0  # seconds between two deltas of one answer
SERVERS = 8


class WaitingServer:
    """An engine server without an engine: it gives `PIECE` tokens every `PAUSE` seconds."""

    def __init__(self, slots: int):
        self.slots, self.alive, self.generated = slots, True, 0

    async def wait_serving(self) -> Any:
        while not self.alive:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.05)
        return self

    async def fetch(self, version: int) -> None:
        return None

    async def publish(self, directory: Path | str, version: int) -> PublishResult:
        return PublishResult(version=version, seconds=0.0, paused_s=0.0)

    def kill(self) -> None:
        self.alive = False

    async def version(self) -> int:
        return 0

    async def healthy(self) -> bool:
        return self.alive

    async def stream(
        self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "", priority: int = 0
    ) -> AsyncGenerator[Delta, None]:
        given = 0
        while given < sampling.max_tokens:
            await asyncio.sleep(PAUSE * random.uniform(0.5, 1.5))
            if not self.alive:
                raise EngineFailed("it is dead")
            count = min(PIECE, sampling.max_tokens - given)
            given += count
            self.generated += count
            last = given == sampling.max_tokens
            yield Delta(
                token_ids=list(os.urandom(count)),
                logprobs=[-1.0] * count,
                spans=[WeightSpan(0, 0, given)] if last else None,
                finish_reason="length" if last else None,
            )


async def _inject(servers: list[WaitingServer]) -> None:
    """Each dies for two seconds, one after the other."""
    for server in servers:
        await asyncio.sleep(6)
        server.alive = False
        await asyncio.sleep(2)
        server.alive = True


async def synthetic(live: int) -> dict[str, Any]:
    """`live` trajectories of four turns that grow from a prompt which eight of them share; two servers die."""
    servers = {f"s{n}": WaitingServer(live // SERVERS * 5 // 4) for n in range(SERVERS)}
    lags, busy = list[float](), list[float]()  # of these, while this process computed: the rest is the machine's
    calm()
    openings = [os.urandom(400) for _ in range(live // 8 + 1)]
    async with EnginePool(rules=RoutingRules(silence=30)) as pool:
        for name, server in servers.items():
            await pool.join(name, server)

        async def lag() -> None:
            while True:
                began, worked = time.perf_counter(), time.process_time()
                await asyncio.sleep(0.01)
                late = time.perf_counter() - began - 0.01
                lags.append(1000 * late)
                busy.append(1000 * min(late, time.process_time() - worked))

        async def play(number: int) -> int:
            ids = list(openings[number // 8])
            await asyncio.sleep(4 * random.random())
            retained = 0
            for _ in range(4):
                generation = await pool.generate(ids, Sampling(max_tokens=40))
                retained += len(generation.token_ids)
                ids += [*generation.token_ids, *os.urandom(60)]
            return retained

        quiet = asyncio.create_task(lag())  # what the machine itself does to a loop
        await asyncio.sleep(5)
        quiet.cancel()
        idle_lag, lags[:], busy[:] = _p99(lags), [], []
        used = time.process_time()
        watching, striking = asyncio.create_task(lag()), asyncio.create_task(_inject([servers["s1"], servers["s5"]]))
        began = time.monotonic()
        retained = await asyncio.gather(*(play(number) for number in range(live)))
        seconds = time.monotonic() - began
        watching.cancel()
        striking.cancel()
        generated = sum(server.generated for server in servers.values())
        result = pool.statistics()
        return {
            "synthetic_live": live,
            "synthetic_s": round(seconds, 1),
            "router_ms_p50": round(statistics.median(pool.slots.slow_ms), 3),
            "router_ms_p99": round(_p99(pool.slots.slow_ms), 3),
            "loop_lag_idle_ms_p99": round(idle_lag, 2),
            "loop_lag_ms_p50": round(statistics.median(lags), 2),
            "loop_lag_ms_p99": round(_p99(lags), 2),
            "loop_busy_ms_p99": round(_p99(busy), 2),
            "router_cpu_share": round((time.process_time() - used) / seconds, 3),
            "prefix_hit_share": round(float(result["prefix_hit_share"]), 4),  # type: ignore[arg-type]
            "failovers": pool.counts["moved"],
            "failover_tokens_kept": pool.counts["moved_tokens"],
            "failover_tokens_resampled": generated - sum(retained),
        }


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]
