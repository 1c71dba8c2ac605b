"""What the resolver reads and writes: tables and properties, without a network."""

from __future__ import annotations

import asyncio
import inspect
import socket
from ipaddress import IPv4Address

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.network import links, names, refusals, resolver
from daemon.network.resolver import UPSTREAM_AT_ONCE, UPSTREAM_SHARE, Resolver, parse_servers
from sandbox.container import layer
from sandbox.messages import Network


def _answer(*records: tuple[str, str, int, str], code: int = 0) -> dns.message.Message:
    message = dns.message.make_response(dns.message.make_query("a.test.", "A"))
    message.set_rcode(dns.rcode.Rcode(code))
    for owner, kind, ttl, value in records:
        message.answer.append(dns.rrset.from_text(owner, ttl, "IN", kind, value))
    return dns.message.from_wire(message.to_wire())


def test_an_answer_is_followed_from_the_name_that_was_asked_for() -> None:
    result = names.read_answer(
        "a.test",
        _answer(
            ("A.test.", "CNAME", 300, "b.test."),
            ("b.test.", "CNAME", 20, "c.test."),
            ("c.test.", "A", 100, "203.0.113.1"),
            ("other.test.", "A", 5, "203.0.113.2"),
        ),
    )
    assert result.aliases == (("a.test", "b.test"), ("b.test", "c.test"))
    assert result.addresses == (IPv4Address("203.0.113.1"),)
    assert (result.ttl, result.missing) == (20, False)


@pytest.mark.parametrize(
    "answer",
    [
        _answer(("a.test.", "CNAME", 1, "a.test.")),
        _answer(("a.test.", "CNAME", 1, "b.test."), ("b.test.", "CNAME", 1, "a.test.")),
        _answer(*((f"{'a' if n == 0 else n}.test.", "CNAME", 1, f"{n + 1}.test.") for n in range(20))),
        _answer(code=2),
        _answer(code=5),
    ],
)
def test_answers_that_are_not_believed(answer: dns.message.Message) -> None:
    with pytest.raises(ValueError):
        names.read_answer("a.test", answer)


def test_a_name_that_does_not_exist() -> None:
    assert names.read_answer("a.test", _answer(code=3)).missing


def test_what_is_no_question() -> None:
    good = dns.message.make_query("a.test.", "A")
    assert names.read_question(good.to_wire()) is not None
    response = dns.message.make_response(good)
    update = dns.message.make_query("a.test.", "A")
    update.set_opcode(dns.opcode.Opcode(5))
    for bad in (b"", b"x", response.to_wire(), update.to_wire(), good.to_wire() + bytes(names.MAX_QUESTION)):
        assert names.read_question(bad) is None
    chaos = dns.message.make_query("version.bind.", "TXT", "CH")
    assert names.read_question(chaos.to_wire()) is None


@given(st.binary(max_size=200))
def test_garbage_is_no_question(data: bytes) -> None:
    names.read_question(data)


@given(st.binary(min_size=12, max_size=200), st.integers(0, 40))
def test_damaged_questions_are_read_or_refused(data: bytes, at: int) -> None:
    wire = bytearray(dns.message.make_query("some.name.test.", "A", use_edns=0).to_wire())
    wire[at % len(wire) :] = data
    question = names.read_question(bytes(wire))
    if question is not None:
        names.write(question, names.nothing(question), stream=False)


def test_long_answers_send_the_asker_to_tcp() -> None:
    question = names.read_question(dns.message.make_query("a.test.", "A").to_wire())
    assert question is not None
    result = names.ResolvedName(addresses=tuple(IPv4Address(0xCB007100 + n) for n in range(60)), ttl=9)
    short = dns.message.from_wire(names.write(question, names.answered(question, result), stream=False))
    assert short.flags & dns.flags.TC and not short.answer
    complete = dns.message.from_wire(names.write(question, names.answered(question, result), stream=True))
    assert len(complete.answer[0]) == 60 and complete.id == question.message.id


def test_open_for_as_long_as_the_answer_is_good_within_bounds() -> None:
    assert names.open_seconds(0) == names.MIN_TTL + 10
    assert names.open_seconds(600) == 610
    assert names.open_seconds(10**6) == names.MAX_TTL + 10


class _Upstream:
    """Answers from a table; remembers what it was asked."""

    def __init__(self, answers: dict[str, dns.message.Message]) -> None:
        self.answers = answers
        self.requested: list[str] = []

    async def request(self, name: str, sharer: str) -> dns.message.Message:
        self.requested.append(name)
        return self.answers[name]


async def _resolve(network: Network, upstream: _Upstream, name: str, kind: str = "A") -> tuple[list[str], object]:
    from daemon.network.policy import compile_policy

    happened: list[str] = []

    async def opened(name: str, addresses: object, ports: object, seconds: int) -> None:
        happened.append(f"open {[str(entry) for entry in addresses]} {list(ports)} {seconds}")  # type: ignore[call-overload]

    resolver = Resolver(upstream, opened, lambda name, why: happened.append(f"refused {name}"))  # type: ignore[arg-type]
    resolver.policy = compile_policy(network)
    wire = await resolver.answer(dns.message.make_query(name, kind).to_wire(), stream=False)
    assert wire is not None
    response = dns.message.from_wire(wire)
    happened.append(dns.rcode.to_text(response.rcode()))
    return happened, sorted(str(item) for entry in response.answer for item in entry)


async def test_the_resolver_opens_before_it_answers_and_asks_for_nothing_else() -> None:
    upstream = _Upstream({"a.test": _answer(("a.test.", "A", 5, "203.0.113.1"), ("a.test.", "A", 5, "10.0.0.1"))})
    allowed = Network.allow(names=["a.test:443"])
    happened, records = await _resolve(allowed, upstream, "A.test.")
    assert happened == ["open ['203.0.113.1'] [(6, 443)] 70", "NOERROR"] and records == ["203.0.113.1"]
    assert upstream.requested == ["a.test"]

    happened, records = await _resolve(allowed, upstream, "secret.payload.evil.test.")
    assert (happened, records) == (["refused secret.payload.evil.test", "NXDOMAIN"], [])
    happened, records = await _resolve(allowed, upstream, "a.test.", "TXT")
    assert (happened, records) == (["NOERROR"], [])
    assert upstream.requested == ["a.test"], "neither left the host"


async def test_names_that_point_to_forbidden_places() -> None:
    for address in ("127.0.0.1", "169.254.169.254", "198.18.0.20", "10.0.0.1", "0.0.0.0", "224.0.0.251"):
        upstream = _Upstream({"a.test": _answer(("a.test.", "A", 5, address))})
        for network in (Network.allow(names=["*"]), Network.open()):
            happened, records = await _resolve(network, upstream, "a.test.")
            assert (happened, records) == (["refused a.test", "NXDOMAIN"], []), address


def test_resolv_conf() -> None:
    text = "# x\nnameserver 10.0.0.2\nsearch a b\nnameserver fd00::1 # comment\nnameserver\n"
    assert parse_servers(text) == [("10.0.0.2", 53), ("fd00::1", 53)]


ROUTES = (
    "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
    "eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
    "eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
    "eth1\t0000000A\t00000000\t0001\t0\t0\t0\t000000FF\t0\t0\t0\n"
    "pgabcde-1f\t050012C6\t00000000\t0005\t0\t0\t0\tFFFFFFFF\t0\t0\t0\n"
)


def test_which_devices_lead_out() -> None:
    from ipaddress import IPv4Network

    routes = list(links.parse_routes(ROUTES))
    assert [str(route.network) for route in routes] == ["0.0.0.0/0", "192.0.2.0/24", "10.0.0.0/8", "198.18.0.5/32"]
    assert links.devices(routes, []) == ["eth0"]
    assert links.devices(routes, [IPv4Network("10.2.0.0/16")]) == ["eth0", "eth1"]


def test_refused_packets_are_read_and_remembered_within_bounds() -> None:
    import struct

    header = bytes([0x45]) + bytes(8) + bytes([6]) + bytes(2) + bytes([198, 18, 0, 5]) + bytes([10, 0, 0, 1])
    packet = header + struct.pack("!HH", 40000, 80) + bytes(20)
    attribute = struct.pack("=HH", 4 + len(packet), refusals.PAYLOAD) + packet
    body = bytes(4) + attribute + bytes(-len(attribute) % 4)
    message = struct.pack("=IHHII", 16 + len(body), refusals.SUBSYSTEM << 8, 0, 0, 0) + body
    (result,) = refusals.parse(message)
    assert (str(result.source), result.what) == ("198.18.0.5", "tcp 10.0.0.1:80")
    for damaged in (message[:25], message[:40], b"", bytes(100)):
        list(refusals.parse(damaged))

    memory = refusals.RefusalLog()
    for number in range(1000):
        memory.add(f"tcp 10.0.0.1:{number // 2}", "why", at=float(number))
    assert len(memory.list()) == refusals.RETAINED and memory.list()[-1].count == 2
    memory.add("name \x1b[31mevil\n", "why")
    assert memory.list()[-1].what == "name ?[31mevil?"


@given(st.binary(max_size=120))
def test_garbage_is_no_packet(data: bytes) -> None:
    list(refusals.parse(data))


def test_resolv_conf_of_the_runtime_layer() -> None:
    assert "nameserver 127.0.0.53" in inspect.getsource(layer)


async def test_no_owner_takes_all_questions_to_the_hosts_resolvers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's resolver answers nothing but fine.test: who asks for more waits for ever, and others do not."""
    silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    with silent:
        silent.bind(("127.0.0.1", 0))
        monkeypatch.setenv("PAGURUS_RESOLVERS", f"127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(resolver, "UPSTREAM_TIMEOUT", 3600.0)
        upstream, loop = resolver.UpstreamResolver(), asyncio.get_running_loop()
        greedy = [asyncio.create_task(upstream.request("never.test", "greedy")) for _ in range(UPSTREAM_AT_ONCE + 1)]
        other = asyncio.create_task(upstream.request("fine.test", "modest"))
        requested = 0
        while True:
            data, asker = await loop.sock_recvfrom(silent, 4096)
            question = dns.message.from_wire(data)
            if str(question.question[0].name) == "fine.test.":
                break
            requested += 1
        silent.sendto(dns.message.make_response(question).to_wire(), asker)
        assert (await other).rcode() == dns.rcode.NOERROR
        assert requested <= UPSTREAM_SHARE and not any(item.done() for item in greedy)
        for item in greedy:
            item.cancel()
        await asyncio.gather(*greedy, return_exceptions=True)
