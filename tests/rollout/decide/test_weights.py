"""The cheapest way to a version, and what a store keeps: held against search over all ways."""

from __future__ import annotations

import heapq

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.decide.weights import Hop, VersionSizes, retained, route

SIZES = st.one_of(st.none(), st.integers(0, 100))


@st.composite
def histories(draw: st.DrawFn) -> list[VersionSizes]:
    """Versions 0, 1, …; most go on from the one before, some from nothing (a publisher that began anew)."""
    count = draw(st.integers(1, 12))
    existing = []
    for number in range(count):
        step = draw(SIZES) if number else None
        complete = draw(SIZES) if step is not None else draw(st.integers(0, 100))
        existing.append(
            VersionSizes(number, f"d{number}", f"d{number - 1}" if step is not None else None, step, complete)
        )
    return existing


def cheapest(existing: list[VersionSizes], have: str | None, want: str) -> int | None:
    """Dijkstra over versions, from nothing and from `have`."""
    queue = [(0, "")] + ([(0, have)] if have is not None else [])
    done: set[str] = set()
    while queue:
        spent, at = heapq.heappop(queue)
        if at == want:
            return spent
        if at in done:
            continue
        done.add(at)
        for item in existing:
            if at == "" and item.total_bytes is not None:
                heapq.heappush(queue, (spent + item.total_bytes, item.digest))
            if item.base == at and item.step_bytes is not None:
                heapq.heappush(queue, (spent + item.step_bytes, item.digest))
    return None


def cost(existing: list[VersionSizes], hops: list[Hop]) -> int:
    by_digest = {item.digest: item for item in existing}
    sizes = [
        by_digest[hop.digest].step_bytes if hop.kind == "step" else by_digest[hop.digest].total_bytes for hop in hops
    ]
    assert None not in sizes
    return sum(size for size in sizes if size is not None)


def connected(existing: list[VersionSizes], hops: list[Hop], have: str | None, want: str) -> bool:
    by_digest = {item.digest: item for item in existing}
    at = have
    for hop in hops:
        if hop.kind == "step" and by_digest[hop.digest].base != at:
            return False
        at = hop.digest
    return at == want


@settings(max_examples=500)
@given(histories(), st.data())
def test_the_way_is_the_cheapest_there_is(existing: list[VersionSizes], data: st.DataObject) -> None:
    names = [item.digest for item in existing]
    have = data.draw(st.sampled_from([None, "gone", *names]))
    want = data.draw(st.sampled_from(names))
    hops = route(existing, have, want)
    best = cheapest(existing, have, want)
    assert (hops is None) == (best is None)
    if hops is not None:
        assert connected(existing, hops, have, want)
        assert cost(existing, hops) == best


@settings(max_examples=500)
@given(histories(), st.integers(1, 5), st.data())
def test_what_is_kept_reaches_what_it_must(existing: list[VersionSizes], keep: int, data: st.DataObject) -> None:
    names = [item.digest for item in existing]
    leased = data.draw(st.sets(st.sampled_from(names)))
    stored = retained(existing, keep=keep, leased=leased)
    left = [
        VersionSizes(
            item.version,
            item.digest,
            item.base,
            item.step_bytes if Hop(item.digest, "step") in stored else None,
            item.total_bytes if Hop(item.digest, "complete") in stored else None,
        )
        for item in existing
    ]
    for want in {*names[-keep:], *leased}:
        if cheapest(existing, None, want) is not None:
            assert route(left, None, want) is not None, f"{want} cannot be reached from nothing"
    for have in leased:  # readers go on to the newest by changes, as long as there are any
        steps = cost_of_steps(existing, have)
        if steps is not None and steps == cheapest(existing, have, names[-1]):
            assert route(left, have, names[-1]) is not None


def cost_of_steps(existing: list[VersionSizes], have: str) -> int | None:
    by_digest = {item.digest: item for item in existing}
    spent, at = 0, existing[-1].digest
    while at != have:
        here = by_digest[at]
        if here.step_bytes is None or here.base is None:
            return None
        spent, at = spent + here.step_bytes, here.base
    return spent


def test_old_versions_go() -> None:
    existing = [VersionSizes(0, "d0", None, None, 100)]
    existing += [VersionSizes(n, f"d{n}", f"d{n - 1}", 1, 100 if n % 5 == 0 else None) for n in range(1, 23)]
    assert retained(existing, keep=2) == {
        Hop("d20", "complete"),
        *(Hop(f"d{n}", "step") for n in (21, 22)),
    }
    assert Hop("d20", "step") in retained(existing, keep=2, leased={"d19"})  # so that it may go on by steps
    assert retained(existing, keep=1, leased={"d3"}) >= {Hop("d0", "complete"), Hop("d1", "step"), Hop("d22", "step")}
