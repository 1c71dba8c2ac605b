"""The page of a run: what trainer, engines and trajectories did when, and what shares of the time it took."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rollout.gantt import engines, roles, trainer, trajectories
from rollout.gantt.drawing import LaneGroup, page, spent
from rollout.store import decisions, servers, stages
from rollout.store.samples import SampleStore

COLOURS = {**trajectories.COLOURS, **trainer.COLOURS, **engines.COLOURS}


class RunTime(msgspec.Struct, frozen=True, kw_only=True):
    """What went on between two moments, in seconds since the epoch."""

    since: float
    until: float
    parts: list[LaneGroup]


def chart(directory: Path, run: str, seconds: float) -> str:
    """HTML of the newest `seconds` of a rollout's directory."""
    time = read(directory, seconds)
    return page(run, time.parts, time.since, time.until, COLOURS)


def read(directory: Path, seconds: float) -> RunTime:
    """The newest `seconds` of a rollout's directory."""
    logged = [item for path in sorted(directory.glob(decisions.PATTERN)) for item in decisions.read(path)]
    doing = list(servers.read(directory))
    store = SampleStore(directory, create=False)
    try:
        played = [trajectories.of_trajectory(store.sample(prompt, member)) for prompt, member, _, _ in store.samples()]
    finally:
        store.close()
    noted = stages.read(directory.parent / "roles")
    trained = roles.above(trainer.of_trainer(logged), roles.of_role(noted, "trainer"))
    waited = [bar for bar in roles.of_role(noted, "rollout") if bar.kind == roles.TURN]
    turns = [bar for row in played for bar in row]
    every = [*trained, *turns]
    begun = [*(bar.begin for bar in every), *(item.at for item in doing)]
    until = max([*(bar.end for bar in every), *(item.at for item in doing)], default=0.0)
    since = max(until - seconds, min(begin for begin in begun)) if begun else 0.0
    rows = trajectories.lanes([bar for bar in row if bar.end > since] for row in played)
    parts = [
        trainer.part(trained, since, until),
        engines.part(doing, engines.of_decisions(logged), [*turns, *waited], since, until),
        LaneGroup(
            title="Trajectories", lanes=rows, spent=spent(turns, since, until), said="Each lane holds one at a time."
        ),
    ]
    return RunTime(since=since, until=until, parts=parts)
