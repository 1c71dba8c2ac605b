"""Samples that one of several ranks fails on: they are found, named and left out, whatever else dies meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import msgspec
import pytest
import torch

from tests.support import failing_ranks
from tests.trainer.test_distributed import near, plan
from tests.trainer.test_isolate import GOOD, clean
from tests.trainer.test_steps import state, wait_for
from trainer.batches.sample import Sample
from trainer.distributed.watch import read
from trainer.errors import SampleFailed, TrainerFailed
from trainer.resume import Saves
from trainer.steps import DistributedSteps, LocalSteps


@pytest.fixture
def fragile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(failing_ranks.directory(tmp_path)), path])))


def poison(name: str) -> Sample:
    return Sample(**{**GOOD, "tokens": [3, failing_ranks.RAISES, 5, 6]}, group="p0", name=name)


def test_a_sample_that_one_rank_raises_on_is_found_while_another_rank_is_killed(tmp_path: Path, fragile: None) -> None:
    torch.set_num_threads(1)
    batches = [clean(step)[:6] for step in range(2)]
    expected = LocalSteps(plan(tmp_path, "expected"))
    for step, batch in enumerate(batches):
        expected.step(batch, state(step + 1))
    said: list[str] = []
    made = plan(tmp_path, "ranks", saves=str(tmp_path / "resume"))
    together = DistributedSteps(made, ranks=2, report=said.append)
    together.begin(None)

    def kill() -> None:
        """A rank, once the search has begun."""
        wait_for(lambda: any("are looked for" in text for text in said), "the search begins")
        before = {beat.pid for beat in read(together.fleet.directory / "beats")}
        wait_for(lambda: {b.pid for b in read(together.fleet.directory / "beats")} - before, "ranks of the search")
        victim = ({beat.pid for beat in read(together.fleet.directory / "beats")} - before).pop()
        os.kill(victim, signal.SIGKILL)

    try:
        together.step(batches[0], state(1))
        killer = threading.Thread(target=kill)
        killer.start()
        stats = together.step([*batches[1][:3], poison("poison/0"), *batches[1][3:]], state(2))
        killer.join()
    finally:
        together.close()
    assert list(stats["put_aside"]) == ["poison/0"] and "IndexError" in stats["put_aside"]["poison/0"]
    assert any("was killed by signal 9" in text for text in said)
    assert near(together.fleet.weights(2), dict(expected.model.state_dict()))
    saved = Saves(tmp_path / "resume").newest()
    assert saved is not None and [(line.step, line.name, line.tokens) for line in saved.put_aside] == [
        (2, "poison/0", 4)
    ]


def test_where_most_samples_are_at_fault_the_error_stands(tmp_path: Path, fragile: None) -> None:
    together = DistributedSteps(plan(tmp_path, "ranks"), ranks=2, report=lambda text: None)
    together.begin(None)
    good = msgspec.structs.replace(clean(0)[0], name="good")
    try:
        with pytest.raises(TrainerFailed, match="IndexError") as caught:
            together.step([good, poison("a"), poison("b")], state(1))
    finally:
        together.close()
    assert isinstance(caught.value, SampleFailed)
