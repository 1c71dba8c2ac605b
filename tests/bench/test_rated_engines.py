"""The simulation foretells what the real pool does with servers that are their rates."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from bench.harness.rated_engines import IdleLoop, Kind, Park, drive, foretold
from coordinator.simulate.scenarios import H20, H800

PARK: Park = {"H20": (3, H20), "H800": (1, H800)}
KINDS = {"reads": Kind(2000, 30, 0.5), "writes": Kind(100, 200, 0.5)}


@pytest.mark.parametrize(
    ("place", "blind"), [(None, False), (None, True), ({"reads": "H800", "writes": "H20"}, False)]
)  # fmt: skip
def test_as_many_trajectories_end_as_the_simulation_says(place: Mapping[str, str] | None, blind: bool) -> None:
    with asyncio.Runner(loop_factory=IdleLoop) as runner:
        came = runner.run(drive(PARK, KINDS, place=place, blind=blind, seconds=30, seed=1))
    said = foretold(PARK, KINDS, place=place, blind=blind, seconds=30, seed=1)
    assert came.per_second > 1 and said == pytest.approx(came.per_second, rel=0.1)
