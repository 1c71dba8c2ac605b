"""Where sandboxes go, and when a host's lease is over: decisions, held by properties."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.decide import lease, place, replicate
from coordinator.decide.lease import HostLease
from coordinator.decide.place import HostView, PlacementRequest
from coordinator.decide.replicate import ReplicaCopy, Subject

names = st.text("abcdef", min_size=1, max_size=1)
hosts = st.lists(
    st.builds(
        HostView,
        name=st.text("abcdef", min_size=1, max_size=4),
        cpus=st.integers(1, 64).map(float),
        memory_bytes=st.just(64.0),
        memory_free=st.floats(0, 64),
        disk_free=st.floats(0, 1),
        load=st.floats(0, 100),
        sandboxes=st.integers(0, 1000),
        coming=st.integers(0, 50),
        labels=st.dictionaries(st.sampled_from(["zone", "class"]), st.sampled_from("ab")),
        images=st.frozensets(st.sampled_from(["debian", "python"])),
        alive=st.booleans(),
        draining=st.booleans(),
    ),
    max_size=8,
    unique_by=lambda host: host.name,
)
wishes = st.builds(
    PlacementRequest,
    images=st.frozensets(st.sampled_from(["debian", "python"]), max_size=1),
    labels=st.dictionaries(st.sampled_from(["on.zone", "on.class", "task"]), st.sampled_from("ab")),
    holders=st.frozensets(st.text("abcdef", min_size=1, max_size=4), max_size=3),
    movable=st.booleans(),
)


@given(hosts, wishes)
def test_only_hosts_that_can_take_it_are_named_and_each_of_them_once(
    result: list[HostView], target: PlacementRequest
) -> None:
    order = place.ranked(result, target)
    assert set(order) == {host.name for host in result if not place.refusal(host, target)} and len(order) == len(
        set(order)
    )
    for host in result:
        if host.name in order:
            assert host.alive and not host.draining
            assert all(host.labels.get(name) == value for name, value in place.required(target.labels).items())
            assert not target.images or target.images & set(host.images)
            assert target.movable or not target.holders or host.name in target.holders
    reported = place.refusals(result, target)
    assert order or reported


@given(hosts, wishes, st.randoms(use_true_random=False))
def test_the_order_of_the_view_changes_nothing(result: list[HostView], target: PlacementRequest, chance) -> None:
    shuffled = list(result)
    chance.shuffle(shuffled)
    assert place.ranked(shuffled, target) == place.ranked(result, target)


@given(hosts, wishes, st.integers(1, 40))
def test_a_spread_gives_each_child_a_host_that_can_take_it(
    result: list[HostView], target: PlacementRequest, count: int
) -> None:
    shares = place.spread(result, target, count)
    able = place.ranked(result, target)
    assert set(shares) <= set(able)
    assert sum(shares.values()) == (count if able else 0)


def _host(name: str, **fields: object) -> HostView:
    existing: dict = {"cpus": 2.0, "memory_bytes": 100.0, "memory_free": 90.0}
    return HostView(name, **{**existing, **fields})


def test_equal_hosts_get_equal_shares() -> None:
    assert place.spread([_host(name) for name in "abcd"], PlacementRequest(), 32) == dict.fromkeys("abcd", 8)


def test_a_host_with_the_content_is_left_only_when_it_is_much_busier() -> None:
    target = PlacementRequest(holders=frozenset({"a"}), movable=True)
    assert place.ranked([_host("a", load=0.5), _host("b")], target) == ["a", "b"]
    assert place.ranked([_host("a", load=1.9), _host("b")], target) == ["b", "a"]
    assert place.ranked([_host("a", load=1.9), _host("b")], replace(target, movable=False)) == ["a"]


def test_why_no_host_can_is_said_for_each() -> None:
    reported = place.refusals([_host("a", alive=False), _host("b", draining=True)], PlacementRequest())
    assert reported == "a does not answer; b is being drained"


@given(
    st.lists(st.tuples(st.floats(0.1, 3), st.floats(0, 20), st.floats(0, 20), st.booleans()), min_size=1, max_size=20),
    st.floats(-1e6, 1e6),
    st.floats(-lease.DRIFT, lease.DRIFT),
)
def test_a_host_is_over_with_its_lease_before_the_coordinator_takes_over(
    rounds: list[tuple[float, float, float, bool]], offset: float, drift: float
) -> None:
    """However long requests and answers travel, and whether answers come at all, with clocks that differ."""
    ttl, now = 5.0, 0.0
    existing, clock, until = HostLease(ttl), None, None

    def hosts_clock(moment: float) -> float:
        return offset + moment * (1 + drift)

    for pause, there, back, answered in rounds:
        now += pause
        grant = None
        if clock is not None:
            existing, grant = lease.requested(existing, clock=clock)
        requested_at, now = now, now + there
        read = hosts_clock(now)
        if grant is not None:
            until = max(until or grant, grant)  # it never takes a grant back
        now += back
        if answered:
            existing, clock = lease.last_seen(existing, now, requested_at=requested_at, clock=read), read
        if until is not None and lease.over(existing, now):
            assert hosts_clock(now) >= until - 1e-6
    end = max(existing.ends_at or 0, (existing.last_seen_at or 0) + ttl)
    if until is not None and lease.over(existing, end):
        assert hosts_clock(end) >= until - 1e-3


def test_sandboxes_over_a_hundred_equal_hosts_are_spread_evenly() -> None:
    result = {f"h{number:03}": _host(f"h{number:03}", cpus=16.0) for number in range(100)}
    for _ in range(2_000):
        (name, *_) = place.ranked(result.values(), PlacementRequest())
        result[name] = replace(result[name], sandboxes=result[name].sandboxes + 1)
    assert {host.sandboxes for host in result.values()} == {20}


subjects = st.lists(
    st.builds(
        Subject,
        sandbox=st.text("st", min_size=1, max_size=4),
        host=st.text("abcdef", min_size=1, max_size=1),
        durable=st.sampled_from(["", "c-1", "c-2"]),
        images=st.frozensets(st.sampled_from(["debian", "python"]), min_size=1, max_size=1),
        retained=st.lists(
            st.builds(
                ReplicaCopy, st.sampled_from(["c-1", "c-2"]), st.text("abcdef", min_size=1, max_size=1), st.booleans()
            ),
            max_size=2,
            unique_by=lambda retained: retained.holder,
        ).map(tuple),
        waited=st.booleans(),
        since=st.floats(0, 100),
    ),
    max_size=12,
    unique_by=lambda subject: subject.sandbox,
)


@given(
    hosts, subjects, st.dictionaries(st.text("abcdef", min_size=1, max_size=4), st.integers(0, 3)), st.integers(1, 3)
)
def test_copies_go_to_other_hosts_within_bounds_and_those_first_that_are_waited_for(
    result: list[HostView], target: list[Subject], busy: dict[str, int], limit: int
) -> None:
    begun = replicate.decide(result, target, busy, limit)
    named = {subject.sandbox: subject for subject in target}
    views = {host.name: host for host in result}
    for host in views:
        under_way = sum(host in (copy.source, copy.target) for copy in begun)
        assert under_way == 0 or under_way + busy.get(host, 0) <= limit
    for copy in begun:
        subject = named[copy.sandbox]
        assert copy.source == subject.host != copy.target
        assert copy.checkpoint == subject.durable
        holders = [item.holder for item in subject.retained if _able(views, item.holder, subject)]
        if subject.copied:  # one more host
            assert copy.target not in holders and len(holders) < 2 and not copy.base
        assert copy.target in holders or subject.copied or not holders
        assert views[copy.source].alive and not place.refusal(
            views[copy.target], PlacementRequest(images=subject.images)
        )
        assert copy.base == "" or ReplicaCopy(copy.base, copy.target) in subject.retained
    order = [(named[copy.sandbox].copied, not named[copy.sandbox].waited) for copy in begun]
    assert order == sorted(order)


def _able(views: dict[str, HostView], name: str, subject: Subject) -> bool:
    return (
        name in views
        and name != subject.host
        and not place.refusal(views[name], PlacementRequest(images=subject.images))
    )


def test_a_grant_that_nobody_listened_for_does_not_prolong_a_lease() -> None:
    existing, _ = lease.requested(lease.last_seen(HostLease(5.0), 10.0, requested_at=10.0, clock=110.0), clock=110.0)
    existing = lease.last_seen(existing, 11.0, requested_at=11.0, clock=111.0)
    before = existing
    existing, until = lease.requested(existing, clock=111.0)
    assert until == 116.0 and existing.ends_at == pytest.approx(16.025)
    result = lease.refused(existing, before)
    assert result.ends_at == pytest.approx(15.025)
    assert not lease.over(result, 15.0) and lease.over(result, 15.2)
    again, _ = lease.requested(result, clock=111.0)  # this one may arrive
    assert not lease.over(again, 15.2) and lease.over(again, 16.2)
    assert not lease.over(lease.last_seen(again, 15.2, requested_at=15.1, clock=115.1), 16.01)


def test_an_answer_that_travels_slowly_does_not_prolong_a_lease() -> None:
    fast = lease.last_seen(HostLease(5.0), 10.0, requested_at=9.99, clock=110.0)
    slow = lease.last_seen(fast, 12.0, requested_at=11.0, clock=111.0)  # read at 11, came at 12
    assert lease.requested(slow, clock=111.0)[0].ends_at == pytest.approx(16.0, abs=0.05)
    alone = lease.last_seen(HostLease(5.0), 12.0, requested_at=11.0, clock=111.0)
    assert lease.requested(alone, clock=111.0)[0].ends_at == pytest.approx(17.0, abs=0.05)


def test_a_host_that_stood_still_or_was_started_anew_is_counted_from_its_next_report() -> None:
    before = lease.last_seen(HostLease(5.0), 10.0, requested_at=9.99, clock=110.0)
    for clock in (113.0, 0.5):  # it slept for 17 seconds that its clock does not count; it has another clock
        after = lease.last_seen(before, 30.2, requested_at=30.0, clock=clock)
        assert lease.requested(after, clock=clock)[0].ends_at == pytest.approx(35.2, abs=0.05)


@pytest.mark.parametrize(
    ("took", "more"),
    [([], True), ([0.8], True), ([0.8, 0.3], True), ([0.8, 0.7], False), ([0.05], False), ([9, 5, 3, 2, 1], False)],
)
def test_what_is_about_to_move_is_copied_while_that_makes_the_rest_smaller(took: list[float], more: bool) -> None:
    assert replicate.again(took) is more


def test_a_host_is_doubted_before_its_lease_is_over_and_until_it_is_heard_again() -> None:
    existing, _ = lease.requested(lease.last_seen(HostLease(5.0), 10.0, requested_at=10.0, clock=110.0), clock=110.0)
    assert not lease.doubted(existing, 12.4) and lease.doubted(existing, 12.6) and not lease.over(existing, 12.6)
    refused = lease.refused(existing, existing)
    assert lease.doubted(refused, 10.1) and lease.alive(refused, 10.1)
    assert not lease.doubted(lease.last_seen(refused, 11.0, requested_at=11.0, clock=111.0), 11.1)
    assert not lease.doubted(HostLease(5.0, last_seen_at=10.0), 20.0)  # it never had a lease: nobody acts for it


def test_a_host_that_died_is_given_no_work_once_its_lease_is_over() -> None:
    granted, _ = lease.requested(lease.last_seen(HostLease(5.0), 10.0, requested_at=10.0, clock=110.0), clock=110.0)
    dead = lease.refused(lease.last_seen(granted, 11.0, requested_at=11.0, clock=111.0), granted)
    assert lease.alive(dead, 15.0) and not lease.over(dead, 15.0)
    assert not lease.alive(dead, 15.2) and lease.over(dead, 15.2)  # though it was heard less than 5 s ago
