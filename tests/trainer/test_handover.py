"""A run whose trainer works on its engines' machines: engines rest in the middle of a step; real processes, killed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench.harness import handed_over
from bench.harness.paced_engine import paced
from rollout.decide.engines.measuring import StepTimes
from rollout.engine.client import PublishResult
from rollout.plan import PoolPlan
from rollout.pool.pool import EnginePool
from sandbox.errors import Invalid
from tests.support.small_run import small
from trainer.config import open_run
from trainer.reports.metrics import read_lines
from trainer.settings import ObjectiveSettings, OptimiserSettings

pytest.importorskip("torch", reason="torch is not installed")
STEPS = 2


class Complete(EnginePool):
    """Its versions are served when all its servers serve: where one of two still starts, nobody can hand over."""

    async def publish(self, directory: Path | str, version: int) -> PublishResult:
        published = await super().publish(directory, version)
        while any(member.state != "serving" for member in self.members.values()):  # noqa: ASYNC110 - looks at the pool
            await asyncio.sleep(0.05)
        return published


async def test_nothing_is_lost_where_an_engine_and_the_trainer_die_while_another_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine that goes on and the trainer, when its first gradients begin; then the one that rests."""
    monkeypatch.setattr(handed_over, "EnginePool", Complete)
    monkeypatch.setattr(StepTimes, "line", lambda _: (0.1, 0.0))  # whatever else the machine does meanwhile
    run = handed_over.begin(tmp_path, steps=STEPS, longest=80)
    lengths = handed_over.tailed(0, 80)
    async with handed_over.rollout(
        run, lambda kind: paced(kind, 100.0), lambda prompt, n: lengths(prompt % handed_over.GROUPS, n), lambda _: True
    ) as (role, observed):
        trainer = await handed_over.start_trainer(run)
        try:
            async with asyncio.timeout(240):
                for version, victim in ((0, 0), (1, 1)):
                    while version not in observed.rested:
                        assert trainer.returncode is None, (run / "trainer.log").read_text()
                        await asyncio.sleep(0.05)
                    observed.servers[victim].kill()
                    trainer.kill()
                    await trainer.wait()
                    trainer = await handed_over.start_trainer(run)
                assert await trainer.wait() == 0, (run / "trainer.log").read_text()
        finally:
            if trainer.returncode is None:
                trainer.kill()
                await trainer.wait()
        assert [server.restarts for server in observed.servers] == [1, 1]
        assert role.plan.handover
    reported = handed_over.account(run, STEPS)
    assert (reported["prompts"], reported["lost"]) == (STEPS * handed_over.GROUPS, 0)
    assert reported["replayed"] == reported["decisions"] > 0
    lines = [line for line in read_lines(run / "metrics.jsonl") if "seconds" in line]
    assert [line["step"] for line in lines] == [1, 2]
    assert handed_over.gradient_difference(run) < 1e-5


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"pool": PoolPlan()}, "handover needs two"),
        ({"staleness": 1}, "staleness = 0"),
        ({"stream": True}, "leave out stream"),
        ({"optimiser": OptimiserSettings(updates=2)}, "leave out optimiser.updates"),
        ({"objective": ObjectiveSettings(preset="ppo")}, "leave out stream and handover"),
    ],
)
def test_a_run_that_has_nothing_to_hand_over_is_refused(changes: dict[str, object], why: str, tmp_path: Path) -> None:
    options = {"handover": True, "staleness": 0, "pool": PoolPlan(engines=2), "faults": 0, **changes}
    with pytest.raises(Invalid) as refused:
        open_run(small(tmp_path, **options))
    assert why in f"{refused.value.message} {refused.value.hint}"
    assert not list(tmp_path.iterdir())
