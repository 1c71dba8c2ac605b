"""A veth pair between the host and one sandbox: routed, without a bridge, without ARP.

Everything here blocks.

Guarantee: nothing is learned from packets. Both ends have ARP off and one permanent neighbour, IPv6 is off, and the
host's end accepts only the sandbox's address (strict reverse path filter, before the table looks again). An address
belongs to one sandbox of the whole machine, whichever daemon made it: its route can be made only once.

::

    sandbox (its own network namespace)                  host
    eth0  198.18.x.y/32 ─────────────────────────────── pg<daemon>-<number>   198.18.0.1/32
    default via 198.18.0.1, permanent neighbour          198.18.x.y/32 dev pg..., permanent neighbour

What is changed on the host itself: ``net.ipv4.conf.<device>.forwarding`` becomes 1 for our own links and for the
devices through which sandboxes leave; ``net.ipv4.ip_forward`` and all other devices stay as they are.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from daemon.network import rtnetlink
from daemon.network.namespace import within
from sandbox.criu.tcp import POOL
from sandbox.errors import Conflict, Unsupported

ROUTER = POOL[1]  # the host's end of every link, seen from inside
FIRST, LAST = 16, POOL.num_addresses - 2  # numbers of addresses in the pool that sandboxes get
INSIDE = "eth0"
HOST_MAC, SANDBOX_MAC = "02:70:67:00:00:01", "02:70:67:00:00:02"  # only the two ends ever see them
CONF = Path("/proc/sys/net")


@dataclass(frozen=True)
class SandboxLink:
    """The link of one sandbox, as the host sees it."""

    name: str
    index: int
    address: IPv4Address
    owner: str  # the sandbox's id


def name(prefix: str, address: IPv4Address) -> str:
    """Of the host's end. Example: ``pgk3x9q-1f``."""
    return f"{prefix}{int(address) - int(POOL.network_address):x}"


def connect(
    prefix: str, owner: str, namespace: Path, address: IPv4Address, *, route: Sequence[IPv4Network] = ()
) -> SandboxLink | None:
    """Give a sandbox its link. None: the address is another's already. `route`: networks it must reach."""
    outside = devices(default_routes(), route)
    link, mtu = name(prefix, address), _mtu(outside)
    try:
        with open(namespace, "rb") as file:
            rtnetlink.exchange([rtnetlink.veth(link, HOST_MAC, INSIDE, SANDBOX_MAC, file.fileno(), mtu)])
    except rtnetlink.Refused as error:
        if error.errno == errno.EEXIST and Path(f"/sys/class/net/{link}").exists():
            return None
        raise _unable("make a link", error) from error
    try:
        index = socket.if_nametoindex(link)
        _configure_host_end(link)
        rtnetlink.exchange(
            [
                rtnetlink.up(index, owner),
                rtnetlink.address(index, ROUTER),
                rtnetlink.route(index, address),
                rtnetlink.neighbour(index, address, SANDBOX_MAC),
            ]
        )
        within(namespace, lambda: _configure_inside(address))
        for device in outside:
            _switch(f"ipv4/conf/{device}/forwarding", "1")
    except OSError as error:  # also when its namespace is gone by now: a half made link must not stay
        with contextlib.suppress(rtnetlink.Refused):
            rtnetlink.exchange([rtnetlink.gone(link)])
        if not isinstance(error, rtnetlink.Refused):
            raise
        if error.errno == errno.EEXIST:
            return None
        raise _unable("set up a link", error) from error
    return SandboxLink(link, index, address, owner)


def open_devices(route: Sequence[IPv4Network]) -> None:
    """Let the devices that lead to some networks hand on the replies."""
    for device in devices(default_routes(), route):
        _switch(f"ipv4/conf/{device}/forwarding", "1")


def _configure_host_end(link: str) -> None:
    for setting, value in (
        ("rp_filter", "1"),
        ("forwarding", "1"),
        ("accept_redirects", "0"),
        ("send_redirects", "0"),
        ("accept_source_route", "0"),
        ("proxy_arp", "0"),
    ):
        _switch(f"ipv4/conf/{link}/{setting}", value)
    _switch(f"ipv6/conf/{link}/disable_ipv6", "1")


def _configure_inside(address: IPv4Address) -> None:
    """In the sandbox's namespace."""
    _switch(f"ipv6/conf/{INSIDE}/disable_ipv6", "1")
    _switch(f"ipv4/conf/{INSIDE}/accept_redirects", "0")
    index = socket.if_nametoindex(INSIDE)
    rtnetlink.exchange(
        [
            rtnetlink.up(index),
            rtnetlink.address(index, address),
            rtnetlink.neighbour(index, ROUTER, HOST_MAC),
            rtnetlink.default_route(index, ROUTER),
        ]
    )


def address_inside(namespace: Path) -> IPv4Address | None:
    """The address that the sandbox in this namespace has from us; None when it has no link."""
    return within(namespace, _address)


def _address() -> IPv4Address | None:
    request = struct.pack("16s24x", INSIDE.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control, contextlib.suppress(OSError):
        import fcntl

        answer = fcntl.ioctl(control, 0x8915, request)  # SIOCGIFADDR
        return IPv4Address(answer[20:24])
    return None


def disconnect(link: str) -> None:
    """Take a link away, with its other end. Idempotent. Waits for what the kernel still does with it (20 ms)."""
    try:
        rtnetlink.exchange([rtnetlink.gone(link)])
    except rtnetlink.Refused as error:
        if error.errno != errno.ENODEV:
            raise _unable("remove a link", error) from error


def result(prefix: str) -> list[SandboxLink]:
    """The links of a daemon that are there, also those that a former one made."""
    links = []
    for directory in Path("/sys/class/net").glob(f"{prefix}*"):
        with contextlib.suppress(OSError, ValueError):
            number = int(directory.name.removeprefix(prefix), 16)
            index, owner = int((directory / "ifindex").read_text()), (directory / "ifalias").read_text().strip()
            links.append(SandboxLink(directory.name, index, POOL[number], owner))
    return links


def traffic(link: str) -> tuple[int, int, int, int]:
    """Packets out of the sandbox and into it, bytes out and in. Zeros when there is no such link."""
    base = Path(f"/sys/class/net/{link}/statistics")
    try:
        packets_out, packets_in, bytes_out, bytes_in = (
            int((base / item).read_text()) for item in ("rx_packets", "tx_packets", "rx_bytes", "tx_bytes")
        )
    except OSError:
        return 0, 0, 0, 0
    return packets_out, packets_in, bytes_out, bytes_in


# ------------------------------------------------------------------ the host's own routes


@dataclass(frozen=True)
class HostRoute:
    """A line of the host's routing table."""

    device: str
    network: IPv4Network
    gateway: bool = False


def default_routes() -> list[HostRoute]:
    """The host's IPv4 routes."""
    return list(parse_routes(Path("/proc/net/route").read_text()))


def parse_routes(text: str) -> Iterator[HostRoute]:
    """/proc/net/route: addresses are hexadecimal in the machine's byte order."""
    for line in text.splitlines()[1:]:
        device, target, _, flags, *_, mask, _, _, _ = line.split()
        if int(flags, 16) & 1:  # up
            network, netmask = (socket.ntohl(int(item, 16)) for item in (target, mask))
            yield HostRoute(device, IPv4Network((network, netmask.bit_count())), bool(int(flags, 16) & 2))


def devices(routes: Iterable[HostRoute], target: Sequence[IPv4Network]) -> list[str]:
    """Through which devices packets leave to the internet (by a router) and to these networks."""
    return sorted(
        {
            route.device
            for route in routes
            if not route.device.startswith(("pg", "lo"))
            and (route.gateway or route.network.prefixlen == 0 or any(route.network.overlaps(item) for item in target))
        }
    )


def _mtu(outside: Sequence[str]) -> int:
    """The smallest of those devices: a sandbox then never has to find out by lost packets."""
    sizes = [1500]
    for device in outside:
        with contextlib.suppress(OSError):
            sizes.append(int(Path(f"/sys/class/net/{device}/mtu").read_text()))
    return max(576, min(sizes))


def _switch(setting: str, value: str) -> None:
    """A network setting of the namespace of this thread; written only when it is another one."""
    path = CONF / setting
    try:
        if path.read_text().strip() != value:
            path.write_text(value)
    except FileNotFoundError:
        if not setting.startswith("ipv6/"):  # a kernel without IPv6 has nothing to be switched off
            raise


def _unable(what: str, error: OSError) -> Exception:
    if error.errno == errno.EEXIST:
        return Conflict(f"the sandbox has a device {INSIDE} that is not ours", hint="restore the sandbox")
    return Unsupported(f"cannot {what}: {error.strerror}", hint="see `pagurus doctor`")
