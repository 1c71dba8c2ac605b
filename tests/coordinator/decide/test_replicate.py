"""What is copied where: two hosts in turn, and what the next copy builds upon."""

from __future__ import annotations

from dataclasses import replace

from coordinator.decide import replicate
from coordinator.decide.place import HostView
from coordinator.decide.replicate import ReplicaCopy, Subject


def _host(name: str) -> HostView:
    return HostView(name, 2, 100, 100, images=frozenset({"i"}))


def _copied(
    durable: str, *retained: ReplicaCopy, hosts: str = "abc", busy: dict[str, int] | None = None, new: bool = False
) -> list[tuple[str, str]]:
    subject = Subject("s-1", "a", durable, frozenset({"i"}), retained, new=new)
    result = replicate.decide([_host(name) for name in hosts], [subject], busy or {}, 2)
    return [(copy.target, copy.base) for copy in result]


def test_two_hosts_have_copies_and_take_the_newest_in_turn() -> None:
    assert _copied("c-1") == [("b", "")]
    assert _copied("c-1", ReplicaCopy("c-1", "b")) == [("c", "")]  # a second one
    assert _copied("c-1", ReplicaCopy("c-1", "b"), new=True) == []
    assert _copied("c-1", ReplicaCopy("c-1", "b"), busy={"a": 1}) == []  # when there is nothing else to copy
    assert _copied("c-2", ReplicaCopy("c-1", "b"), busy={"a": 1}) == [("b", "c-1")]
    assert _copied("c-3", ReplicaCopy("c-2", "c"), ReplicaCopy("c-1", "b")) == [("b", "c-1")]
    assert _copied("c-3", ReplicaCopy("c-2", "c"), ReplicaCopy("c-1", "b"), busy={"b": 2}) == [("c", "c-2")]
    assert _copied("c-3", ReplicaCopy("c-2", "c"), ReplicaCopy("c-1", "b"), hosts="abcd") == [("b", "c-1")]
    assert _copied("c-3", ReplicaCopy("c-2", "c"), ReplicaCopy("c-1", "b"), hosts="acd") == [("c", "c-2")]
    assert _copied("c-3", ReplicaCopy("c-3", "c"), ReplicaCopy("c-1", "b"), hosts="abc") == []


def test_the_copy_of_a_host_that_is_away_is_waited_for_a_while() -> None:
    subject = Subject("s-1", "a", "c-1", frozenset({"i"}), (ReplicaCopy("c-1", "b"), ReplicaCopy("c-0", "c")))
    for silent, copies in ((1.0, 0), (replicate.AWAY, 1)):
        hosts = [_host("a"), _host("b"), replace(_host("c"), alive=False, silent=silent), _host("d")]
        assert len(replicate.decide(hosts, [subject], {}, 2)) == copies
        newer = replace(subject, durable="c-2")  # the newest goes where somebody answers
        assert [copy.target for copy in replicate.decide(hosts, [newer], {}, 2)] == ["b"]


def test_a_host_that_may_be_lost_gets_no_copy_until_that_is_known() -> None:
    hosts = [_host("a"), _host("b"), replace(_host("c"), doubted=True), _host("d")]
    for retained, target in (
        ((ReplicaCopy("c-1", "b"), ReplicaCopy("c-0", "c")), ["b"]),  # the other one has the older copy
        ((ReplicaCopy("c-1", "c"),), []),  # another one would need all of it
        ((), ["b"]),
    ):
        subject = Subject("s-1", "a", "c-2", frozenset({"i"}), retained, waited=True)
        assert [copy.target for copy in replicate.decide(hosts, [subject], {}, 2)] == target
    second = Subject("s-1", "a", "c-2", frozenset({"i"}), (ReplicaCopy("c-2", "b"),))
    assert [copy.target for copy in replicate.decide(hosts, [second], {}, 2)] == ["d"]


def test_the_state_that_a_sandbox_came_with_is_copied_a_little_later() -> None:
    came = Subject("s-1", "a", "c-1", frozenset({"i"}), (ReplicaCopy("c-0", "b", old=True),), fresh=True)
    hosts = [_host(name) for name in "ab"]
    assert replicate.decide(hosts, [came], {}, 2) == []
    for due in (replace(came, waited=True), replace(came, fresh=False)):
        assert [copy.target for copy in replicate.decide(hosts, [due], {}, 2)] == ["b"]
    silent = [replace(_host("a"), doubted=True), _host("b")]
    assert replicate.decide(silent, [replace(came, fresh=False)], {}, 2) == []  # it may be dead


def test_where_it_went_on_the_next_copy_builds_upon_an_older_one_of_another_host() -> None:
    assert _copied("c-3", ReplicaCopy("c-1", "b", old=True), hosts="abcd") == [("b", "")]
    assert _copied("c-1", ReplicaCopy("c-1", "b", old=True)) == [("b", "")]


def test_copies_are_spread_as_the_sandboxes_that_they_may_become() -> None:
    subjects = [Subject(f"s-{number}", "a", "c-1", frozenset({"i"})) for number in range(6)]
    result = replicate.decide([_host(name) for name in "abcd"], subjects, {}, 9)
    assert sorted(copy.target for copy in result) == ["b", "b", "c", "c", "d", "d"]
