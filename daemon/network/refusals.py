"""What sandboxes tried and may not: refused packets as the kernel logs them, names as the resolver refuses them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address

from daemon.network.ruleset import SNAP
from sandbox.messages import Refusal

log = logging.getLogger("pagurus.network")

RETAINED = 100  # refusals of a sandbox that are remembered
SUBSYSTEM = 4  # nfnetlink_log
PACKET, CONFIG = 0, 1
PAYLOAD = 9
CFG_CMD, CFG_MODE, CFG_TIMEOUT, CFG_THRESHOLD = 1, 2, 4, 5
BIND, COPY_PACKET = 1, 2
PROTOCOLS = {1: "icmp", 6: "tcp", 17: "udp", 132: "sctp"}


@dataclass(frozen=True)
class Packet:
    """A refused packet. `port` is None where the protocol has none."""

    source: IPv4Address
    destination: IPv4Address
    protocol: int
    port: int | None = None

    @property
    def what(self) -> str:
        kind = PROTOCOLS.get(self.protocol, f"protocol {self.protocol}")
        return f"{kind} {self.destination}" + ("" if self.port is None else f":{self.port}")


class RefusalLog:
    """The latest refusals of one sandbox. One that repeats the last is counted, not kept."""

    def __init__(self) -> None:
        self._retained: deque[Refusal] = deque(maxlen=RETAINED)

    def add(self, what: str, why: str, at: float | None = None) -> None:
        now = time.time() if at is None else at
        what = "".join(c if c.isprintable() else "?" for c in what[:300])  # a name is the sandbox's word
        if self._retained and (self._retained[-1].what, self._retained[-1].why) == (what, why):
            self._retained.append(Refusal(at=now, what=what, why=why, count=self._retained.pop().count + 1))
        else:
            self._retained.append(Refusal(at=now, what=what, why=why))

    def list(self) -> list[Refusal]:
        return list(self._retained)


def parse(data: bytes) -> Iterator[Packet]:
    """The packets in what an NFLOG socket has received."""
    for message in messages(data, SUBSYSTEM << 8 | PACKET):
        payload = attribute(message, PAYLOAD)
        if payload is not None and (packet := _ipv4(payload)) is not None:
            yield packet


def messages(data: bytes, target: int) -> Iterator[bytes]:
    """The attributes of each netfilter message of one kind, in what a socket has received."""
    while len(data) >= 20:
        length, kind, *_ = struct.unpack_from("=IHHII", data)
        if length < 20 or length > len(data):
            return
        if kind == target:
            yield data[20:length]
        data = data[length + 3 & ~3 :]


def attribute(data: bytes, target: int) -> bytes | None:
    """The first of one kind."""
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        if length < 4:
            return None
        if kind & 0x3FFF == target:
            return data[4:length]
        data = data[length + 3 & ~3 :]
    return None


def _ipv4(packet: bytes) -> Packet | None:
    if len(packet) < 20 or packet[0] >> 4 != 4:
        return None
    protocol, start = packet[9], 4 * (packet[0] & 15)
    port = None
    if protocol in (6, 17, 132) and len(packet) >= start + 4:
        (port,) = struct.unpack_from("!H", packet, start + 2)
    return Packet(IPv4Address(packet[12:16]), IPv4Address(packet[16:20]), protocol, port)


class RefusalListener:
    """Hears of refused packets on the event loop."""

    def __init__(self, group: int, report: Callable[[Packet], None]) -> None:
        self._group = group
        self._report = report
        self._socket: socket.socket | None = None

    def start(self) -> None:
        """Without it packets are refused and counted all the same: a failure is logged."""
        if self._socket is not None:
            return
        made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 12)  # NETLINK_NETFILTER
        try:
            made.bind((0, 0))
            made.settimeout(5)
            self._configure(made, (CFG_CMD, struct.pack("!B", BIND)))
            self._configure(made, (CFG_MODE, struct.pack("!IBx", SNAP, COPY_PACKET)))
            self._configure(made, (CFG_TIMEOUT, struct.pack("!I", 10)), (CFG_THRESHOLD, struct.pack("!I", 1)))
            made.setblocking(False)
        except OSError as error:
            made.close()
            log.warning("refused packets are not explained: NFLOG group %d: %s", self._group, error)
            return
        self._socket = made
        asyncio.get_running_loop().add_reader(made.fileno(), self._readable)

    def _configure(self, connection: socket.socket, *attributes: tuple[int, bytes]) -> None:
        body = struct.pack("=BBH", 0, 0, socket.htons(self._group))
        for kind, value in attributes:
            body += struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)
        connection.send(struct.pack("=IHHII", 16 + len(body), SUBSYSTEM << 8 | CONFIG, 5, 1, 0) + body)
        answer = connection.recv(4096)
        (code,) = struct.unpack_from("=i", answer, 16)
        if code:
            raise OSError(-code, "refused")

    def _readable(self) -> None:
        assert self._socket is not None
        with contextlib.suppress(BlockingIOError, OSError):  # ENOBUFS: some were lost, they were too many anyway
            for packet in parse(self._socket.recv(1 << 16)):
                self._report(packet)

    def close(self) -> None:
        """Idempotent."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
