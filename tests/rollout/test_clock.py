"""Whose time it is."""

from __future__ import annotations

import asyncio

import pytest

from rollout.decide.blame import EpisodePhase
from rollout.episode_clock import PhaseMeter, TrajectoryClock
from trainer.reports.split import PARTS, split


async def test_platform_time_stands_still() -> None:
    clock = TrajectoryClock(60.0)
    now = asyncio.get_running_loop().time
    began = now()
    async with clock.running():
        with clock.stopped():
            stopped = now()
            with clock.stopped():  # by another task at the same time
                await asyncio.sleep(0.1)
            await asyncio.sleep(0.1)
            stopped = now() - stopped
        assert 60.0 - clock.left <= now() - began - stopped  # whatever else took a moment
    clock.charge(65.0)
    assert clock.left == 0.0
    with pytest.raises(TimeoutError):
        async with clock.running():
            await asyncio.Event().wait()
    assert clock.expired


async def test_a_time_out_of_the_environments_own_is_told_apart() -> None:
    clock = TrajectoryClock(60.0)
    with pytest.raises(TimeoutError):
        async with clock.running():
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
    assert not clock.expired


def test_the_parts_of_a_step_add_up() -> None:
    now = 0.0
    meter = PhaseMeter(lambda: now)
    before = meter.seconds()
    now = 1.0  # idle until here
    with meter.phase(EpisodePhase.GENERATE), meter.phase(EpisodePhase.GENERATE):
        now = 3.0
        with meter.phase(EpisodePhase.STEP):
            with meter.phase(EpisodePhase.CHECKPOINT, inside=EpisodePhase.STEP):
                now = 5.0
            now = 6.0
    parts = split(
        waited=6.0, worked=2.0, spent={name: value - before.get(name, 0.0) for name, value in meter.seconds().items()}
    )
    assert sum(parts.values()) == pytest.approx(8.0) and set(parts) == set(PARTS)
    assert parts["idle"] == 1.0 and parts["trainer"] == 2.0
    assert parts["engine"] == pytest.approx(5 * 10 / 13) and parts["environment"] == pytest.approx(5 * 1 / 13)
    assert parts["checkpoint"] == pytest.approx(5 * 2 / 13)


def test_a_wait_in_which_nothing_is_known_to_have_run_is_idle() -> None:
    assert split(waited=3.0, worked=1.0, spent={})["idle"] == 3.0
