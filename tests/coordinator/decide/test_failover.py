"""Where the sandboxes of a lost host go on, and from which state."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.decide.failover import CheckpointCopy, LostSandbox, Revive, decide
from coordinator.decide.place import HostView
from coordinator.decide.replicate import STORE, ReplicaCopy, Subject
from coordinator.decide.replicate import decide as copied

NEW, OLD = CheckpointCopy("c-2", "two", 2), CheckpointCopy("c-1", "three", 1)
STORED, STORED_OLD = CheckpointCopy("c-2", STORE, 3), CheckpointCopy("c-1", STORE, 1)


def host(name: str, *, alive: bool = True, sandboxes: int = 0) -> HostView:
    return HostView(name, 2, 100, 100, sandboxes=sandboxes, images=frozenset({"i"}), alive=alive)


@pytest.mark.parametrize(
    ("copies", "home", "alive", "expected"),
    [
        ([NEW], "", {"two", "three"}, ("c-2", "two", False)),
        ([NEW, CheckpointCopy("c-2", "three", 1)], "", {"two", "three"}, ("c-2", "three", False)),  # the emptier one
        ([OLD, NEW], "", {"three"}, None),  # a newer one is on a host that may come back
        ([NEW, STORED_OLD], "", {"three"}, None),
        ([NEW, STORED], "", {"two", "three"}, ("c-2", "two", False)),
        ([NEW, STORED], "", {"three"}, ("c-2", "three", True)),
        ([STORED], "", {"two", "three"}, ("c-2", "three", True)),  # the emptier one
        ([STORED], "", set(), None),
        ([NEW, STORED], "three", {"two", "three"}, ("c-2", "three", True)),  # it may run there already
        ([NEW, STORED], "three", {"two"}, None),
        ([NEW, STORED], "one", {"two"}, ("c-2", "two", False)),
    ],
)
def test_a_sandbox_goes_on_from_the_newest_state(
    copies: Sequence[CheckpointCopy], home: str, alive: set[str], expected: tuple[str, str, bool] | None
) -> None:
    hosts = [host("one", alive=False), *(host(n, alive=n in alive, sandboxes=n == "two") for n in ("two", "three"))]
    lost = LostSandbox("s-1", "one", copies, home, frozenset({"i"}))
    result = decide([lost], hosts, {"one"})
    target = [] if expected is None else [Revive("s-1", expected[0], "one", expected[1], stored=expected[2])]
    assert result == target
    assert decide([lost], hosts, set()) == []


@pytest.mark.parametrize(
    ("prepared", "home", "copies", "target"),
    [
        ("two", "", [NEW, CheckpointCopy("c-2", "three", 1)], "two"),  # though the other one is emptier
        ("three", "", [NEW], "two"),  # it has no copy of the newest state
        ("two", "three", [NEW, CheckpointCopy("c-2", "three", 1)], "three"),  # it may run there already
    ],
)
def test_a_sandbox_goes_on_where_that_was_prepared(
    prepared: str, home: str, copies: Sequence[CheckpointCopy], target: str
) -> None:
    hosts = [host("one", alive=False), host("two", sandboxes=1), host("three")]
    (result,) = decide([LostSandbox("s-1", "one", copies, home, prepared=prepared)], hosts, {"one"})
    assert result.target == target


names = st.sampled_from(["one", "two", "three"])
copies = st.builds(
    CheckpointCopy, st.sampled_from(["c-1", "c-2"]), st.sampled_from(["one", "two", "three", STORE]), st.integers(1, 3)
)
some = st.lists(copies, min_size=1, max_size=4)


@given(
    st.lists(
        st.builds(
            LostSandbox,
            st.text("st", min_size=1),
            names,
            st.lists(copies, min_size=1, max_size=4),
            st.just("") | names,
            prepared=st.just("") | names,
        ),
        max_size=9,
    ),
    st.frozensets(names),
    st.frozensets(names),
)
def test_a_sandbox_goes_on_only_where_its_newest_state_is_and_its_own_host_acts_no_more(
    lost: list[LostSandbox], alive: frozenset[str], over: frozenset[str]
) -> None:
    hosts = [host(name, alive=name in alive) for name in ("one", "two", "three")]
    result = decide(lost, hosts, over)
    assert len(result) <= len(lost)
    for revive in result:
        assert revive.target in alive and revive.source in over - alive and revive.target != revive.source
        able = [item for item in lost if (item.sandbox, item.host) == (revive.sandbox, revive.source)]
        assert any(_holds(item, revive) for item in able)


def _holds(lost: LostSandbox, revive: Revive) -> bool:
    newest = max(lost.copies, key=lambda copy: copy.number).checkpoint
    holder = STORE if revive.stored else revive.target
    return revive.checkpoint == newest and any((c.checkpoint, c.holder) == (newest, holder) for c in lost.copies)


def test_those_of_the_store_are_spread() -> None:
    hosts = [host("one", alive=False), host("two"), host("three")]
    lost = [LostSandbox(f"s-{n}", "one", [STORED], images=frozenset({"i"})) for n in range(6)]
    targets = [item.target for item in decide(lost, hosts, {"one"})]
    assert sorted(targets) == ["three"] * 3 + ["two"] * 3


def test_those_that_somebody_waits_for_come_first() -> None:
    lost = [LostSandbox(f"s-{n}", "one", [NEW], images=frozenset({"i"}), waited=n == 3) for n in range(5)]
    result = decide(lost, [host("one", alive=False), host("two")], {"one"})
    assert [item.sandbox for item in result] == ["s-3", "s-0", "s-1", "s-2", "s-4"]


def test_a_state_goes_to_the_store_where_no_host_can_take_it() -> None:
    subjects = [Subject("s-1", "one", "c-2", frozenset({"i"}), (ReplicaCopy("c-1", STORE),), store=True)]
    subjects.append(Subject("s-1", "one", "c-2", frozenset({"i"})))
    (only,) = copied([host("one")], subjects, {}, 2)
    assert (only.target, only.base) == (STORE, "c-1")
    assert {copy.target for copy in copied([host("one"), host("two")], subjects, {}, 2)} == {"two", STORE}
