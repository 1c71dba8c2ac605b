"""Keeps an engine server of a run on a machine of its own: its process there.

    python -m rollout.service.keeper RUN NUMBER --at ADDRESS

Guarantee: keeper and server talk to who has the run's key alone. Of the keepers of one server one works, by a lock in
the run directory; a server that a killed keeper left is adopted by the next one on that machine.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from pathlib import Path

from rollout.engine import gpus, tls
from rollout.engine.client import PublishResult
from rollout.engine.launch import Launch, reachable
from rollout.engine.supervisor import EngineSupervisor
from rollout.plan import read_plan
from rollout.service import accepted
from rollout.service import protocol as wire
from rollout.service.engines import launch as launch_of
from rollout.service.placed import ADDRESS, directory_of, name_of
from rollout.service.server import ENGINE_REQUESTS, RolloutServer
from rollout.store import stages
from rollout.store.lock import OWNED, own, status_of
from sandbox import durable, structs
from sandbox.errors import EngineFailed
from sandbox.termination import termination_signals

LOCK, SOCKET = "keeper.lock", "keeper.sock"  # in the server's directory
ROLE = "keeper"
POLL_INTERVAL = 0.5  # seconds between two looks for the run's first version


class Keeper:
    """What the rollout asks of the process that keeps a server."""

    def __init__(self, engine: EngineSupervisor, roles: Path):
        self.engine, self.roles = engine, roles
        self.failed = asyncio.Event()

    async def serving(self, request: wire.Serving) -> wire.ServedAddress:
        try:
            served = wire.ServedAddress(url=(await self.engine.wait_serving()).url)
        except EngineFailed:  # for good
            self.failed.set()
            raise
        stages.note(self.roles, ROLE, stages.WORKED)
        return served

    async def fetch(self, request: wire.Fetch) -> wire.Done:
        await self.engine.fetch(request.version)
        return wire.Done()

    async def serve_version(self, request: wire.ServeVersion) -> PublishResult:
        return await self.engine.publish(request.directory, request.version)

    async def restart_engine(self, request: wire.RestartEngine) -> wire.Done:
        self.engine.kill()
        return wire.Done()


async def keep(run: Path, number: int, launch: Launch, address: str) -> None:
    """Runs until a signal ends it; raises what stops it before that. `address`: of this machine, for others."""
    this = asyncio.current_task()
    assert this is not None
    for item in termination_signals():
        asyncio.get_running_loop().add_signal_handler(item, this.cancel)
    while (ref := await asyncio.to_thread(accepted.read, run / "rollout")) is None:  # noqa: ASYNC110 - another process
        await asyncio.sleep(POLL_INTERVAL)
    directory, keys = directory_of(run, number), tls.directory_of(run)
    launch = reachable(launch, address, keys)
    where = run / f"{name_of(number)}.log"
    async with EngineSupervisor(launch, ref.directory, ref.version, log=where, roles=directory) as engine:
        keeper = Keeper(engine, run / "roles")
        async with RolloutServer(keeper, directory, socket=SOCKET, requests=ENGINE_REQUESTS) as limiter:
            port = await limiter.listen(f"{address}:0", tls.listening(keys))
            durable.publish(directory / ADDRESS, f"https://{address}:{port}".encode())
            stages.note(keeper.roles, ROLE, stages.READY)
            await keeper.failed.wait()
            await engine.wait_serving()  # raises


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rollout.service.keeper", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("run", type=Path, help="a run directory, which the run's other machines see too")
    parser.add_argument("number", type=int, help="of the server: from 0 to one less than `engines` of its plan")
    parser.add_argument("--at", required=True, help="address of this machine")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    structs.learn()

    def work() -> None:
        plan = read_plan(options.run)
        os.nice(plan.nice)
        directory = directory_of(options.run, options.number)
        directory.mkdir(parents=True, exist_ok=True)
        with own(directory, LOCK):
            launch = launch_of(plan, gpu=bool(gpus.visible()))  # the placement has chosen which
            asyncio.run(keep(options.run.resolve(), options.number, launch, options.at))

    try:
        return status_of(work)
    except asyncio.CancelledError:  # its supervisor knows whether it requested that
        return OWNED


if __name__ == "__main__":
    raise SystemExit(main())
