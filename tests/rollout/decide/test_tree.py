"""Trees of trajectories: values, segments, where branches begin, which states stay."""

from __future__ import annotations

import random

import pytest

from rollout.decide import branching, keeping
from rollout.decide.keeping import KeepPlan, RetainedRow
from rollout.decide.tree import Forest, Leaf, counted
from rollout.decide.view import (
    At,
    Branching,
    EndedTrajectory,
    ForkableState,
    GroupView,
    SchedulingRules,
    StartTrajectory,
    TrajectoryView,
)

# Member 0 has 6 turns; 1 leaves it at turn 4, 2 at turn 2, 3 leaves 2 at turn 3; 4 is alone.
GROUP = [
    Leaf((0, 0), 6, 1.0),
    Leaf((1, 0), 5, 0.0, [At(0, 0, 4)]),
    Leaf((2, 0), 5, 0.0, [At(0, 0, 2)]),
    Leaf((3, 0), 4, 1.0, [At(0, 0, 2), At(2, 0, 3)]),
    Leaf((4, 0), 3, 0.0),
]


def test_a_state_is_worth_the_mean_of_its_continuations_however_many_leaves_they_have() -> None:
    forest = Forest(GROUP)
    assert forest.value((0, 0), 4) == 0.5
    assert forest.value((2, 0), 3) == 0.5
    assert forest.continuations((0, 0), 2) == [0.5, 0.5]
    assert forest.continuations((0, 0), 0) == [0.5, 0.0]


def test_segments_earn_what_they_changed_over_what_others_say_of_their_beginning() -> None:
    forest = Forest(GROUP)
    result = {name: [(s.first, s.last, s.before, s.after) for s in forest.segments(name)] for name in forest.leaves}
    shared = [(0, 2, 0.0, 0.5), (2, 4, 0.25, 0.5)]  # of others: member 4; then member 2's, and that
    assert result[0, 0] == [*shared, (4, 6, 0.125, 1.0)]
    assert result[1, 0] == [*shared, (4, 5, 0.625, 0.0)]
    assert result[3, 0] == [(0, 2, 0.0, 0.5), (2, 3, 0.25, 0.5), (3, 4, 0.125, 1.0)]
    assert result[4, 0] == [(0, 3, 0.5, 0.0)]


def test_without_branches_it_is_the_reward_less_the_mean_of_the_others() -> None:
    group = [Leaf((n, 0), 3, float(n)) for n in range(4)]
    assert [Forest(group).segments((n, 0))[0].advantage for n in range(4)] == pytest.approx([-2, -2 / 3, 2 / 3, 2])
    assert Forest(group[3:]).segments((3, 0))[0].advantage == 0.0  # nothing to compare it with


def test_a_turn_counts_for_each_trajectory_that_has_it() -> None:
    forest = Forest(GROUP)
    assert [forest.sharing(GROUP[3], turn) for turn in range(4)] == [4, 4, 2, 1]
    assert [forest.sharing(GROUP[0], turn) for turn in range(6)] == [4, 4, 2, 2, 1, 1]


def test_trees_have_the_direction_of_the_policy_gradient() -> None:
    """Four coins, each with a weight of its own, and a reward for all four heads: all weights count alike."""
    dice, turns, heads = random.Random(5), 4, 0.6
    result = [0.0] * turns

    def rest(taken: list[bool]) -> list[bool]:
        return taken + [dice.random() < heads for _ in range(turns - len(taken))]

    for _ in range(8000):
        coins = {(n, 0): rest([]) for n in range(2)}
        lineage = {name: [] for name in coins}
        for n, at in ((2, 1), (3, 2), (4, 3)):
            coins[n, 0], lineage[n, 0] = rest(coins[0, 0][:at]), [At(0, 0, at)]
        group = [Leaf(name, turns, float(all(coins[name])), lineage[name]) for name in coins]
        forest, own = Forest(group), counted(group)
        for leaf in group:
            for segment in forest.segments(leaf.name):
                for turn in range(max(segment.first, own[leaf.name]), segment.last):
                    score = coins[leaf.name][turn] - heads
                    result[turn] += score * segment.advantage * forest.sharing(leaf, turn) / 8000
    exact = len(group) * heads**turns * (1 - heads)
    assert result == pytest.approx([exact] * turns, rel=0.15)


def test_shared_turns_are_counted_once_also_when_their_own_trajectory_is_not_there() -> None:
    assert counted(GROUP) == {(0, 0): 0, (1, 0): 4, (2, 0): 2, (3, 0): 3, (4, 0): 0}
    orphans = GROUP[1:]
    first = counted(orphans)
    assert first == {(1, 0): 0, (2, 0): 2, (3, 0): 3, (4, 0): 0}
    turns = [(leaf.owner(turn), turn) for leaf in orphans for turn in range(first[leaf.name], leaf.turns)]
    assert len(turns) == len(set(turns)) == len({(leaf.owner(t), t) for leaf in orphans for t in range(leaf.turns)})
    forest = Forest(orphans)
    assert forest.value((0, 0), 4) == 0.0  # of the one continuation that is there


def test_what_is_known_of_the_beginning_is_unbiased_though_trees_grow_where_rewards_are_high() -> None:
    """A walk of fair coins; the better first half is branched from more often. A mean over leaves would be too high."""
    dice = random.Random(7)
    values, means = [], []
    for _ in range(4000):
        group = []
        for member in range(2):
            good = dice.random() < 0.5
            group.append(Leaf((member, 0), 2, float(good and dice.random() < 0.5)))
            for n in range(3 if good else 0):
                group.append(Leaf((10 * member + n + 2, 0), 2, float(dice.random() < 0.5), [At(member, 0, 1)]))
        values.append(Forest(group).segments((0, 0))[0].before)
        means.append(sum(leaf.reward for leaf in group) / len(group))
    assert abs(sum(values) / len(values) - 0.25) < 0.03
    assert sum(means) / len(means) > 0.32


def member(
    index: int, *, turns: int = 8, reward: float = 0.0, surprise: dict[int, float] | None = None
) -> TrajectoryView:
    states = [ForkableState(turn, (surprise or {}).get(turn, 0.5)) for turn in range(turns)]
    return TrajectoryView(index, "ended", 0, 0, None, None, EndedTrajectory(0, turns, reward, [], states))


def waiting(*indices: int) -> list[TrajectoryView]:
    return [TrajectoryView(index, "waiting") for index in indices]


def starts(members: list[TrajectoryView], **plan: object) -> list[At | None]:
    rules = SchedulingRules(size=len(members), branching=Branching(**plan))  # type: ignore[arg-type]
    return [start.at for start in branching.starts(GroupView("p", 0, members), rules)]


def test_branches_wait_for_the_first_trajectory_of_their_tree() -> None:
    assert starts([member(0), TrajectoryView(1, "running"), *waiting(2, 3)], roots=2) == [At(0, 0, 4)]
    plain = branching.starts(GroupView("p", 0, waiting(0, 1)), SchedulingRules(size=2))
    assert plain == [StartTrajectory("p", 0), StartTrajectory("p", 1)]


def test_branches_lie_evenly_over_turns_or_where_the_policy_was_least_sure() -> None:
    assert starts([member(0), *waiting(1, 2, 3)], roots=1, every=2) == [At(0, 0, 2), At(0, 0, 4), At(0, 0, 6)]
    unsure = member(0, surprise={3: 2.0, 5: 3.0, 0: 9.0})
    assert starts([unsure, *waiting(1, 2, 3)], roots=1, by="entropy") == [At(0, 0, 5), At(0, 0, 3), At(0, 0, 1)]


def test_a_member_without_a_state_or_that_was_lost_begins_at_the_beginning() -> None:
    assert starts([member(0, turns=1), *waiting(1)], roots=1) == [None]
    again = TrajectoryView(1, "waiting", None, 1)
    assert starts([member(0), again], roots=1) == [None]
    assert starts([TrajectoryView(0, "running"), again], roots=1) == [None]


def test_spread_asks_where_one_more_continuation_tells_most_and_one_at_a_time() -> None:
    assert starts([member(0), *waiting(1, 2)], roots=1, by="spread") == [At(0, 0, 4)]
    branch = TrajectoryView(
        1,
        "ended",
        0,
        0,
        None,
        At(0, 0, 4),
        EndedTrajectory(0, 8, 1.0, [At(0, 0, 4)], [ForkableState(n, 0.5) for n in (5, 6)]),
    )
    (at,) = starts([member(0), branch, *waiting(2, 3)], roots=1, by="spread")
    assert at is not None and at.turn not in (4,) and (at.member, at.turn) == (0, 2)
    running = TrajectoryView(1, "running", 0, 0, None, At(0, 0, 4))
    assert starts([member(0), running, *waiting(2)], roots=1, by="spread") == []


def test_the_newest_states_stay_within_number_and_disk_and_what_a_group_needs() -> None:
    rows = [RetainedRow(f"p{n}", 0, 0, f"s-{n}", float(n), 400_000) for n in range(6)]
    gone = keeping.surplus(rows, KeepPlan(trajectories=2), needed=())
    assert {row.prompt for row in gone} == {"p0", "p1", "p2", "p3"}
    gone = keeping.surplus(rows, KeepPlan(trajectories=9, disk_mb=1), needed=("p0",))
    assert {row.prompt for row in gone} == {"p1", "p2", "p3"}
    assert keeping.surplus(rows, KeepPlan(), needed=()) == sorted(rows, key=lambda row: -row.at)
