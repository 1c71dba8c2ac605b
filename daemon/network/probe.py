"""Whether this host can give sandboxes a network: makes one for a moment, and looks who else decides.

Leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Iterator
from ipaddress import IPv4Address
from pathlib import Path

from daemon.network import links, present, rtnetlink
from daemon.network.elements import ElementChange, addressed, generation, permitted
from daemon.network.namespace import CLONE_NEWNET, within
from daemon.network.policy import compile_policy
from daemon.network.table import NftTable, nft
from sandbox.criu.tcp import POOL
from sandbox.errors import Unsupported
from sandbox.messages import Network

TRIES = 64


def examine() -> str:
    """The fact, in words. Raises Unsupported with a hint."""
    used = [str(route.network) for route in links.default_routes() if _foreign(route)]
    if used:
        raise Unsupported(f"{used[0]} is routed elsewhere", hint=f"sandboxes' addresses come from {POOL}: free it")
    _try()
    if strict := _strict(present.chains()):
        raise Unsupported(
            f"other rules drop what is forwarded: {', '.join(strict)}",
            hint='accept iifname "pg*" and oifname "pg*" there (Docker: chain DOCKER-USER)',
        )
    return "links, rules and refusals work; the way out is free" + _others(present.tables())


def _foreign(route: links.HostRoute) -> bool:
    inside = route.network.prefixlen >= POOL.prefixlen and route.network.subnet_of(POOL)
    return inside and not route.device.startswith("pg")


def _strict(chains: list[present.Chain]) -> list[str]:
    """Base chains of others that drop what no rule accepts."""
    return [
        f"{chain.family} {chain.table} {chain.name}"
        for chain in chains
        if chain.forward and chain.drops and "pagurus" not in chain.table
    ]


def _others(tables: list[tuple[str, str]]) -> str:
    """Tables that are not ours, and whether this host's nft can read each: one that it dies over is named."""
    reported = []
    for family, name in tables:
        if "pagurus" not in name:
            try:
                nft("list", "table", family, name)
            except Unsupported as error:
                reported.append(
                    f"{family} {name}, which this host's nft cannot read ({error.message.partition(' (')[0]})"
                )
            else:
                reported.append(f"{family} {name}")
    return f"; tables of others: {', '.join(reported)}" if reported else ""


def _try() -> None:
    """A namespace, a link, the rules; the host's end must refuse at once."""
    prefix = f"pgp{os.getpid() % 10**6:x}-"
    table = NftTable(f"pagurus_probe_{os.getpid()}", prefix, 1 + os.getpid() % 65_000)
    policy = compile_policy(Network.open())
    made = None
    with fresh_namespace() as namespace:
        try:
            table.ensure()
            for number in range(TRIES):
                address = POOL[POOL.num_addresses - 3 - number]
                link = links.name(prefix, address)
                elements = [*addressed(address, link), *permitted(address, policy), *generation(address, 1)]
                table.apply([ElementChange(element) for element in elements])
                made = links.connect(prefix, "probe", namespace, address)
                if made is not None:
                    break
            else:
                raise Unsupported(
                    "no address is free for a probe", hint="remove sandboxes with a network, and try again"
                )
            within(namespace, lambda: _refused(links.ROUTER))
            if not table.refusals().get(made.address):
                raise Unsupported(
                    "a packet was refused and not counted",
                    hint="see the rules that other programs have: `nft list ruleset`",
                )
        finally:
            if made is not None:
                links.disconnect(made.name)
            table.remove()


def _refused(host: IPv4Address) -> None:
    with socket.socket() as attempt:
        attempt.settimeout(2)
        try:
            attempt.connect((str(host), 9))
        except ConnectionRefusedError:
            return
        except OSError as error:
            raise Unsupported(
                f"a packet to the host was lost, not refused: {error}",
                hint="see the rules that other programs have: `nft list ruleset`",
            ) from error
    raise Unsupported("a packet reached the host", hint="see the rules that other programs have: `nft list ruleset`")


def _loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, 0x8914, struct.pack("16sh22x", b"lo", rtnetlink.IFF_UP))  # SIOCSIFFLAGS


@contextlib.contextmanager
def fresh_namespace() -> Iterator[Path]:
    """A network namespace that lives as long as a thread waits in it."""
    ready, done = threading.Event(), threading.Event()
    result: list[int] = []

    def wait() -> None:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) == 0:
            result.append(threading.get_native_id())
        ready.set()
        done.wait()

    thread = threading.Thread(target=wait, name="pagurus-probe")
    thread.start()
    try:
        ready.wait()
        if not result:
            raise Unsupported("no network namespace can be made", hint="run it as root")
        namespace = Path(f"/proc/{os.getpid()}/task/{result[0]}/ns/net")
        within(namespace, _loopback)
        yield namespace
    finally:
        done.set()
        thread.join()
