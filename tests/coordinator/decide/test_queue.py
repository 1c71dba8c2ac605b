"""Which job begins next: priorities, quotas, no overtaking, nothing handed out twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.decide.queue import QueuedJob, QueueView, StartJob, WaitJob, decide, total

MACHINES = [{"CPU": 4.0, "GPU": 2.0}, {"CPU": 8.0}]


def started(view: QueueView) -> list[str]:
    return [item.job for item in decide(view) if isinstance(item, StartJob)]


def reasons(view: QueueView) -> dict[str, str]:
    return {item.job: item.reason for item in decide(view) if isinstance(item, WaitJob)}


def test_the_higher_priority_comes_first_then_the_older() -> None:
    waiting = [
        QueuedJob("new", [{"GPU": 1}], number=3),
        QueuedJob("old", [{"GPU": 1}], number=1),
        QueuedJob("low", [{"GPU": 1}], "", -1),
    ]
    assert started(QueueView(waiting, machines=MACHINES)) == ["old", "new"]
    assert reasons(QueueView(waiting, machines=MACHINES)) == {"low": "GPU=1 are in use"}


def test_a_large_job_is_not_overtaken_by_small_ones() -> None:
    view = QueueView(
        waiting=[QueuedJob("large", [{"GPU": 2}], number=2), QueuedJob("small", [{"CPU": 1}], number=3)],
        begun=[QueuedJob("first", [{"GPU": 1}], number=1)],
        machines=MACHINES,
    )
    assert reasons(view) == {"large": "GPU=2 are in use", "small": "large comes first"}


def test_who_can_never_run_or_has_used_his_quota_holds_back_nobody() -> None:
    view = QueueView(
        waiting=[
            QueuedJob("huge", [{"CPU": 12}], number=1),  # as much as all machines have, but no single one
            QueuedJob("odd", [{"tpu": 1}], number=2),
            QueuedJob("wide", [{"CPU": 8}, {"CPU": 4}, {"CPU": 4}], number=2),  # each part alone finds a machine
            QueuedJob("second", [{"GPU": 1}], "alice", number=3),
            QueuedJob("other", [{"GPU": 1}], "bob", number=4),
        ],
        begun=[QueuedJob("hers", [{"GPU": 1}], "alice")],
        machines=MACHINES,
        quotas={"alice": {"GPU": 1}, "": {"GPU": 8}},
    )
    assert started(view) == ["other"]
    assert reasons(view) == {
        "huge": "no machine has what it needs: CPU=12",
        "odd": "no machine has what it needs: tpu=1",
        "wide": "all machines together lack what it needs: CPU=16",
        "second": "its owner may use GPU=1 at once",
    }


def test_of_jobs_of_several_parts_one_at_a_time_looks_for_room() -> None:
    large, other, small = (
        QueuedJob(name, [{"CPU": 1}] * parts, number=parts) for name, parts in (("l", 2), ("o", 3), ("s", 1))
    )
    assert started(QueueView([large, other, small], machines=MACHINES)) == ["s", "l"]
    assert reasons(QueueView([large, other, small], machines=MACHINES)) == {"o": "l comes first"}
    looking = QueuedJob("looking", [{"CPU": 1}, {"GPU": 1}], placed=False)
    assert started(QueueView([small], [looking], MACHINES)) == []
    assert started(QueueView([small], [QueuedJob("looking", [{"CPU": 1}], placed=False)], MACHINES)) == ["s"]


needs = st.dictionaries(st.sampled_from(["CPU", "GPU", "slot"]), st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=1)
jobs = st.lists(
    st.builds(
        QueuedJob,
        job=st.uuids().map(str),
        parts=st.lists(needs, min_size=1, max_size=3),
        owner=st.sampled_from(["a", "b"]),
        priority=st.integers(-1, 1),
        number=st.integers(),
    ),
    max_size=8,
    unique_by=lambda item: item.job,
)


@given(jobs, jobs, st.lists(needs, max_size=3), st.dictionaries(st.sampled_from(["a", ""]), needs))
def test_never_more_is_given_than_there_is_and_every_job_is_told_something(
    waiting: list[QueuedJob],
    begun: list[QueuedJob],
    machines: list[dict[str, float]],
    quotas: dict[str, dict[str, float]],
) -> None:
    view = QueueView(waiting, begun, machines, quotas)
    actions = decide(view)
    assert sorted(item.job for item in actions) == sorted(item.job for item in waiting)
    named = {item.job: item for item in waiting}
    for owner in ("a", "b"):
        given_out = total(named[job].needs for job in started(view) if named[job].owner == owner)
        before = total(item.needs for item in begun if item.owner == owner)
        for name, limit in quotas.get(owner, quotas.get("", {})).items():
            assert not given_out.get(name) or given_out[name] + before.get(name, 0.0) <= limit
    given_out, before, all_of = (
        total(named[job].needs for job in started(view)),
        total(e.needs for e in begun),
        total(machines),
    )
    for name, amount in given_out.items():
        assert amount + before.get(name, 0.0) <= all_of[name]
