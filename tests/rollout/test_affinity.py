"""Who is served where: costs, what is learned of answers, and the pool that measures them."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.harness.rated_engines import RatedServer
from coordinator.simulate.engines import StepCosts as EngineRates
from rollout.decide.engines.affinity import Crowd, MeasuredAnswer, Profiles, ServerRates, TokenDemand, cost
from rollout.decide.engines.measuring import AnswerTimer
from rollout.decide.engines.routing import RoutedRequest, RouteView, RoutingRules, Send, ServerView, route
from rollout.engine.asking import KIND
from rollout.engine.client import Sampling
from rollout.pool.member import PoolMember
from rollout.pool.pool import EnginePool

READER = ServerRates("reader", 0.0001, 0.03, 0.0)  # reads fast
WRITER = ServerRates("writer", 0.001, 0.02, 0.0)  # writes fast
LONG_PROMPT, LONG_ANSWER = TokenDemand(2000, 20), TokenDemand(100, 200)
RULES = RoutingRules(hysteresis=0.25, again=100, trials=1)


def server(name: str, load: int = 0, *, slots: int = 8, readers: int = 0, reading: int = 0) -> ServerView:
    return ServerView(name, "serving", slots, load, 0, name.rstrip("12"), readers, reading)


BOTH = [server("reader1"), server("writer1")]
CROWDED = ServerRates("reader", 0.0001, 0.03, 0.01)

TABLE: list[tuple[str, list[ServerView], list[ServerRates], RoutedRequest, Send]] = [
    ("who reads much", BOTH, [READER, WRITER], RoutedRequest(1, need=LONG_PROMPT), Send(1, "reader1", "cheapest")),
    ("who writes much", BOTH, [READER, WRITER], RoutedRequest(1, need=LONG_ANSWER), Send(1, "writer1", "cheapest")),
    ("the emptier of two alike", [server("writer1", 3), server("writer2"), server("reader1")], [READER, WRITER],
     RoutedRequest(1, need=LONG_ANSWER), Send(1, "writer2", "cheapest")),
    ("a crowd makes a class dear", [server("reader1", 7), server("writer1")], [CROWDED, WRITER],
     RoutedRequest(1, need=LONG_PROMPT), Send(1, "writer1", "cheapest")),
    ("a queue of prompts too", [server("reader1", 2, readers=2, reading=20000), server("writer1")], [READER, WRITER],
     RoutedRequest(1, need=LONG_PROMPT), Send(1, "writer1", "cheapest")),
    ("the dear one, where the cheap one is full", [server("reader1", 8), server("writer1")], [READER, WRITER],
     RoutedRequest(1, need=LONG_PROMPT), Send(1, "writer1", "cheapest")),
    ("where its cache is, though slightly dearer", BOTH, [READER, WRITER],
     RoutedRequest(1, 0, ["writer1"], 0, 0, TokenDemand(100, 20)), Send(1, "writer1", "prefix")),
    ("elsewhere, where its cache is far dearer", BOTH, [READER, WRITER],
     RoutedRequest(1, 0, ["reader1"], 100, 0, LONG_ANSWER), Send(1, "writer1", "dearer")),
    ("but not if it must be read anew for that", BOTH, [READER, WRITER],
     RoutedRequest(1, 0, ["reader1"], 9000, 0, LONG_ANSWER), Send(1, "reader1", "prefix")),
    ("a class that nobody has measured is tried", BOTH, [READER], RoutedRequest(1, need=LONG_PROMPT),
     Send(1, "writer1", "trial")),
    ("but not by many at once", [server("reader1", 4), server("writer1", 1)], [READER], RoutedRequest(1,
    need=LONG_PROMPT),
     Send(1, "reader1", "cheapest")),
    ("nor by who has a cache", BOTH, [READER], RoutedRequest(1, 0, ["reader1"], 9, 0, LONG_PROMPT), Send(1, "reader1",
    "prefix")),
    ("nor one that is cheap to everybody and measured", BOTH, [READER, WRITER], RoutedRequest(1, need=TokenDemand(10,
    10)),
     Send(1, "writer1", "cheapest")),
    ("one that was measured long ago is tried again", BOTH, [msgspec.structs.replace(READER, age=101), WRITER],
     RoutedRequest(1, need=LONG_ANSWER), Send(1, "reader1", "trial")),
    ("an environment of which nothing is known: the least loaded", [server("reader1", 1), server("writer1")],
     [READER, WRITER], RoutedRequest(1), Send(1, "writer1", "least")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("servers", "rates", "query", "target"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_the_table(servers: list[ServerView], rates: list[ServerRates], query: RoutedRequest, target: Send) -> None:
    assert route(RouteView(servers=servers, waiting=[query], rates=rates), RULES) == [target]


def test_one_decision_sees_what_it_has_decided() -> None:
    """Many who read do not all go to the one that reads fast."""
    requests = [RoutedRequest(n, tokens=2000, need=LONG_PROMPT) for n in range(8)]
    sends = route(
        RouteView(servers=[server("reader1"), server("writer1")], waiting=requests, rates=[READER, WRITER]), RULES
    )
    assert {send.server for send in sends} == {"reader1", "writer1"}


RATES = st.builds(
    ServerRates,
    st.sampled_from(["reader", "writer"]),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 200),
)
SERVERS = st.lists(
    st.builds(
        ServerView,
        st.sampled_from(["a", "b", "c", "d"]),
        st.sampled_from(["serving", "updating", "down"]),
        st.integers(1, 4),
        st.integers(0, 4),
        st.integers(0, 99),
        st.sampled_from(["reader", "writer", "third"]),
        st.integers(0, 4),
        st.integers(0, 9999),
    ),
    unique_by=lambda item: item.name,
    max_size=4,
)
REQUESTS = st.lists(
    st.builds(
        RoutedRequest,
        st.integers(0, 99),
        st.integers(-2, 2),
        st.lists(st.sampled_from("abcde"), max_size=2),
        st.integers(0, 999),
        st.integers(0, 999),
        st.none() | st.builds(TokenDemand, st.floats(0, 9999), st.floats(0, 999)),
    ),
    unique_by=lambda item: item.key,
    max_size=8,
)


@given(SERVERS, REQUESTS, st.lists(RATES, unique_by=lambda item: item.hardware))
def test_nobody_waits_for_a_cheap_server_while_another_is_free(
    servers: list[ServerView], requests: list[RoutedRequest], rates: list[ServerRates]
) -> None:
    view = RouteView(servers=servers, waiting=requests, rates=rates)
    sends = route(view, RULES)
    free = {item.name: max(0, item.slots - item.load) for item in servers if item.state == "serving"}
    for send in sends:
        free[send.server] -= 1
    assert all(left >= 0 for left in free.values())
    assert len(sends) == len(requests) or not any(free.values())
    again = msgspec.json.decode(msgspec.json.encode(view), type=RouteView)
    assert route(again, RULES) == sends


@given(
    st.builds(ServerRates, st.just("a"), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)),
    st.builds(Crowd, st.integers(0, 64), st.integers(0, 64), st.integers(0, 99_999)),
    st.builds(TokenDemand, st.floats(0, 9999), st.floats(0, 999)),
)
def test_a_crowd_never_makes_a_server_cheaper(rates: ServerRates, crowd: Crowd, need: TokenDemand) -> None:
    more = Crowd(crowd.answers + 1, crowd.readers + 1, crowd.reading + 100)
    assert 0 <= cost(rates, crowd, need) <= cost(rates, more, need)
    assert cost(rates, crowd, need) <= cost(rates, crowd, need, redo=50)


def answered(kind: str, hardware: str, *, read: int, sampled: int, alongside: int, ahead: int = 0) -> MeasuredAnswer:
    """As a server gives it whose step takes 20 ms, 1 ms more for each answer beside, and which reads 1,000 a second."""
    return MeasuredAnswer(
        kind=kind,
        hardware=hardware,
        new=read,
        read=read,
        ahead=ahead,
        read_s=(read + ahead) / 1000,
        first=1,
        sampled=sampled,
        sampled_s=(sampled - 1) * (0.02 + 0.001 * alongside),
        alongside=alongside,
    )


def test_rates_are_found_in_answers_of_all_kinds() -> None:
    existing = Profiles()
    for n in range(200):
        kind, read, sampled = ("reads", 2000, 20) if n % 2 else ("writes", 100, 200)
        existing.learn(answered(kind, "a", read=read, sampled=sampled, alongside=n % 7, ahead=n % 3 * 500))
    (rates,) = existing.rates()
    assert (rates.read, rates.step, rates.alongside, rates.age) == pytest.approx((0.001, 0.02, 0.001, 0))
    need = existing.need("reads")
    assert need is not None and (need.read, need.sampled) == pytest.approx((2000, 20))
    assert existing.need("unheard of") is None


def test_a_profile_follows_an_environment_that_changes() -> None:
    existing = Profiles(turns=8)
    for n in range(100):
        existing.learn(answered("x", "a", read=2000 if n < 60 else 100, sampled=20 if n < 60 else 200, alongside=n % 4))
    need = existing.need("x")
    assert need is not None and need.read < 200 and need.sampled > 190


def test_a_class_that_is_not_used_grows_old() -> None:
    existing = Profiles()
    existing.learn(answered("x", "a", read=9, sampled=9, alongside=1))
    for _ in range(5):
        existing.learn(answered("x", "b", read=9, sampled=9, alongside=1))
    assert {rates.hardware: rates.age for rates in existing.rates()} == {"a": 5, "b": 0}


def test_an_answer_is_measured_among_others() -> None:
    busy = PoolMember("a", server=None, hardware="H20")  # type: ignore[arg-type]
    busy.load = 3
    first = AnswerTimer(busy, "x", new=100, read=100, now=10.0)
    second = AnswerTimer(busy, "x", new=50, read=400, now=10.5)
    assert (busy.readers, busy.reading) == (2, 500)
    first.piece(1, 11.0)
    first.piece(9, 12.0)
    busy.load = 1
    assert first.answered == MeasuredAnswer(
        kind="x",
        hardware="H20",
        new=100,
        read=100,
        ahead=0,
        read_s=1.0,
        first=1,
        sampled=10,
        sampled_s=1.0,
        alongside=1.0,
    )
    second.leave()  # it was lost
    assert (busy.readers, busy.reading) == (0, 0) and second.answered.ahead == 100


@pytest.mark.asyncio
async def test_the_pool_measures_its_servers_and_asks_by_what_it_measured() -> None:
    reported: list[tuple[RouteView, list[Send]]] = []
    async with EnginePool(report=lambda view, sends: reported.append((view, sends))) as pool:
        for hardware, step in (("slow", 0.002), ("fast", 0.001)):
            await pool.join(hardware, RatedServer(EngineRates(base=step), hardware, {}), hardware=hardware)
        KIND.set("writes")
        await asyncio.gather(*(pool.generate([n] * 40, Sampling(max_tokens=10)) for n in range(4)))
        assert {send.server for _, sends in reported for send in sends} == {"slow", "fast"}  # both are tried
        for n in range(4, 8):
            await pool.generate([n] * 40, Sampling(max_tokens=10))
        assert all((member.readers, member.reading, member.load) == (0, 0, 0) for member in pool.members.values())
    view, (send,) = reported[-1]
    assert send.why == "cheapest" and route(view, RoutingRules()) == [send]
    need = view.waiting[0].need
    assert need is not None and (need.read, need.sampled) == pytest.approx((40, 10))
    assert {rates.hardware for rates in view.rates} == {"slow", "fast"} and all(rates.step > 0 for rates in view.rates)
