"""The order of look, comparison and second look: when files are compared at all, and when that may end in `none`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from daemon.verdict import compare
from daemon.verdict.assess import RESTS, Assessor, FileTrees, poll
from daemon.verdict.ignore import checked
from ebpf.inspector import SurvivorObserved
from sandbox import paths
from sandbox.criu.open_files import OpenFiles
from sandbox.errors import SandboxDead
from sandbox.messages import Effects, IgnoreRules, Verdict
from sandbox.tree.safe_path import SandboxRoot

NONE, FILES, PROCESSES, BOTH = Verdict.NONE, Verdict.FILES, Verdict.PROCESSES, Verdict.BOTH
WRITTEN = Effects(data_writes=1)
RULES = ("/ignored",)
UNHURRIED = compare.Bounds(seconds=60)


@dataclass
class FakeInspector:
    """Answers with the given effects, one after the other; the last one for ever."""

    answers: Sequence[Effects]
    observed: Sequence[SurvivorObserved] = ()
    reads: int = 0
    requested: list[int] = field(default_factory=list)

    def read(self, _cgroup: int) -> Effects:
        self.reads += 1
        return self.answers[min(self.reads, len(self.answers)) - 1]

    def tasks(self, cgroup: int) -> list[SurvivorObserved]:
        self.requested.append(cgroup)
        return list(self.observed)


class Nobody(SimpleNamespace):
    """Its processes hold nothing."""

    @property
    def inside(self) -> SandboxRoot:
        raise SandboxDead("no processes")


CONTAINER = Nobody(cgroup=SimpleNamespace(id=7), layer=paths.runtime_layer(), spec=SimpleNamespace(binds=()))
WITH_SCRATCH = Nobody(**{**vars(CONTAINER), "spec": SimpleNamespace(binds=(SimpleNamespace(read_only=False),))})
HELD = OpenFiles({"/srv/log": ((7, 0o100644, 1, 2, 1), None)})


@pytest.fixture
def equal(tmp_path: Path) -> FileTrees:
    """Two trees without a difference but for what `RULES` ignore."""
    for name in ("before", "now", "lower"):
        (tmp_path / name).mkdir(mode=0o755)
    (tmp_path / "now/ignored").write_text("")
    return FileTrees(before=tmp_path / "before", now=tmp_path / "now", lower=tmp_path / "lower", taken_at=0.0)


async def assessed(
    trees: FileTrees | None,
    *answers: Effects,
    paths: Sequence[str] = RULES,
    busy: bool = False,
    assessor: Assessor | None = None,
) -> Verdict:
    assessor = assessor or Assessor(UNHURRIED)
    rules = checked(IgnoreRules(paths=list(paths)))
    _, judgement = await assessor.assess(FakeInspector(answers), CONTAINER, lambda: trees, rules=rules, busy=busy)
    return judgement.verdict


async def test_files_that_are_as_they_were_but_for_what_is_ignored_need_nothing(equal: FileTrees) -> None:
    assert await assessed(equal, WRITTEN) is NONE
    (equal.now / "new").write_text("")
    assert await assessed(equal, WRITTEN) is FILES
    assert await assessed(equal, WRITTEN, paths=[*RULES, "/new"]) is NONE


async def test_without_rules_for_paths_or_scratch_nothing_is_compared(equal: FileTrees) -> None:
    (equal.now / "ignored").unlink()
    assert await assessed(equal, WRITTEN, paths=()) is FILES
    _, judgement = await Assessor(UNHURRIED).assess(FakeInspector([WRITTEN]), WITH_SCRATCH, lambda: equal)
    assert (judgement.verdict, judgement.reason) == (NONE, "only scratch changed")
    (equal.now / "new").write_text("")
    assert (await Assessor(UNHURRIED).assess(FakeInspector([WRITTEN]), WITH_SCRATCH, lambda: equal))[1].verdict is FILES


@pytest.mark.parametrize(
    ("effects", "expected"),
    [
        (Effects(), NONE),
        (Effects(data_writes=1, survivors=1, survivors_new=1), BOTH),
        (Effects(data_writes=1, survivors=1, survivors_ran=1), BOTH),
        (Effects(data_writes=1, signals=1), BOTH),
        (Effects(survivors=1, survivors_new=1), PROCESSES),
        (Effects(data_writes=1, unknown=True), BOTH),
        (Effects(data_writes=1, overflow=True), BOTH),
        (Effects(must_files="the host wrote"), FILES),
        (Effects(data_writes=1, must_files="the host wrote"), FILES),
        (Effects(data_writes=1, excluded=1), FILES),
        (Effects(data_writes=65), NONE),
        (Effects(data_writes=1, survivors=1), FILES),  # what they hold is not known
        (Effects(uring_requests=3), NONE),
        (Effects(name_changes=2, metadata_changes=2, times_set=1), NONE),
    ],
)
async def test_only_changes_of_files_that_nobody_else_could_make_are_compared(
    equal: FileTrees, effects: Effects, expected: Verdict
) -> None:
    assert await assessed(equal, effects) is expected


async def test_a_survivor_must_hold_what_it_held(equal: FileTrees) -> None:
    alongside = Effects(data_writes=1, survivors=1)
    assert await assessed(replace(equal, held=OpenFiles()), alongside) is NONE
    assert await assessed(replace(equal, held=HELD), alongside) is BOTH
    assert await assessed(replace(equal, held=HELD), WRITTEN) is NONE
    assert await assessed(replace(equal, held=HELD), alongside, busy=True) is BOTH


async def test_nothing_is_compared_while_commands_are_under_way_or_without_a_snapshot(equal: FileTrees) -> None:
    assert await assessed(equal, WRITTEN, busy=True) is FILES
    assert await assessed(None, WRITTEN) is FILES


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        (Effects(data_writes=2), FILES),
        (Effects(data_writes=1, survivors=1, survivors_new=1), BOTH),
        (Effects(data_writes=1, temporary=1), FILES),
        (Effects(data_writes=1, unknown=True), BOTH),
        (Effects(data_writes=1, reasons=["more is told"], lost_events=1), NONE),
    ],
)
async def test_what_happens_during_the_comparison_counts(equal: FileTrees, later: Effects, expected: Verdict) -> None:
    assert await assessed(equal, WRITTEN, later) is expected


async def test_a_tree_that_is_too_large_is_left_in_peace_for_some_turns(equal: FileTrees) -> None:
    assessor = Assessor(compare.Bounds(entries=1, seconds=60))
    (equal.now / "one").mkdir()
    assert await assessed(equal, WRITTEN, assessor=assessor) is FILES
    (equal.now / "one").rmdir()
    verdicts = [await assessed(equal, WRITTEN, assessor=assessor) for _ in range(RESTS + 1)]
    assert verdicts == [FILES] * RESTS + [NONE]


TMUX = checked(IgnoreRules(processes=["tmux: server"]))
SERVER = SurvivorObserved(pid=1 << 30, tid=1 << 30, name="tmux: server", new=True, ran=False)


def test_an_ignored_process_is_looked_for_only_where_there_are_rules() -> None:
    new = Effects(survivors=1, survivors_new=1)
    with_rules, without_rules = FakeInspector([new], [SERVER]), FakeInspector([new], [SERVER])
    assert poll(with_rules, CONTAINER, TMUX)[1].verdict is NONE
    assert poll(without_rules, CONTAINER)[1].verdict is PROCESSES
    assert (with_rules.requested, without_rules.requested) == ([7], [])
    assert poll(FakeInspector([Effects()], [SERVER]), CONTAINER, TMUX)[1].verdict is NONE


def test_a_process_that_changed_while_it_was_looked_at_counts() -> None:
    before, after = Effects(survivors=1, survivors_new=1), Effects(survivors=1, survivors_new=1, execs=1)
    assert poll(FakeInspector([before, after], [SERVER]), CONTAINER, TMUX)[1].verdict is PROCESSES


async def test_files_are_not_compared_while_an_ignored_process_could_write(equal: FileTrees) -> None:
    both = Effects(data_writes=1, survivors=1, survivors_new=1)
    inspector = FakeInspector([both], [SERVER])
    _, judgement = await Assessor(UNHURRIED).assess(inspector, CONTAINER, lambda: equal, rules=TMUX)
    assert judgement.verdict is FILES
