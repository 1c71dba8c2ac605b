"""A pool of servers that we start: what a run uses where it asks for more than one engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from rollout.decide.engines.routing import RoutingRules
from rollout.engine.launch import Launch
from rollout.engine.supervisor import EngineSupervisor
from rollout.pool.member import Note
from rollout.pool.pool import EnginePool


@asynccontextmanager
async def started(
    launches: Sequence[Launch],
    directory: Path | str,
    version: int,
    *,
    run: Path,
    rules: RoutingRules | None = None,
    note: Note | None = None,
) -> AsyncIterator[EnginePool]:
    """A server for each of `launches`, of the sealed weights in `directory`, as one. They outlive this process if it is
    killed, and the next one adopts them: each is written down in a directory of its own below ``run/engines``."""
    servers = {}
    for number, launch in enumerate(launches):
        name = f"engine-{number}"
        log, roles = run / f"{name}.log", run / "engines" / name
        servers[name] = EngineSupervisor(launch, directory, version, log=log, roles=roles)
    async with AsyncExitStack() as stack:
        await asyncio.gather(*(stack.enter_async_context(server) for server in servers.values()))
        pool = await stack.enter_async_context(EnginePool(rules=rules, note=note))
        for name, server in servers.items():
            await pool.join(name, server)
        yield pool
