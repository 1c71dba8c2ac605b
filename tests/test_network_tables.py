"""Elements, addresses and announcements of the network: pure parts, and the table in a real kernel."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import _internet
from daemon.network import links, watch
from daemon.network.elements import Change, Element, addressed, generation, named, permitted, service, statements
from daemon.network.networks import _addresses, _still_named
from daemon.network.policy import POOL, compile_policy
from daemon.network.probe import _strict
from daemon.network.table import DELSETELEM, NEWSETELEM, Table
from sandbox import connections
from sandbox.messages import Network

SOURCE = IPv4Address("198.18.0.20")


# ------------------------------------------------------------------ addresses


def test_a_sandbox_gets_the_same_address_again_and_all_are_tried() -> None:
    assert list(islice(_addresses("s-1"), 3)) == list(islice(_addresses("s-1"), 3))
    assert next(_addresses("s-1")) != next(_addresses("s-2"))
    assert len(set(_addresses("s-1"))) == links.LAST - links.FIRST
    for address in islice(_addresses("s-3"), 100):
        assert address in POOL and address != links.ROUTER
        assert links.name("pgabcde-", address) == f"pgabcde-{int(address) - int(POOL[0]):x}"
        assert len(links.name("pgabcde-", POOL[-1])) < 16


@dataclass
class Isk:
    """What matters of a socket in an image."""

    src: str
    dst: str = "0.0.0.0"
    dst_port: int = 0
    proto: int = 6
    src_addr: list[int] = field(default_factory=list)
    dst_addr: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.src_addr, self.dst_addr = ([_word(each)] for each in (self.src, self.dst))

    @property
    def now(self) -> tuple[str, str, int]:
        return _text(self.src_addr[-1]), _text(self.dst_addr[-1]), self.dst_port


@dataclass
class Entry:
    isk: Any

    def HasField(self, name: str) -> bool:
        return name == "isk" and self.isk is not None


def _word(address: str) -> int:
    return int(struct.unpack("=I", IPv4Address(address).packed)[0])


def _text(word: int) -> str:
    return str(IPv4Address(struct.pack("=I", word)))


@pytest.mark.parametrize(
    ("before", "present", "after"),
    [
        (Isk("198.18.0.5"), "198.18.0.9", ("198.18.0.9", "0.0.0.0", 0)),
        (Isk("198.18.0.5", "198.18.0.5", 80), "198.18.0.9", ("198.18.0.9", "198.18.0.9", 80)),
        (Isk("198.18.0.9"), "198.18.0.9", None),
        (Isk("0.0.0.0"), "198.18.0.9", None),
        (Isk("127.0.0.1", "127.0.0.1", 80), None, None),
        (Isk("198.18.0.5"), None, ("127.0.0.1", "0.0.0.0", 0)),
        (Isk("198.18.0.5", "8.8.8.8", 53, 17), None, ("127.0.0.1", "0.0.0.0", 0)),
        (Isk("198.18.0.5", "8.8.8.8", 53, 17), "198.18.0.9", ("198.18.0.9", "8.8.8.8", 53)),
        (Isk("127.0.0.1", "127.0.0.53", 53, 17), None, None),
    ],
)
def test_sockets_of_a_former_address(before: Isk, present: str | None, after: tuple[str, str, int] | None) -> None:
    was = before.now
    changed = connections.readdress([Entry(None), Entry(before)], present)
    assert (changed, before.now) == ((False, was) if after is None else (True, after))


# ------------------------------------------------------------------ elements


def test_what_names_opened_stays_open_only_where_they_are_still_allowed() -> None:
    (plain,) = named(SOURCE, IPv4Address("203.0.113.1"), (), 60)
    (port,) = named(SOURCE, IPv4Address("203.0.113.1"), ((6, 443),), 60)
    (private,) = named(SOURCE, IPv4Address("10.0.0.1"), (), 60)
    assert service(port.key[8:]) == (6, 443)
    for network, kept in (
        (Network.allow(names=["a.test"]), {plain}),
        (Network.allow(names=["a.test:443"]), {port}),
        (Network.allow(names=["b.test"]), set()),
        (Network.allow(names=["a.test"], cidrs=["10.0.0.0/8"]), {plain, private}),
        (Network.open(), set()),  # needs none of them
    ):
        policy = compile_policy(network)
        assert {each for each in (plain, port, private) if _still_named(policy, "a.test", each)} == kept
        assert not any(_still_named(policy, "", each) for each in (plain, port, private))


def test_who_else_decides_about_forwarding() -> None:
    def chain(table: str, hook: str, policy: str) -> dict[str, Any]:
        return {"chain": {"family": "ip", "table": table, "name": "FORWARD", "hook": hook, "policy": policy}}

    found = _strict([chain("filter", "forward", "drop"), chain("x", "input", "drop"), chain("y", "forward", "accept")])
    assert found == ["ip filter FORWARD"]
    assert _strict([{"metainfo": {}}, {"chain": {"family": "ip", "table": "t", "name": "plain"}}]) == []


def test_announcements_of_removed_tables() -> None:
    name = b"pagurus\0"
    body = bytes(4) + struct.pack("=HH", 4 + len(name), watch.TABLE_NAME) + name
    message = struct.pack("=IHHII", 16 + len(body), watch.SUBSYSTEM << 8 | watch.DELTABLE, 0, 0, 0) + body
    assert list(watch.removed(message + message)) == ["pagurus", "pagurus"]
    other = struct.pack("=IHHII", 16 + len(body), watch.SUBSYSTEM << 8 | 12, 0, 0, 0) + body
    assert list(watch.removed(other)) == []


@given(st.binary(max_size=80))
def test_garbage_announces_nothing(data: bytes) -> None:
    list(watch.removed(data))


# ------------------------------------------------------------------ the kernel


@pytest.fixture
def table() -> Iterator[Table]:
    if reason := _internet.missing():
        pytest.skip(reason)
    made = Table(f"pagurus_test_{os.getpid()}", f"pgt{os.getpid() % 0xFFFF:x}-", 64_000)
    try:
        assert made.ensure()
        assert not made.ensure()
        yield made
    finally:
        made.remove()
        assert not made.present()


def test_elements_are_what_was_written(table: Table) -> None:
    policy = compile_policy(Network.allow(cidrs=["10.0.0.0/8", "203.0.113.0/24:80-90", "203.0.113.4:85,udp/53"]))
    elements = [
        *addressed(SOURCE, f"{table.prefix}14"),
        *permitted(SOURCE, policy),
        *generation(SOURCE, 77),
        *named(SOURCE, IPv4Address("203.0.113.9"), (), 60),
        *named(SOURCE, IPv4Address("203.0.113.9"), ((6, 443), (17, 443)), 60),
    ]
    table.apply([Change(element) for element in elements])
    assert set(table.stored()) == set(elements)
    left = {element.set: element.seconds for element in table.stored()}
    assert left["cidrs"] == 0 and 1 <= left["names"] <= 61 and 1 <= left["name_ports"] <= 61
    assert table.refusals() == {SOURCE: 0}
    table.apply([Change(element, add=False) for element in elements])
    assert table.stored() == []


ELEMENTS = [
    *addressed(SOURCE, "pgt0-14"),
    *permitted(SOURCE, compile_policy(Network.allow(cidrs=["10.0.0.0/8", "10.2.0.1", "203.0.113.4:85,udp/53-54"]))),
    *permitted(IPv4Address("198.18.0.21"), compile_policy(Network.open(cidrs=["10.0.0.0/24:80-90"]))),
    *generation(SOURCE, 0x7FFFFFFF),
    *named(SOURCE, IPv4Address("203.0.113.9"), (), 60),
    *named(SOURCE, IPv4Address("203.0.113.9"), ((6, 443), (17, 443)), 60),
]


def test_elements_in_the_language_of_the_rules() -> None:
    said = statements("t", ELEMENTS)
    assert 'add element inet t bound { "pgt0-14" . 198.18.0.20 }\n' in said
    assert "198.18.0.20 . 10.0.0.0-10.255.255.255" in said and "198.18.0.20 . 10.2.0.1," not in said
    assert "198.18.0.20 . 203.0.113.4 . 17 . 53-54" in said
    assert "198.18.0.20 . 203.0.113.9 . 6 . 443 timeout 60s" in said
    assert "198.18.0.20 : goto allow, 198.18.0.21 : goto open" in said
    assert "198.18.0.20 : 0x7fffffff" in said and "198.18.0.20 . 0x7fffffff" in said


def test_a_table_made_anew_comes_with_its_elements_in_one_transaction(table: Table) -> None:
    table.remove()
    with Announcements() as announced:
        assert table.ensure(ELEMENTS)
        made = next(each for each in announced if (NEWTABLE, table.name) in each)
    assert set(table.stored()) == set(ELEMENTS)
    assert {(NEWRULE, table.name), (NEWSETELEM, table.name)} <= made
    left = {element.set: element.seconds for element in table.stored()}
    assert left["cidrs"] == 0 and 1 <= left["names"] <= 61
    # What was written as text is taken away and renewed as messages.
    table.apply([Change(each, add=False) for each in ELEMENTS])
    assert table.stored() == []
    table.apply([Change(each) for each in ELEMENTS])
    assert not table.ensure(ELEMENTS[:1]), "it is there: nothing is added"
    assert set(table.stored()) == set(ELEMENTS)


NEWTABLE, NEWRULE, NEWGEN = 0, 6, 15


class Announcements:
    """What the kernel tells of changes to nftables, a set of (kind, table) for each transaction."""

    def __enter__(self) -> Iterator[set[tuple[int, str]]]:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12)
        self._socket.setsockopt(socket.SOL_SOCKET, 33, 8 << 20)  # SO_RCVBUFFORCE
        self._socket.bind((0, 0))
        self._socket.setsockopt(270, 1, watch.GROUP)
        self._socket.settimeout(60)
        return self._read()

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _read(self) -> Iterator[set[tuple[int, str]]]:
        found: set[tuple[int, str]] = set()
        while True:
            data = self._socket.recv(1 << 18)
            while len(data) >= 20:
                length, kind, *_ = struct.unpack_from("=IHHII", data)
                if kind & 0xFF == NEWGEN:
                    yield found
                    found = set()
                elif length > 24:
                    (size,) = struct.unpack_from("=H", data, 20)
                    found.add((kind & 0xFF, data[24 : 20 + size].rstrip(b"\0").decode(errors="replace")))
                data = data[length + 3 & ~3 :]


def test_a_batch_comes_into_force_as_a_whole_or_not_at_all(table: Table) -> None:
    good = permitted(SOURCE, compile_policy(Network.open()))
    with pytest.raises(OSError):
        table.apply([*(Change(each) for each in good), Change(Element("nonsense", b"1234"))])
    assert table.stored() == []
    many = compile_policy(Network.allow(cidrs=[f"10.{n // 128}.{2 * (n % 128)}.0/24:{n + 1}" for n in range(500)]))
    table.apply([Change(each) for each in permitted(SOURCE, many)])  # several messages, one batch
    assert len(table.stored(["cidr_ports"])) == 500


@pytest.mark.parametrize("new_kernel", [True, False])
def test_what_is_gone_already_can_be_taken_away(table: Table, new_kernel: bool) -> None:
    if not new_kernel:
        table._remover = DELSETELEM
    (gone,), (here,) = (list(named(SOURCE, IPv4Address(f"203.0.113.{n}"), (), 60)) for n in (1, 2))
    table.apply([Change(here)])
    table.apply([Change(gone, add=False), Change(here, add=False), Change(here)])  # renewed
    assert table.stored() == [here]
