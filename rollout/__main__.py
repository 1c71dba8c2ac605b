"""``python -m rollout RUN``: the rollout's process of a run. `pagurus train` starts it.

Exit status: 0 after SIGTERM or SIGINT; 1 when it reported why it cannot continue; 75 when another process is the
rollout of this run.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import ssl
import sys
from pathlib import Path

from rollout.calm import calm
from rollout.config import RolloutConfig
from rollout.engine.tls import directory_of, listening
from rollout.labels import LabellingClient, run_client
from rollout.plan import read_plan
from rollout.service.engines import serving
from rollout.service.protocol import ADDRESS
from rollout.service.role import RolloutRole
from rollout.service.server import RolloutServer
from rollout.store import stages
from rollout.store.lock import own, status_of
from sandbox import durable, structs
from sandbox.termination import termination_signals

LOCK = "rollout.lock"
DAY = 86_400.0  # seconds
log = logging.getLogger("pagurus.rollout.main")


async def serve(
    run: Path, *, listen: str | None = None, tls: ssl.SSLContext | None = None, at: str = "", placed: bool = False
) -> None:
    """Runs until a signal ends it; raises what stops it before that. `at`: address of this machine, where roles of
    the run on other ones ask. `placed`: its engines are such."""
    stop = asyncio.Event()
    for number in termination_signals():
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    plan = read_plan(run)
    os.nice(plan.nice)  # the engine inherits it: both give way to the sandboxes and to their checkpoints
    engines = serving(plan, run, placed=placed)
    async with (
        run_client() as client,
        RolloutRole(run, plan, LabellingClient(client, run, idle=_idle(plan.config)), serve=engines) as role,
        RolloutServer(role, run / "roles") as limiter,
    ):
        if listen is not None:
            await limiter.listen(listen, tls)
        if at:
            port = await limiter.listen(f"{at}:0", listening(directory_of(run)))
            durable.publish(run / "roles" / ADDRESS, f"https://{at}:{port}".encode())
        log.info("pid %d serves %s", os.getpid(), run)
        calm()
        ends = [asyncio.ensure_future(role.ended()), asyncio.ensure_future(stop.wait())]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if not stop.is_set():
            await role.ended()


def _idle(config: RolloutConfig) -> float | None:
    """Seconds after which the daemon removes a sandbox of the run that was not used; None where none is kept."""
    return config.visit.days * DAY if config.visit.trajectories or config.branching is not None else None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rollout", description="The rollout's process of a run.")
    parser.add_argument("run", type=Path, help="a run directory with its plan.json")
    parser.add_argument("--wait", action="store_true", help="begin when a line comes on stdin, not at all at its end")
    parser.add_argument("--listen", help="also serve trainers of other hosts, at HOST:PORT")
    parser.add_argument("--certificate", type=Path, help="for --listen")
    parser.add_argument("--key", type=Path, help="for --listen")
    parser.add_argument("--at", default="", help="address of this machine: the run's trainer on another one asks there")
    parser.add_argument("--placed", action="store_true", help="the run's engines are on machines of their own")
    options = parser.parse_args(arguments)
    if options.wait and not sys.stdin.buffer.readline():
        return 0
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    structs.learn()

    def work() -> None:
        tls = None
        if options.certificate is not None:
            tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            tls.load_cert_chain(options.certificate, options.key)
        with own(options.run, LOCK):
            stages.note(options.run / "roles", "rollout", stages.IMPORTED)
            more = {"at": options.at, "placed": options.placed}
            asyncio.run(serve(options.run.resolve(), listen=options.listen, tls=tls, **more))

    return status_of(work)


if __name__ == "__main__":
    raise SystemExit(main())
