"""A pool of engine servers under faults, and its router under 2,000 live trajectories.

Three parts. `synthetic`: servers that only wait, in this process, so that what is measured is the router and its loop.
`efficiency`: `engine_efficiency` is the time of requests sent bare to two servers, over that of the whole stack for the
same conversations. `real`: two servers of SmolLM2-135M (`make setup-models`; vLLM by `make setup-vllm`); weights change
three times while trajectories of several turns are under way, one server is killed, one is stopped with SIGSTOP;
afterwards each sampled token's log-probability is compared with a plain forward pass of the version that its span
names.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.conversations.efficiency import efficiency
from bench.conversations.played import LENGTH, MODEL, Played, check, play, versions
from bench.conversations.synthetic import synthetic
from bench.harness import aftermath, command
from rollout.decide.engines.routing import RoutingRules
from rollout.engine.launch import vllm
from rollout.engine.supervisor import EngineSupervisor
from rollout.episode.renderer import ChatRenderer
from rollout.pool.pool import EnginePool
from sandbox.errors import NotFound

START = 900.0  # seconds for a server to start, or to take weights, on a machine that is busy


def main(arguments: list[str] | None = None) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--part", choices=["synthetic", "efficiency", "real", "all"], default="all")
    parser.add_argument("--live", type=int, default=2000, help="synthetic trajectories at once")
    parser.add_argument("--trajectories", type=int, default=64, help="real ones at once")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24, help="of an answer")
    parser.add_argument("--threads", type=int, default=1, help="of each server")
    parser.add_argument("--engine", choices=["vllm", "embedded"], default="vllm", help="whose efficiency")
    parser.add_argument("--pairs", type=int, default=6, help="of the whole stack and bare servers")
    parser.add_argument(
        "--checked", type=int, default=64, help="trajectories whose log-probabilities are computed again"
    )
    parser.add_argument("--silence", type=float, default=60.0, help="seconds without a token until a server hangs")
    parser.add_argument("--home", type=Path, help="where the versions of the model are kept for the next time")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {}
    if options.part in ("synthetic", "all"):
        result |= asyncio.run(synthetic(options.live))
    if options.part in ("efficiency", "all"):
        result |= asyncio.run(efficiency(options.engine, pairs=options.pairs, threads=options.threads))
    if options.part in ("real", "all"):
        result |= asyncio.run(real(options))
    command.show(result, options)
    return 0


async def real(options: argparse.Namespace) -> dict[str, Any]:
    if not (MODEL / "config.json").exists():
        raise NotFound(f"no model at {MODEL}", hint="run `make setup-models`")
    home = options.home or aftermath.directory("pagurus-pools-")
    try:
        return await _real(options, home)
    finally:
        if options.home is None:
            shutil.rmtree(home, ignore_errors=True)


async def _real(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    directories = await asyncio.to_thread(versions, home, 4)
    renderer = await asyncio.to_thread(ChatRenderer.load, MODEL)
    launch = dataclasses.replace(vllm(slots=32, length=LENGTH, threads=options.threads), start_timeout=START)
    rules = RoutingRules(silence=options.silence, update=START)
    async with AsyncExitStack() as stack:
        servers = {name: EngineSupervisor(launch, home / "weights", 0, log=home / f"{name}.log") for name in "ab"}
        await asyncio.gather(*(stack.enter_async_context(server) for server in servers.values()))
        pool = await stack.enter_async_context(EnginePool(rules=rules))
        for name, server in servers.items():
            await pool.join(name, server)
        began, played, over = time.monotonic(), [Played() for _ in range(options.trajectories)], asyncio.Event()
        tasks = [
            asyncio.create_task(play(pool, renderer, n, item, turns=options.turns, tokens=options.tokens, over=over))
            for n, item in enumerate(played)
        ]
        disturbed = _Disturbed(pool, servers, directories, played, tasks)
        try:
            await disturbed.go()
        finally:
            over.set()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        lost = [item for item in ended if isinstance(item, BaseException)]
        seconds = time.monotonic() - began
        counts = dict(pool.counts)
    some = random.Random(0).sample(played, min(options.checked, len(played)))
    checked = await asyncio.to_thread(check, some, directories)
    sampled = sum(len(generation.token_ids) for item in played for _, generation in item.answers)
    return {
        "servers": "2 x vLLM, SmolLM2-135M, fp32",
        "trajectories": options.trajectories,
        "turns": options.turns,
        "seconds": round(seconds, 1),
        "tokens_sampled": sampled,
        **disturbed.log,
        "trajectories_lost": len(lost),
        "why": sorted({f"{type(item).__name__}: {item}"[:200] for item in lost})[:3],
        "replayed": sum(item.replayed for item in played),
        "real_failover_tokens_resampled": counts.get("dropped_tokens", 0),  # heard while it took weights
        "retokenised": sum(isinstance(item, ValueError) for item in lost),  # a turn that is no exact extension
        "real_failovers": counts.get("moved", 0),
        "real_failover_tokens_kept": counts.get("moved_tokens", 0),
        "servers_lost": counts.get("lost", 0),
        "servers_hung": counts.get("hung", 0),
        "tokens_by_version": {str(v): sum(len(item.tokens_of(v)) for item in played) for v in range(len(directories))},
        "mixed_answers": sum(len(g.spans) > 1 for item in played for _, g in item.answers),
        **checked,
    }


@dataclass
class _Disturbed:
    """Weights, a kill, weights, a stop, weights, each while trajectories are under way."""

    pool: EnginePool
    servers: dict[str, EngineSupervisor]
    directories: list[Path]
    played: list[Played]
    tasks: list[asyncio.Task[None]]
    log: dict[str, Any] = field(default_factory=dict)

    async def go(self) -> None:
        every = max(1, len(self.played) // 2)  # answers between two of them
        for version in (1, 2, 3):
            await self._further(every)
            began = self._answers
            published = await self.pool.publish(self.directories[0].parent / "weights", version)
            self.log[f"update_{version}_s"] = round(published.seconds, 1)
            self.log[f"answers_meanwhile_{version}"] = self._answers - began
            await self._further(every)
            if version == 1:
                await self._inject("a", signal.SIGKILL, "lost")
            elif version == 2:
                await self._inject("b", signal.SIGSTOP, "hung")
        self.log["updates_in_flight"] = sum(not task.done() for task in self.tasks) and 3

    @property
    def _answers(self) -> int:
        return sum(len(item.answers) for item in self.played)

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Ends too when no trajectory is left."""
        while not condition() and not all(task.done() for task in self.tasks):  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def _further(self, count: int) -> None:
        target = self._answers + count
        await self._until(lambda: self._answers >= target)

    async def _inject(self, name: str, how: signal.Signals, result: str) -> None:
        """A server that works is hit, while the other one serves too; until the pool has noticed."""
        members = self.pool.members
        await self._until(
            lambda: all(member.state == "serving" for member in members.values()) and members[name].load > 0
        )
        pid = self.servers[name].pid
        assert pid is not None
        began, load, before = time.monotonic(), members[name].load, self.pool.counts[result]
        os.killpg(pid, how)
        await self._until(lambda: self.pool.counts[result] > before)
        self.log[result] = {"server": name, "its_requests": load, "noticed_s": round(time.monotonic() - began, 1)}
