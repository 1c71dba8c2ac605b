"""Who takes the steps of a run: ranks that are lost are started again, with what they and the run had saved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist

from sandbox.errors import NoSpace
from tests.support.programs import Program
from tests.trainer.test_distributed import ended, near, plan
from tests.trainer.test_learner import samples
from trainer import steps
from trainer.distributed.launch import Fleet
from trainer.distributed.shard import local
from trainer.distributed.watch import Beat, judge, read
from trainer.distributed.worker import WorkPlan
from trainer.errors import RankLost, TrainerFailed
from trainer.models.load import published
from trainer.prepare import explain
from trainer.resume import ResumeState, Saves, saves_in
from trainer.settings import OptimiserSettings
from trainer.steps import DistributedSteps, LocalSteps

TIMEOUT = 120.0


def wait_for(what: object, said: str) -> None:
    assert callable(what)
    deadline = time.monotonic() + TIMEOUT
    while not what():
        assert time.monotonic() < deadline, f"not within {TIMEOUT:.0f} s: {said}"
        time.sleep(0.05)


def state(step: int) -> ResumeState:
    return ResumeState(step=step, version=step, consumed=[f"p{step}"], totals={"turns": 10 * step})


def shared(tmp_path: Path, name: str, **changes: object) -> WorkPlan:
    """A plan whose saves lie in one folder, whoever takes the steps."""
    return plan(tmp_path, name, saves=str(tmp_path / "resume"), **changes)


def test_a_run_changes_between_one_process_and_ranks_past_a_torn_save(tmp_path: Path) -> None:
    """Two ranks, one killed between steps and one within; then the newest save is torn, and one process goes on."""
    torch.set_num_threads(1)
    expected = LocalSteps(plan(tmp_path, "complete"))
    for step in range(4):
        expected.step(samples(step), state(step + 1))
    said: list[str] = []
    together = DistributedSteps(shared(tmp_path, "ranks"), ranks=2, report=said.append)
    together.begin(None)
    try:
        together.step(samples(0), state(1))
        victim = read(together.fleet.directory / "beats")[1]
        os.kill(victim.pid, signal.SIGKILL)
        wait_for(lambda: (together.poll(), said)[1], "the dead rank is named")
        assert f"rank 1 (pid {victim.pid}) was killed by signal 9" in said[0]
        together.step(samples(1), state(2))
        killer = threading.Timer(0.2, lambda: os.kill(read(together.fleet.directory / "beats")[0].pid, signal.SIGKILL))
        killer.start()
        stats = together.step(samples(2), state(3))
        killer.join()
        assert stats == {"put_aside": {}} or stats["trajectories"] == 9  # the first: it was saved before the kill
        pids = [beat.pid for beat in read(together.fleet.directory / "beats")]
    finally:
        together.close()
    assert all(ended(pid) for pid in pids)
    newest = saves_in(tmp_path / "resume")[-1]
    assert newest.name == "step-000003"
    torn = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    torn.write_bytes(torn.read_bytes()[: torn.stat().st_size // 2])
    saves = Saves(tmp_path / "resume")
    result = saves.newest()
    assert result is not None and (result.step, result.consumed, result.totals) == (2, ["p2"], {"turns": 20})
    assert "step-000003 is damaged and passed over" in saves.notes[0]
    alone = LocalSteps(shared(tmp_path, "ranks"))
    alone.begin(result)
    for step in (2, 3):
        alone.step(samples(step), state(step + 1))
    assert near(dict(alone.model.state_dict()), dict(expected.model.state_dict()))


def test_a_group_of_one_that_keeps_its_state_in_memory_takes_the_same_steps(tmp_path: Path) -> None:
    """As beside a GPU with `offload`; a run goes from one to the other, and the weights are published whole."""
    torch.set_num_threads(1)
    expected = LocalSteps(plan(tmp_path, "complete"))
    for step in range(3):
        expected.step(samples(step), state(step + 1))
    plain = LocalSteps(shared(tmp_path, "plain"))
    plain.step(samples(0), state(1))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    spread = LocalSteps(shared(tmp_path, "spread", offload=True))
    try:
        spread.begin(plain.saves.newest())
        assert all(hasattr(weight, "to_local") for weight in spread.model.parameters())
        spread.step(samples(1), state(2))
        plain.begin(spread.saves.newest())
        spread.step(samples(2), state(3))
        plain.learner.complete(samples(2), rate=plain.plan.rate(2))
        result = {name: local(tensor) for name, tensor in published(spread.model).items()}
    finally:
        spread.close()
    assert not dist.is_initialized()
    assert near(result, published(expected.model)) and near(published(plain.model), published(expected.model))


@pytest.mark.parametrize("fate", ["all there", "one replaced"])
def test_ranks_compute_groups_before_their_batch_is_complete(fate: str, tmp_path: Path) -> None:
    """Two ranks are fed group by group and lose one meanwhile; the step is what one process does with the batch."""
    torch.set_num_threads(1)
    expected = LocalSteps(plan(tmp_path, "complete"))
    batches = [samples(step) for step in range(2)]
    groups = [batches[1][at : at + 3] for at in range(0, 9, 3)]
    if fate == "one replaced":
        batches[1] = [*batches[1][3:], *samples(7)[:3]]
    for step, batch in enumerate(batches):
        expected.step(batch, state(step + 1))
    together = DistributedSteps(plan(tmp_path, "ranks"), ranks=2, report=lambda text: None)
    together.fleet.feed(0, 0, samples(9))  # of a trainer that died: nobody may compute it
    together.begin(None)

    def phases() -> list[str]:
        return [beat.phase for beat in read(together.fleet.directory / "beats")]

    try:
        assert together.streams
        together.step(batches[0], state(1))
        together.feed(groups[0])
        together.feed(groups[1])
        wait_for(lambda: phases() == ["wait for batch 1, 2 parts done"] * 2, "what was fed is computed")
        os.kill(read(together.fleet.directory / "beats")[1].pid, signal.SIGKILL)
        wait_for(lambda: (together.poll(), together._losses)[1], "the dead rank is seen")
        wait_for(lambda: phases() == ["wait for batch 1, 2 parts done"] * 2, "what was fed is computed again")
        stats = together.step(batches[1], state(2))
    finally:
        together.close()
    assert (stats["hidden_s"] > 0) == (fate == "all there")
    assert near(together.fleet.weights(2), dict(expected.model.state_dict()))


def test_a_number_that_is_not_finite_is_said_and_nothing_is_started_again(tmp_path: Path) -> None:
    made = plan(tmp_path, "nan", settings=OptimiserSettings(rate=1e30, budget=64))
    said: list[str] = []
    together = DistributedSteps(made, ranks=2, report=said.append)
    together.begin(None)
    try:
        with pytest.raises(TrainerFailed, match="not finite") as caught:
            for step in range(3):
                together.step(samples(step), state(step + 1))
    finally:
        together.close()
    assert not isinstance(caught.value, RankLost) and said == []


def test_a_full_disk_is_said_as_that_whatever_died_of_it(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "pagurus-test", str(place)], check=True)
    try:
        made = plan(tmp_path, "small/ranks")
        together = DistributedSteps(made, ranks=1, report=lambda text: None)
        together.begin(None)
        try:
            wait_for(lambda: read(together.fleet.directory / "beats"), "a rank lives")
            (place / "filler").write_bytes(b"x" * (os.statvfs(place).f_bavail * 4096 - (64 << 10)))
            with pytest.raises(OSError) as caught:
                together.step(samples(0), state(1))
        finally:
            together.close()
        assert isinstance(explain(caught.value, place), NoSpace)
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """Killed by SIGKILL; a rank that is stopped at that time is ended by whoever starts next."""
    made = plan(tmp_path, "orphans")
    program = (
        "import sys, time, msgspec\n"
        "from pathlib import Path\n"
        "from trainer.distributed.launch import Fleet\n"
        "from trainer.distributed.worker import WorkPlan\n"
        "Fleet(msgspec.json.decode(sys.argv[1], type=WorkPlan), ranks=2).start()\n"
        "time.sleep(600)\n"
    )

    owner = Program([sys.executable, "-c", program, msgspec.json.encode(made).decode()])
    directory = Path(made.directory)
    try:
        wait_for(lambda: len(read(directory / "beats")) == 2, "two ranks live")
        first, second = (beat.pid for beat in read(directory / "beats"))
        os.kill(second, signal.SIGSTOP)
    finally:
        owner.destroy()
    wait_for(lambda: ended(first), "the rank that runs has ended")
    assert not ended(second)
    with Fleet(made, ranks=1) as fleet:
        assert ended(second)
        fleet.give(samples(0), state(1))
        fleet.wait(1)


def test_a_rank_that_is_lost_again_and_again_ends_the_run_with_the_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "MAX_LOSSES", 1)
    made = plan(tmp_path, "hopeless", lora=None)
    together = DistributedSteps(made, ranks=1, report=lambda text: None)
    together.begin(None)
    batch = together.fleet.log.path(0)
    try:
        batch.parent.mkdir(exist_ok=True)
        batch.with_suffix(".new").write_bytes(b"torn")
        batch.with_suffix(".new").rename(batch)  # what a rank cannot read makes it die without a word
        with pytest.raises(RankLost, match=r"2 times in a row .*--ranks N"):
            together._living(lambda: together.fleet.wait(1))
    finally:
        together.close()


@pytest.mark.parametrize(("waits", "named"), [((True, False), [1]), ((True, True), [0, 1]), ((False, False), [0, 1])])
def test_of_ranks_that_stand_the_one_outside_of_collectives_is_named(
    waits: tuple[bool, bool], named: list[int]
) -> None:
    beats = [
        Beat(rank, 10 + rank, 100.0, 5, "step 3", 10.0, where="sleep (env.py:3)", waits=waits[rank])
        for rank in range(2)
    ]
    lost = judge(beats, 100.0, silent=10.0, stuck=60.0)
    assert [item.rank for item in lost] == named
    assert lost[-1].reason.endswith("has been in step 3 for 90.0 s, at sleep (env.py:3)")
