"""The judgement of a turn: a table of what is seen, and properties over all effects."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.verdict.judge import Options, judge
from sandbox.messages import Effects, Verdict

NONE, FILES, PROCESSES, BOTH = Verdict.NONE, Verdict.FILES, Verdict.PROCESSES, Verdict.BOTH

TABLE = [
    ("nothing", Effects(), NONE),
    ("cat and ls in a shell", Effects(forks=3, execs=4, exits=3), NONE),
    ("a temporary file that is gone", Effects(temporary=2, forks=1, exits=1), NONE),
    ("a survivor that did not run", Effects(survivors=3), NONE),
    ("a listener that is gone again", Effects(listens=1), NONE),
    ("a socket, but nobody older to talk to", Effects(channels=2), NONE),
    ("a socket, and only new ones to talk to", Effects(channels=1, survivors=1, survivors_new=1), PROCESSES),
    ("a file was written", Effects(data_writes=1), FILES),
    ("a name changed", Effects(name_changes=1), FILES),
    ("a mode changed", Effects(metadata_changes=1), FILES),
    ("a ring was used", Effects(uring_requests=1), FILES),
    ("a service was started", Effects(forks=2, execs=1, survivors=1, survivors_new=1), PROCESSES),
    ("a service answered", Effects(survivors=1, survivors_ran=1), PROCESSES),
    ("a service was stopped", Effects(survivors_gone=1), PROCESSES),
    ("a service got a signal", Effects(survivors=1, signals=1), PROCESSES),
    ("a FIFO was filled while a service sleeps", Effects(survivors=1, channels=1), PROCESSES),
    ("another process was written", Effects(foreign_writes=1), PROCESSES),
    ("a queue was made", Effects(ipc_changes=1), PROCESSES),
    ("something was mounted", Effects(mounts=1), PROCESSES),
    ("a tmpfs was written", Effects(tmpfs_writes=1), PROCESSES),
    ("configure, then start", Effects(data_writes=1, survivors=1, survivors_new=1), BOTH),
    ("the owner wants the files", Effects(must_files="the host wrote files"), FILES),
    ("the owner wants the processes", Effects(must_processes="the dump failed"), PROCESSES),
    ("a task was not recorded", Effects(overflow=True), BOTH),
    ("an unknown call", Effects(unknown=True), BOTH),
    ("lost explanations only", Effects(lost_events=7), NONE),
]


@pytest.mark.parametrize(("effects", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_table(effects: Effects, expected: Verdict) -> None:
    judgement = judge(effects)
    assert judgement.verdict is expected
    assert judgement.safest == (effects.overflow or effects.unknown)
    assert judgement.reason


def test_a_changed_file_that_a_survivor_holds_needs_both() -> None:
    held = Options(held_changed=["/t/file: changed while held"])
    assert judge(Effects(data_writes=1, survivors=1), held).verdict is BOTH
    assert judge(Effects(survivors=1), held).verdict is NONE


_COUNTS = [field.name for field in msgspec.structs.fields(Effects) if field.type is int]
_FLAGS = [field.name for field in msgspec.structs.fields(Effects) if field.type is bool]

effects_strategy = st.builds(
    Effects,
    **{name: st.integers(0, 3) for name in _COUNTS},
    **{name: st.booleans() for name in _FLAGS},
    must_files=st.sampled_from(["", "host"]),
    must_processes=st.sampled_from(["", "host"]),
).map(lambda e: msgspec.structs.replace(e, survivors=e.survivors + e.survivors_new + e.survivors_ran))


def _covers(larger: Verdict, smaller: Verdict) -> bool:
    return larger.files >= smaller.files and larger.processes >= smaller.processes


@given(effects_strategy, st.sampled_from(_COUNTS + _FLAGS), st.integers(1, 5))
def test_more_effects_never_lower_the_verdict(effects: Effects, field: str, more: int) -> None:
    before = getattr(effects, field)
    change = {field: True if isinstance(before, bool) else before + more}
    if field in ("survivors_new", "survivors_ran"):  # they are among the survivors
        change["survivors"] = effects.survivors + more
    assert _covers(judge(msgspec.structs.replace(effects, **change)).verdict, judge(effects).verdict)


@given(effects_strategy)
def test_missing_information_gives_the_safest_verdict(effects: Effects) -> None:
    judgement = judge(effects)
    if effects.overflow or effects.unknown:
        assert judgement.verdict is BOTH
        assert judgement.safest


@given(effects_strategy)
def test_none_means_that_nothing_matters(effects: Effects) -> None:
    if judge(effects).verdict is NONE:
        left = [name for name in _COUNTS if getattr(effects, name)]
        harmless = {"forks", "execs", "exits", "listens", "survivors", "temporary", "lost_events", "channels"}
        assert set(left) <= harmless
        assert not (effects.channels and effects.survivors)
