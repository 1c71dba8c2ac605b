"""The coordinator's process: start, serve, signals, stop.

Guarantee: whatever becomes of it, the hosts and what runs on them continue.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from coordinator.api.routes import Routes
from coordinator.balance import Balance
from coordinator.callers import Callers
from coordinator.copies import Copies
from coordinator.failover import Failover
from coordinator.jobs.keeper import Jobs, parse_prices, parse_quotas
from coordinator.members import TTL, Members
from coordinator.moves import Moves
from coordinator.object_store import ObjectStore
from coordinator.phases import PhaseScheduler, parse_share
from coordinator.state import CoordinatorState
from daemon import listener, logs
from daemon.auth import tls
from daemon.auth.tokens import TokenStore
from daemon.config import address_of, is_loopback
from daemon.listener import Listeners
from daemon.notify import notify
from sandbox import paths, private, structs
from sandbox.container.cgroup import parse_bytes
from sandbox.errors import Invalid, NoSpace, PagurusError
from sandbox.page import Logins, key_file
from sandbox.termination import termination_signals

NAME = "cluster.sock"
CONNECTIONS = 8192
AGAIN = 1.0  # seconds before a part that found the disk full continues
log = logging.getLogger("pagurus.cluster")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pagurus cluster up", description="Make many hosts one.")
    parser.add_argument("--state", type=Path, default=paths.state() / "cluster", help="directory that survives reboots")
    parser.add_argument("--run", type=Path, default=paths.run() / "cluster", help="directory that need not")
    parser.add_argument("--listen", metavar="HOST:PORT", help="listen on TCP too, with TLS and tokens")
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate chain (PEM)")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its key (PEM)")
    parser.add_argument("--plain", action="store_true", help="no TLS: on loopback only")
    parser.add_argument(
        "--e2b-domain", default="", metavar="NAME", help="of host names that clients of E2B are given for sandboxes"
    )
    parser.add_argument("--lease", type=float, default=TTL, metavar="SECONDS", help="after which a host is silent")
    parser.add_argument("--replicate", action="store_true", help="copy checkpoints, so that sandboxes outlive hosts")
    parser.add_argument(
        "--replicate-store", metavar="STORE", help="and to a directory, or s3://BUCKET/PREFIX (AWS_* say how)"
    )
    parser.add_argument("--replicate-rate", metavar="SIZE", help="bytes a second of copies at most, such as 100MiB")
    parser.add_argument("--verify", action="store_true", help="compare sandboxes of a lost host before they run")
    parser.add_argument("--no-balance", action="store_true", help="with copies: move sandboxes on request only")
    parser.add_argument("--ray", default="", metavar="ADDRESS", help="cluster for jobs; else one of this machine")
    parser.add_argument(
        "--quota",
        action="append",
        default=[],
        metavar="[OWNER:]NAME=N",
        help="what jobs of an owner may use at once",
    )
    parser.add_argument(
        "--price", action="append", default=[], metavar="NAME=N", help="of an hour of what jobs need: GPU=2.5"
    )
    parser.add_argument("--share", metavar="AMOUNTS", help="machines that jobs take turns on: rollout=1,train=1")
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="info")
    return parser.parse_args(arguments)


async def serve(options: argparse.Namespace) -> None:
    """Run the coordinator until a signal asks it to end."""
    stop = asyncio.Event()
    for number in termination_signals():
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await asyncio.to_thread(private.directory, options.state, ours=("cluster.sqlite",))
    await asyncio.to_thread(private.directory, options.run, ours=(NAME,))
    limiter = listener.unix(options.run / NAME)  # first: it refuses a second coordinator
    state = CoordinatorState(options.state / "cluster.sqlite")
    replicating = options.replicate or options.replicate_store is not None
    members = Members(state, ttl=options.lease, leasing=replicating)
    rate = None if options.replicate_rate is None else float(parse_bytes(options.replicate_rate))
    store = None if options.replicate_store is None else await asyncio.to_thread(ObjectStore, options.replicate_store)
    copies = Copies(members, rate=rate, store=store)
    moves = Moves(members, copies)
    failover = Failover(members, copies, moves, verify=options.verify)
    members.copies = copies
    quotas, prices = parse_quotas(options.quota), parse_prices(options.price)
    jobs = Jobs(options.state, ray=options.ray, quotas=quotas, prices=prices)
    phases = PhaseScheduler(state, parse_share(options.share))
    logins = Logins(await asyncio.to_thread(key_file, options.state / "page.key"))
    callers = Callers(TokenStore(options.state / "tokens.json", clock=time.time), logins, members)
    routes = Routes(members, callers, copies, moves, jobs, phases, e2b_domain=options.e2b_domain)
    listeners = Listeners(routes.application(), connections=CONNECTIONS)
    working: list[asyncio.Task[None]] = []
    await listeners.open()
    await members.open()
    try:
        await listeners.serve(limiter)
        if options.listen is not None:
            await _serve_tcp(listeners, options)
        notify("READY=1")
        parts: list[CoordinatorService] = [jobs, phases, moves]
        if replicating:
            parts += [copies, failover]
        if replicating and not options.no_balance:
            parts.append(Balance(members, moves))
        working = [asyncio.create_task(lasting(item)) for item in parts]
        await asyncio.wait([asyncio.ensure_future(stop.wait()), *working], return_when=asyncio.FIRST_COMPLETED)
        for task in working:
            if task.done():
                task.result()  # a bug: better a new coordinator than one that copies nothing
    finally:
        notify("STOPPING=1")
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        await jobs.close()
        await copies.close()
        await listeners.close()
        await members.close()
        await state.close()


class CoordinatorService(Protocol):
    """Of a coordinator: works as long as it lives."""

    async def run(self) -> None: ...


async def lasting(part: CoordinatorService) -> None:
    """A full disk ends no part: with the coordinator, the leases of all hosts would end."""
    while True:
        try:
            return await part.run()
        except NoSpace as error:
            log.error("%s: %s", type(part).__name__.lower(), error)
            await asyncio.sleep(AGAIN)


async def _serve_tcp(listeners: Listeners, options: argparse.Namespace) -> None:

    host, port = address_of(options.listen)
    if options.plain:
        if not is_loopback(host):
            raise Invalid(f"plain is for loopback, not for {host}", hint="use TLS")
        await listeners.serve(listener.tcp(host, port))
        return
    certificate, key = options.tls_cert, options.tls_key
    if certificate is None or key is None:
        certificate, key = await asyncio.to_thread(tls.self_signed, options.state / "tls", host)
        print(f"certificate {certificate}\nfingerprint {tls.fingerprint(certificate)}", flush=True)
    await listeners.serve(listener.tcp(host, port), tls.context(certificate, key))


def main(argv: Sequence[str] | None = None) -> int:
    """``pagurus cluster up``."""
    options = parse(argv)
    logs.to_stderr(options.log_level)
    os.umask(0o077)
    structs.learn()
    try:
        asyncio.run(serve(options))
    except PagurusError as error:
        print(f"pagurus cluster: {error}", file=sys.stderr)
        return 1
    return 0
