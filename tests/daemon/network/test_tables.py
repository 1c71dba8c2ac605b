"""Elements, addresses and announcements of the network: pure parts, and the table in a real kernel."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.harness import own_internet
from daemon.catalogue import SandboxRow
from daemon.network import links, present, watch
from daemon.network import table as tables
from daemon.network.elements import Element, ElementChange, addressed, generation, named, permitted, service, statements
from daemon.network.namespace import within
from daemon.network.networks import Networks, _addresses, _still_named
from daemon.network.policy import POOL, compile_policy
from daemon.network.present import Chain
from daemon.network.probe import _others, _strict, fresh_namespace
from daemon.network.table import DELSETELEM, NEWSETELEM, NftTable, nft
from sandbox.criu import tcp
from sandbox.errors import Unsupported
from sandbox.messages import Network, SandboxState
from tests.support.daemon_host import until

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
        self.src_addr, self.dst_addr = ([_word(item)] for item in (self.src, self.dst))

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
    changed = tcp.readdress([Entry(None), Entry(before)], present)
    assert (changed, before.now) == ((False, was) if after is None else (True, after))


# ------------------------------------------------------------------ elements


def test_what_names_opened_stays_open_only_where_they_are_still_allowed() -> None:
    (plain,) = named(SOURCE, IPv4Address("203.0.113.1"), (), 60)
    (port,) = named(SOURCE, IPv4Address("203.0.113.1"), ((6, 443),), 60)
    (private,) = named(SOURCE, IPv4Address("10.0.0.1"), (), 60)
    assert service(port.key[8:]) == (6, 443)
    for network, retained in (
        (Network.allow(names=["a.test"]), {plain}),
        (Network.allow(names=["a.test:443"]), {port}),
        (Network.allow(names=["b.test"]), set()),
        (Network.allow(names=["a.test"], cidrs=["10.0.0.0/8"]), {plain}),  # a private address is opened by cidrs alone
        (Network.open(), set()),  # needs none of them
    ):
        policy = compile_policy(network)
        assert {item for item in (plain, port, private) if _still_named(policy, "a.test", item)} == retained
        assert not any(_still_named(policy, "", item) for item in (plain, port, private))


def test_who_else_decides_about_forwarding() -> None:
    result = _strict(
        [
            Chain("ip", "filter", "FORWARD", forward=True, drops=True),
            Chain("ip", "x", "INPUT", drops=True),
            Chain("ip", "y", "FORWARD", forward=True),
            Chain("inet", "pagurus", "forward", forward=True, drops=True),
        ]
    )
    assert result == ["ip filter FORWARD"]


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


NAME, PREFIX, GROUP = f"pagurus_test_{os.getpid()}", f"pgt{os.getpid() % 0xFFFF:x}-", 64_000


def a_table(group: int = GROUP, *, owned: bool) -> NftTable:
    """`owned`: its own while it lives, as from Linux 6.9 on; or as on kernels before."""
    if reason := own_internet.missing():
        pytest.skip(reason)
    made = NftTable(NAME, PREFIX, group)
    if owned and not made.ownable:
        pytest.skip("before Linux 6.9 no table outlives its owner")
    made.ownable = owned
    return made


@pytest.fixture(params=[True, False], ids=["owned", "as before Linux 6.9"])
def table(request: pytest.FixtureRequest) -> Iterator[NftTable]:
    made = a_table(owned=request.param)
    try:
        assert made.ensure()
        assert not made.ensure()
        yield made
    finally:
        made.remove()
        assert not made.present()


def test_elements_are_what_was_written(table: NftTable) -> None:
    policy = compile_policy(Network.allow(cidrs=["10.0.0.0/8", "203.0.113.0/24:80-90", "203.0.113.4:85,udp/53"]))
    elements = [
        *addressed(SOURCE, f"{table.prefix}14"),
        *permitted(SOURCE, policy),
        *generation(SOURCE, 77),
        *named(SOURCE, IPv4Address("203.0.113.9"), (), 60),
        *named(SOURCE, IPv4Address("203.0.113.9"), ((6, 443), (17, 443)), 60),
    ]
    table.apply([ElementChange(element) for element in elements])
    assert set(table.stored()) == set(elements)
    left = {element.set: element.seconds for element in table.stored()}
    assert left["cidrs"] == 0 and 1 <= left["names"] <= 61 and 1 <= left["name_ports"] <= 61
    assert table.refusals() == {SOURCE: 0}
    table.apply([ElementChange(element, add=False) for element in elements])
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


def test_a_table_made_anew_comes_with_its_elements_in_one_transaction(table: NftTable) -> None:
    table.remove()
    with Announcements() as announced:
        assert table.ensure(ELEMENTS)
        made = next(item for item in announced if {(NEWRULE, table.name), (NEWSETELEM, table.name)} & item)
    assert set(table.stored()) == set(ELEMENTS)
    assert {(NEWRULE, table.name), (NEWSETELEM, table.name)} <= made
    left = {element.set: element.seconds for element in table.stored()}
    assert left["cidrs"] == 0 and 1 <= left["names"] <= 61
    # What was written as text is taken away and renewed as messages.
    table.apply([ElementChange(item, add=False) for item in ELEMENTS])
    assert table.stored() == []
    table.apply([ElementChange(item) for item in ELEMENTS])
    assert not table.ensure(ELEMENTS[:1]), "it is there: nothing is added"
    assert set(table.stored()) == set(ELEMENTS)


DELTABLE, NEWRULE, NEWGEN = 2, 6, 15


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
        result: set[tuple[int, str]] = set()
        while True:
            data = self._socket.recv(1 << 18)
            while len(data) >= 20:
                length, kind, *_ = struct.unpack_from("=IHHII", data)
                if kind & 0xFF == NEWGEN:
                    yield result
                    result = set()
                elif length > 24:
                    (size,) = struct.unpack_from("=H", data, 20)
                    result.add((kind & 0xFF, data[24 : 20 + size].rstrip(b"\0").decode(errors="replace")))
                data = data[length + 3 & ~3 :]


def test_what_is_ours_nobody_else_takes_away_or_changes() -> None:
    """In a namespace of its own, for the whole ruleset is flushed."""
    a_table(owned=True)  # or it is skipped here
    with fresh_namespace() as namespace:
        within(namespace, _retained)


def _retained() -> None:
    table = a_table(owned=True)
    table.ensure(ELEMENTS)
    for refused in (
        "delete table inet {}",
        "flush chain inet {} guard",
        "add element inet {} modes {{ 1.1.1.1 : accept }}",
    ):
        with pytest.raises(Unsupported, match="not permitted"):
            nft(refused.format(NAME))
    with pytest.raises(OSError):
        table.apply([ElementChange(Element("nonsense", b"1234"))])  # a batch that is refused: it stays the owner
    nft("flush ruleset")
    assert set(table.stored()) == set(ELEMENTS)
    table.close()
    table.apply([ElementChange(ELEMENTS[0], add=False), ElementChange(ELEMENTS[0])])  # on a new socket: ours again
    nft("flush ruleset")
    assert set(table.stored()) == set(ELEMENTS)
    table.close()  # its owner is gone: it stays, for the next one
    other = a_table(owned=True)
    assert not other.ensure()
    nft("flush ruleset")
    assert set(other.stored()) == set(ELEMENTS)
    other.close()
    nft("flush ruleset")
    assert not other.present()
    with pytest.raises(FileNotFoundError):
        other.apply([ElementChange(ELEMENTS[0])])
    assert not other.present(), "no empty table is made of a lost one"
    other.close()


@pytest.mark.alone
def test_no_packet_passes_while_rules_are_made_anew(table: NftTable) -> None:
    table.remove()
    former = a_table(GROUP + 1, owned=table.ownable)  # other rules
    former.ensure(ELEMENTS)
    former.close()
    with Announcements() as announced:
        assert table.ensure(ELEMENTS)
        full = {NAME}
        for step, item in enumerate(announced):
            full -= {name for kind, name in item if kind == DELTABLE}
            full |= {name for kind, name in item if kind == NEWRULE and (NEWSETELEM, name) in item}
            assert full, f"no rules after transaction {step}"
            if full == {NAME} and (NEWRULE, NAME) in item:
                break
    assert set(table.stored()) == set(ELEMENTS)
    assert [line.split()[2] for line in nft("list", "tables").splitlines() if NAME in line] == [NAME]


class Died(Exception):
    """In the middle."""


@pytest.mark.parametrize("steps", range(4))
def test_who_dies_while_rules_are_made_anew_loses_nothing(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    former = a_table(GROUP + 1, owned=True)
    former.ensure(ELEMENTS)
    former.close()
    left = iter(range(steps))

    def until_it_dies(do: Any) -> Any:
        def step(*arguments: Any, **named: Any) -> Any:
            if arguments[0] != "list" and next(left, None) is None:
                raise Died
            return do(*arguments, **named)

        return step

    after = a_table(owned=True)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(tables, "nft", until_it_dies(nft))
            patch.setattr(NftTable, "_exchange", until_it_dies(NftTable._exchange))
            dying = a_table(owned=True)
            with pytest.raises(Died):
                dying.ensure(ELEMENTS)
            dying.close()
        existing = after.stored()
        assert set(existing) == set(ELEMENTS)
        assert after.ensure(existing) == (steps < 3)
        assert set(after.stored()) == set(ELEMENTS)
    finally:
        after.remove()
        assert NAME not in nft("list", "tables")


def test_an_nft_that_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nft"
    program.write_text("#!/bin/sh\nexec sleep infinity\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(tables, "NFT_TIMEOUT", 0.1)
    with pytest.raises(Unsupported, match="did not end within"):
        nft("list", "tables")


def test_who_dies_before_the_first_rules_leaves_an_empty_table() -> None:
    after = a_table(owned=True)
    try:
        after._exchange([tables._of_table(tables.NEWTABLE, NAME, tables.PERSIST)])
        assert after.present() and after.stored() == []
        assert after.ensure(ELEMENTS)
        assert set(after.stored()) == set(ELEMENTS)
    finally:
        after.remove()


async def test_a_lost_table_is_put_back_as_it_was(tmp_path: Path) -> None:
    """As on kernels where anybody can flush it."""
    if reason := own_internet.missing():
        pytest.skip(reason)
    networks = Networks(tmp_path)
    networks.table.ownable = False
    await networks._ensure()
    try:
        attached = networks._new(links.SandboxLink("pgt0-14", 0, SOURCE, "s-1"))
        attached.elements = {item for item in ELEMENTS if not item.set.startswith("name")}
        until_then = asyncio.get_running_loop().time() + 60
        attached.named = {item: ("web.test", until_then) for item in ELEMENTS if item.set.startswith("name")}
        for _ in range(3):
            nft("delete", "table", "inet", networks.table.name)
            await until(lambda: asyncio.to_thread(networks.table.present), "it is back")
            assert set(await asyncio.to_thread(networks.table.stored)) == set(ELEMENTS)
    finally:
        networks._attached.clear()
        await networks.close()


def test_a_batch_comes_into_force_as_a_whole_or_not_at_all(table: NftTable) -> None:
    good = permitted(SOURCE, compile_policy(Network.open()))
    with pytest.raises(OSError):
        table.apply([*(ElementChange(item) for item in good), ElementChange(Element("nonsense", b"1234"))])
    assert table.stored() == []
    many = compile_policy(Network.allow(cidrs=[f"10.{n // 128}.{2 * (n % 128)}.0/24:{n + 1}" for n in range(500)]))
    table.apply([ElementChange(item) for item in permitted(SOURCE, many)])  # several messages, one batch
    assert len(table.stored(["cidr_ports"])) == 500


@pytest.mark.parametrize("new_kernel", [True, False])
def test_what_is_gone_already_can_be_taken_away(table: NftTable, new_kernel: bool) -> None:
    if not new_kernel:
        table._remover = DELSETELEM
    (gone,), (here,) = (list(named(SOURCE, IPv4Address(f"203.0.113.{n}"), (), 60)) for n in (1, 2))
    table.apply([ElementChange(here)])
    table.apply([ElementChange(gone, add=False), ElementChange(here, add=False), ElementChange(here)])  # renewed
    assert table.stored() == [here]


DIES_AT_LISTS = """#!/bin/sh
case "$*" in *list*) kill -SEGV $$ ;; esac
exec {nft} "$@"
"""


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A table of somebody else over which this host's nft dies, as that of Debian 12 does over newer ones."""
    if reason := own_internet.missing():
        pytest.skip(reason)
    real = shutil.which("nft") or shutil.which("nft", path="/usr/sbin:/sbin")
    name = "of_somebody_else"
    rules = f"add chain ip {name} f {{ type filter hook forward priority 0; policy drop; }}"
    nft("-f", "-", text=f"add table ip {name}\n{rules}\nadd set ip {name} s {{ type ipv4_addr; }}\n")
    (tmp_path / "nft").write_text(DIES_AT_LISTS.format(nft=real))
    (tmp_path / "nft").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    try:
        yield name
    finally:
        nft("delete", "table", "ip", name)


@pytest.mark.parametrize("owned", [True, False])
def test_a_table_that_nft_dies_over_is_not_listed(foreign: str, owned: bool) -> None:
    with pytest.raises(Unsupported, match="died of SIGSEGV") as died:
        nft("list", "ruleset")
    assert f"ip {foreign}" in died.value.message and "install that nft here" in died.value.hint
    made = a_table(owned=owned)
    try:
        assert made.ensure() and not made.ensure() and made.present()
        assert ("inet", made.name) in present.tables() and ("ip", foreign) in present.tables()
        assert f"ip {foreign} f" in _strict(present.chains())
        reported = _others(present.tables())
        assert f"ip {foreign}, which this host's nft cannot read" in reported and made.name not in reported
        again = a_table(owned=owned)
        made.close()
        assert not again.ensure()  # the next daemon finds the rules that it knows
        again.remove()
        assert not again.present()
    finally:
        made.remove()
    assert ("ip", foreign) in present.tables()


async def test_a_host_without_working_nft_has_a_daemon_and_no_networks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> str:
        raise Unsupported("nft: Operation not permitted")

    monkeypatch.setattr("daemon.network.table.nft", broken)
    monkeypatch.setattr(present, "tables", broken)
    networks = Networks(tmp_path)
    row = SandboxRow(
        id="s-1",
        image="",
        state=SandboxState.RUNNING,
        created_at=0.0,
        uid_base=1 << 20,
        hostname="h",
        tree=None,
        head="",
        origin="",
    )
    await networks.open([row])
    await networks.attach(row, None)
    assert (await networks.status(row)).address is None
    row.network = Network.open()
    with pytest.raises(Unsupported, match="not permitted"):
        await networks.attach(row, SimpleNamespace(followers={}, netns=Path("/proc/self/ns/net")))
    await networks.close()
    again = Networks(tmp_path)
    with pytest.raises(Unsupported, match="not permitted"):
        await again.open([row])  # its policy could not be kept
    await again.close()


def test_messages_are_read_by_others_as_they_were_meant() -> None:
    from pyroute2.netlink.nfnetlink.nftsocket import nft_set_elem_list_msg

    policy = compile_policy(Network.allow(names=["a.example"], cidrs=["10.0.0.0/8:tcp/80"]))
    target = [*addressed(SOURCE, "pgx-1"), *generation(SOURCE, 77), *permitted(SOURCE, policy)]
    target += named(SOURCE, IPv4Address("192.0.2.1"), [(6, 443)], 60)
    read = []
    for message in NftTable("t", "p", 1)._messages([ElementChange(item) for item in target]):
        decoded = nft_set_elem_list_msg(message)
        decoded.decode()
        name = decoded.get_attr("NFTA_SET_ELEM_LIST_SET")
        for item in decoded.get_attr("NFTA_SET_ELEM_LIST_ELEMENTS"):
            key = bytes(item.get_nested("NFTA_SET_ELEM_KEY", "NFTA_DATA_VALUE"))
            end = bytes(item.get_nested("NFTA_SET_ELEM_KEY_END", "NFTA_DATA_VALUE") or b"")
            chain = item.get_nested("NFTA_SET_ELEM_DATA", "NFTA_DATA_VERDICT", "NFTA_VERDICT_CHAIN") or ""
            read.append((name, key, end, chain, item.get_attr("NFTA_SET_ELEM_TIMEOUT") or 0))
    assert read == [(item.set, item.key, item.end or b"", item.chain or "", 1000 * item.seconds) for item in target]
