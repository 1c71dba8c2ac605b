"""What network policies mean: tables and properties, without a network."""

from __future__ import annotations

import contextlib
from ipaddress import IPv4Address, IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.network.policy import (
    METADATA,
    NEVER,
    AllowedRange,
    Policy,
    PortRange,
    canonical,
    compile_policy,
    disjoint,
    judge_answer,
    judge_name,
    why_refused,
)
from sandbox.errors import Invalid
from sandbox.messages import Network


@pytest.mark.parametrize(
    ("name", "rules", "allowed", "ports"),
    [
        ("pypi.org", ["pypi.org"], True, ()),
        ("pypi.org", ["*.pypi.org"], False, ()),
        ("files.pypi.org", ["*.pypi.org"], True, ()),
        ("a.b.pypi.org", ["*.pypi.org"], True, ()),
        ("evilpypi.org", ["*.pypi.org"], False, ()),
        ("pypi.org.evil.net", ["pypi.org", "*.pypi.org"], False, ()),
        ("pypi.org", ["PyPI.ORG."], True, ()),
        ("anything.example", ["*"], True, ()),
        ("pypi.org", ["pypi.org:443"], True, ((6, 443),)),
        ("pypi.org", ["pypi.org:443,udp/443", "*.org:80"], True, ((6, 80), (6, 443), (17, 443))),
        ("pypi.org", ["pypi.org:443", "pypi.org"], True, ()),
        ("xn--bcher-kva.example", ["bücher.example"], True, ()),
        ("pypi.org", [], False, ()),
    ],
)
def test_names(name: str, rules: list[str], allowed: bool, ports: tuple[tuple[int, int], ...]) -> None:
    verdict = judge_name(compile_policy(Network.allow(names=rules)), name)
    assert (verdict.allowed, verdict.ports) == (allowed, ports)


def test_modes_and_names() -> None:
    assert judge_name(compile_policy(Network.open()), "anything.example").allowed
    assert not judge_name(compile_policy(Network.none()), "anything.example").allowed


@pytest.mark.parametrize(
    "network",
    [
        Network(mode="none", cidrs=("8.8.8.8",)),
        Network(mode="open", names=("pypi.org",)),
        Network.allow(cidrs=["2001:db8::/32"]),
        Network.allow(cidrs=["pypi.org"]),
        Network.allow(cidrs=["10.0.0.0/33"]),
        Network.allow(cidrs=["169.254.169.254"]),
        Network.allow(cidrs=["169.254.0.0/16:80"]),
        Network.allow(cidrs=["127.0.0.1:8700"]),
        Network.allow(cidrs=["198.18.3.0/24"]),
        Network.allow(cidrs=["224.0.0.251"]),
        Network.allow(cidrs=["100.100.100.200"]),
        Network.allow(cidrs=["1.2.3.4:0"]),
        Network.allow(cidrs=["1.2.3.4:90-80"]),
        Network.allow(cidrs=["1.2.3.4:icmp/1"]),
        Network.allow(cidrs=["1.2.3.4:80,"]),
        Network.allow(names=["1.2.3.4"]),
        Network.allow(names=["exa mple.org"]),
        Network.allow(names=["a.*.org"]),
        Network.allow(names=["*."]),
        Network.allow(names=["pypi.org:80-90"]),
        Network.allow(names=["x" * 64 + ".org"]),
        Network.allow(cidrs=[f"10.{n // 128}.{2 * (n % 128)}.0/24:{n + 1}-{n + 400}" for n in range(400)]),
    ],
)
def test_refused_policies(network: Network) -> None:
    with pytest.raises(Invalid) as raised:
        compile_policy(network)
    assert raised.value.hint


@pytest.mark.parametrize(
    ("address", "cidrs", "fine"),
    [
        ("93.184.216.34", [], True),
        ("10.0.0.5", [], False),
        ("10.0.0.5", ["10.0.0.0/24"], True),
        ("192.168.1.1", ["10.0.0.0/24"], False),
        ("127.0.0.1", ["0.0.0.0/0"], False),
        ("169.254.169.254", ["0.0.0.0/0"], False),
        ("100.100.100.200", ["0.0.0.0/0"], False),
        ("198.18.0.7", ["0.0.0.0/0"], False),
        ("0.0.0.0", [], False),
        ("255.255.255.255", [], False),
    ],
)
def test_where_a_name_may_point(address: str, cidrs: list[str], fine: bool) -> None:
    policy = compile_policy(Network.allow(names=["*"], cidrs=cidrs))
    assert (judge_answer(policy, IPv4Address(address)) == "") is fine
    assert why_refused(policy, IPv4Address(address))


def test_names_have_one_form() -> None:
    assert canonical("PyPI.org.") == "pypi.org"
    assert canonical("") == ""
    assert canonical("a..b") is None
    assert canonical("-a.org") is None
    assert canonical("_srv.a.org") == "_srv.a.org"
    assert canonical("é" * 300) is None


NETWORKS = st.builds(
    lambda number, bits: IPv4Network((number & ~((1 << 32 - bits) - 1), bits)),
    st.integers(0x0A000000, 0x0A00FFFF),
    st.integers(16, 32),
)
PORTS = st.builds(
    lambda protocol, first, width: PortRange(protocol, first, min(first + width, 40)),
    st.sampled_from([6, 17]),
    st.integers(1, 40),
    st.integers(0, 20),
)
RULES = st.lists(st.builds(AllowedRange, NETWORKS, st.none() | PORTS), max_size=12)


def _means(rules: list[AllowedRange], address: IPv4Address, protocol: int, port: int) -> bool:
    return any(
        address in rule.network
        and (rule.ports is None or (rule.ports.protocol == protocol and rule.ports.first <= port <= rule.ports.last))
        for rule in rules
    )


@given(RULES, st.integers(0x0A000000, 0x0A00FFFF), st.sampled_from([6, 17]), st.integers(1, 41))
def test_segments_mean_what_the_rules_mean(rules: list[AllowedRange], number: int, protocol: int, port: int) -> None:
    result = disjoint(rules)
    for address in (IPv4Address(number), *(rule.network[0] for rule in rules)):
        assert _means(result, address, protocol, port) == _means(rules, address, protocol, port)


@given(RULES)
def test_segments_do_not_overlap(rules: list[AllowedRange]) -> None:
    result = disjoint(rules)
    for index, one in enumerate(result):
        for other in result[index + 1 :]:
            if (one.ports is None) != (other.ports is None) or not one.network.overlaps(other.network):
                continue
            assert one.ports is not None and other.ports is not None
            assert one.ports.protocol != other.ports.protocol or (
                one.ports.last < other.ports.first or other.ports.last < one.ports.first
            )


@given(st.lists(st.text(max_size=40) | st.from_regex(r"[\d.]+(/\d+)?(:[\w/,-]*)?", fullmatch=True), max_size=3))
def test_any_text_is_a_policy_or_refused(texts: list[str]) -> None:
    for network in (Network.allow(names=texts), Network.allow(cidrs=texts), Network.open(cidrs=texts)):
        with contextlib.suppress(Invalid):
            compile_policy(network)


@given(st.integers(0, 2**32 - 1))
def test_no_policy_lets_a_name_point_to_what_nobody_may_reach(number: int) -> None:
    address = IPv4Address(number)
    everything = Policy("allow", (AllowedRange(IPv4Network("0.0.0.0/0"), None),), ())
    forbidden = any(address in item for item in (*NEVER, *METADATA))
    assert (judge_answer(everything, address) != "") is forbidden
