"""Which server gets which request: tables, properties, and a log that replays."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.decide.engines.prefixes import BLOCK, Prefixes, chain
from rollout.decide.engines.routing import (
    RoutedRequest,
    RouteView,
    RoutingRules,
    Send,
    ServerView,
    Signs,
    Taking,
    judge,
    next_to_update,
    order,
    route,
)

RULES = RoutingRules(overload=1.5, headroom=4, silence=60, update=180)


def server(name: str, load: int = 0, *, slots: int = 8, state: str = "serving", tokens: int = 0) -> ServerView:
    return ServerView(name, state, slots, load, tokens)  # type: ignore[arg-type]


TABLE: list[tuple[str, list[ServerView], list[RoutedRequest], list[Send]]] = [
    ("least loaded", [server("a", 3), server("b", 1)], [RoutedRequest(1)], [Send(1, "b", "least")]),
    ("tokens break a tie", [server("a", 1, tokens=900), server("b", 1, tokens=9)], [RoutedRequest(1)], [Send(1, "b",
    "least")]),
    ("where its prefix is", [server("a", 3), server("b", 1)], [RoutedRequest(1, 0, ["a"])], [Send(1, "a", "prefix")]),
    ("unless overloaded", [server("a", 7), server("b", 1)], [RoutedRequest(1, 0, ["a"])], [Send(1, "b", "overloaded")]),
    ("the emptier of two homes", [server("a", 3), server("b", 1)], [RoutedRequest(1, 0, ["a", "b"])], [Send(1, "b",
    "prefix")]),
    ("its server is down", [server("a", state="down"), server("b")], [RoutedRequest(1, 0, ["a"])], [Send(1, "b",
    "moved")]),
    ("nobody serves", [server("a", state="updating"), server("b", state="draining")], [RoutedRequest(1)], []),
    ("all are full: who is urgent, then who is older", [server("a", 7)], [RoutedRequest(1), RoutedRequest(2, -1),
    RoutedRequest(0)],
     [Send(2, "a", "least")]),
    ("each takes what it has slots for", [server("a", slots=1), server("b", slots=1)], [RoutedRequest(1),
    RoutedRequest(2), RoutedRequest(3)],
     [Send(1, "a", "least"), Send(2, "b", "least")]),
]  # fmt: skip


@pytest.mark.parametrize(("servers", "waiting", "target"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_the_table(servers: list[ServerView], waiting: list[RoutedRequest], target: list[Send]) -> None:
    assert route(RouteView(servers=servers, waiting=waiting), RULES) == target


STATES = st.sampled_from(["starting", "serving", "updating", "draining", "down"])
SERVERS = st.lists(
    st.builds(ServerView, st.sampled_from("abcdef"), STATES, st.integers(1, 5), st.integers(0, 5), st.integers(0, 99)),
    unique_by=lambda item: item.name,
    max_size=6,
)
REQUESTS = st.lists(
    st.builds(RoutedRequest, st.integers(0, 99), st.integers(-2, 2), st.lists(st.sampled_from("abcdefg"), max_size=2)),
    unique_by=lambda item: item.key,
    max_size=12,
)


@pytest.mark.parametrize(
    ("own", "colocated", "homes", "target"),
    [
        (3, 0, ["own"], ("own", "prefix")),  # its cache is there
        (4, 0, ["own"], ("colocated", "colocated")),
        (0, 0, [], ("colocated", "colocated")),
        (0, 4, ["colocated"], ("own", "overloaded")),  # its users leave no room
        (4, 4, [], None),
    ],
)
def test_where_a_turn_goes_while_a_serving_engine_is_lent(
    own: int, colocated: int, homes: list[str], target: tuple[str, str] | None
) -> None:
    servers = [ServerView("own", "serving", 4, own), ServerView("colocated", "serving", 4, colocated, colocated=True)]
    sends = route(RouteView(servers=servers, waiting=[RoutedRequest(0, homes=homes)]), RULES)
    assert [(send.server, send.why) for send in sends] == ([] if target is None else [target])


@given(SERVERS, REQUESTS)
def test_no_server_is_overfilled_and_nobody_is_passed_by(
    servers: list[ServerView], requests: list[RoutedRequest]
) -> None:
    view = RouteView(servers=servers, waiting=requests)
    sends = route(view, RULES)
    free = {item.name: max(0, item.slots - item.load) for item in servers if item.state == "serving"}
    for send in sends:
        free[send.server] -= 1
    assert all(left >= 0 for left in free.values())
    ranked = [request.key for request in sorted(requests, key=order)]
    assert [send.key for send in sends] == ranked[: len(sends)]
    assert len(sends) == len(requests) or not any(free.values())


@given(SERVERS, REQUESTS)
def test_a_logged_view_decides_again_the_same(servers: list[ServerView], requests: list[RoutedRequest]) -> None:
    view = RouteView(servers=servers, waiting=requests)
    again = msgspec.json.decode(msgspec.json.encode(view), type=RouteView)
    assert route(again, RULES) == route(view, RULES)


@pytest.mark.parametrize(
    ("signs", "now", "target"),
    [
        (Signs(name="a", state="serving", ended=True), 0, "lost"),
        (Signs(name="a", state="serving"), 1e9, "well"),  # nobody asked it
        (Signs(name="a", state="serving", requested_since=100, last_seen=0), 161, "hung"),
        (Signs(name="a", state="serving", requested_since=100, last_seen=130), 161, "well"),
        (Signs(name="a", state="serving", requested_since=100, last_seen=130), 191, "hung"),
        (Signs(name="a", state="serving", requested_since=100, last_seen=130, colocated=True), 131, "well"),
        (Signs(name="a", state="serving", requested_since=100, last_seen=130, colocated=True), 133, "hung"),
        (Signs(name="a", state="updating", requested_since=100, updating_since=110), 200, "well"),
        (Signs(name="a", state="updating", requested_since=100, updating_since=110), 291, "hung"),
    ],
)
def test_who_is_given_up(signs: Signs, now: float, target: str) -> None:
    assert judge(signs, RULES, now) == target


@given(
    st.lists(st.builds(Taking, st.sampled_from("abcdef"), STATES, st.integers(0, 2)), unique_by=lambda t: t.name),
    st.integers(1, 4),
)
def test_some_always_go_on_while_others_take_weights(servers: list[Taking], at_once: int) -> None:
    chosen = next_to_update(servers, 2, at_once=at_once)
    by_name = {item.name: item for item in servers}
    assert all(by_name[name].state == "serving" and by_name[name].version != 2 for name in chosen)
    serving = sum(item.state == "serving" for item in servers)
    updating = sum(item.state == "updating" for item in servers)
    assert updating + len(chosen) <= max(at_once, updating)
    assert serving - len(chosen) >= 1 or (serving <= 1 and updating == 0) or not chosen


@given(st.lists(st.lists(st.integers(0, 3), max_size=4 * BLOCK), max_size=6), st.lists(st.integers(0, 3), max_size=99))
def test_prefixes_are_found_to_the_block(existing: list[list[int]], ids: list[int]) -> None:
    observed = Prefixes()
    for number, item in enumerate(existing):
        observed.remember("ab"[number % 2], chain(item))

    def shared(server: str) -> int:
        result = 0
        for item in existing["ab".index(server) :: 2]:
            same = next((i for i, pair in enumerate(zip(item, ids, strict=False)) if pair[0] != pair[1]), None)
            same = min(len(item), len(ids)) if same is None else same
            result = max(result, same // BLOCK * BLOCK)
        return result

    servers, depth = observed.deepest(chain(ids))
    best = max(shared("a"), shared("b"))
    assert depth == best
    assert servers == [name for name in "ab" if best and shared(name) == best]
    observed.forget("a")
    assert "a" not in observed.deepest(chain(ids))[0]
