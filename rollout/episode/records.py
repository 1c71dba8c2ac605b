"""What commands and checkpoints did, copied into the records of a trajectory's turns.

Guarantee: it may be called again with more known; nothing is counted twice.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence

from rollout.decide.blame import Blame, TrajectoryFailure, blame
from rollout.engine.client import Sampling
from rollout.episode.guard import ExecutedCommand
from rollout.episode.spec import EpisodeSpec
from rollout.messages import Trajectory, TurnRecord
from sandbox.messages import CheckpointInfo, Effects, Verdict

EFFECTS_SHOWN = 4
NAMED = re.compile(r" (/.+) by .+\[\d+\]$", re.DOTALL)  # a path in an explanation of the inspector


def fill(
    done_in: Sequence[tuple[TurnRecord, ExecutedCommand]], stored: Mapping[str, CheckpointInfo] | None = None
) -> None:
    """Copy what commands and checkpoints did into the turns' records, as far as it is known by now.

    `stored`: the checkpoints that the disk has by now.
    """
    for record, _ in done_in:
        record.listens = record.left = record.times_set = 0  # summed again over its commands
    for record, done in done_in:
        record.exec_start = record.exec_start or done.started
        record.exec_end = done.ended
        result, info = done.result, done.info
        if result.verdict is None:
            continue
        record.verdict = _stronger(Verdict(record.verdict), result.verdict)
        record.verdict_ms = result.verdict_ms or 0.0
        record.checkpoint, record.waited_s = result.checkpoint, done.waited_s
        record.uncaptured = done.uncaptured
        if result.effects is not None:
            _note_effects(record, result.effects)
        if info is not None and result.verdict is not Verdict.NONE:
            record.checkpoint_started = info.started_at or 0.0
            record.checkpoint_captured = info.captured_at or 0.0
            record.frozen_ms = info.frozen_ms
        if (retained := (stored or {}).get(record.checkpoint or "")) is not None:
            record.full_bytes = retained.full_bytes  # also of a turn that needed no checkpoint
            record.stored_bytes = 0 if result.verdict is Verdict.NONE else retained.stored_bytes


def _note_effects(record: TurnRecord, observed: Effects) -> None:
    record.effects = observed.reasons[:EFFECTS_SHOWN]
    named = (NAMED.search(reason) for reason in observed.reasons)
    record.touched = list(dict.fromkeys([*record.touched, *(match[1] for match in named if match is not None)]))
    record.listens += observed.listens
    record.left += observed.survivors_new
    record.times_set += observed.times_set
    record.unseen |= observed.overflow or observed.unknown or observed.lost_events > 0


def _stronger(left: Verdict, right: Verdict) -> str:
    return Verdict.of(files=left.files or right.files, processes=left.processes or right.processes).value


def label(trajectory: Trajectory, spec: EpisodeSpec, sampling: Sampling) -> None:
    trajectory.prompt = trajectory.group = spec.prompt
    trajectory.index, trajectory.seed, trajectory.start = spec.index, spec.seed, spec.start
    trajectory.temperature, trajectory.complete, trajectory.started_at = (
        sampling.temperature,
        sampling.complete,
        time.time(),
    )


def fail(trajectory: Trajectory, failure: TrajectoryFailure) -> None:
    trajectory.status = "truncated" if blame(failure) is Blame.POLICY else "failed"
    trajectory.failure, trajectory.reason = failure, str(failure)
