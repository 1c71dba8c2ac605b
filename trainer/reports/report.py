"""The figures of a run: counted while it goes, written at its end.

Guarantee: every figure is a count or a sum over records of this run, whatever else its host does; none is assumed.
Counters survive a resume. Bytes are those of checkpoints that were on the disk when their trajectory ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from rollout import Trajectory, TurnRecord
from rollout.decide.blame import Cause
from rollout.service.protocol import RolloutCounters
from sandbox import durable

VERDICTS = ("none", "files", "processes", "both")
COMPARED = (
    *("seed", "steps", "engine", "reward_before", "reward_after", "wall_s", "first_rollout_s", "hidden_share"),
    *("checkpoint_ms_mean", "killed", "recovered_equal", "trajectories_lost", "machine"),
)


def by_part(name: str, trajectories: Iterable[Trajectory], part: Callable[[int], str]) -> dict[str, dict[str, float]]:
    """Mean rewards by part of a mixture. `part`: of which a prompt's number is."""
    rewards: dict[str, list[float]] = {}
    for item in trajectories:
        if item.scored:
            rewards.setdefault(part(item.seed), []).append(item.reward)
    return {name: {at: sum(result) / len(result) for at, result in sorted(rewards.items())}}


def by_scorer(name: str, trajectories: Iterable[Trajectory]) -> dict[str, dict[str, float]]:
    """Means of what each of several rewards said, not weighted."""
    said: dict[str, list[float]] = {}
    for item in trajectories:
        for part, value in ({} if item.score is None else item.score.parts).items():
            said.setdefault(part, []).append(value)
    return {name: {part: sum(values) / len(values) for part, values in sorted(said.items())}} if said else {}


def turns(trajectories: Iterable[Trajectory]) -> int:
    """All of them, also those that ran no command, of which `Totals` knows none."""
    return sum(len(item.turns) for item in trajectories)


def cut_share(trajectories: Sequence[Trajectory]) -> float:
    """Of those that ended at a limit of tokens: of an answer (`sampling.max_tokens`), or of all (`max_length`)."""
    ended = (item.failure.cause for item in trajectories if item.failure is not None)
    return sum(cause in (Cause.CUT, Cause.LENGTH) for cause in ended) / max(1, len(trajectories))


class Totals(msgspec.Struct, kw_only=True):
    """Counters of a run. Saved with the resume state."""

    reward_before: float | None = None
    reward_after: float | None = None
    wall_s: float = 0.0
    first_rollout_s: float | None = None  # until the first turn had ended in a live sandbox
    turns: int = 0
    trajectories: int = 0
    trajectories_lost: int = 0  # that neither a restore nor another try could save
    trajectories_retried: int = 0  # begun again in a fresh sandbox
    truncated: int = 0
    verdicts: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(VERDICTS, 0))
    checkpoints: int = 0
    checkpoints_by_kind: dict[str, int] = {}
    checkpoint_s: float = 0.0  # sum of start to captured
    exposed_s: float = 0.0  # of these, time in which the next action had to wait
    frozen_s: float = 0.0
    stored_bytes: int = 0
    full_bytes: int = 0
    killed: int = 0
    recovered_equal: int = 0
    lost_reasons: dict[str, int] = {}
    put_aside: int = 0  # samples that could not be trained on: see trainer.isolate
    wall_split_s: dict[str, float] = {}  # by part, see trainer.reports.split; evaluations besides
    observed: RolloutCounters | None = None  # what the rollout had counted when these were last brought up to date

    @property
    def hidden_share(self) -> float | None:
        """Share of checkpoint time that delayed nothing."""
        return 1.0 - self.exposed_s / self.checkpoint_s if self.checkpoint_s else None

    def add_time(self, parts: Mapping[str, float]) -> None:
        """Wall time by part."""
        for name, seconds in parts.items():
            self.wall_split_s[name] = self.wall_split_s.get(name, 0.0) + seconds

    def count(self, now: RolloutCounters) -> None:
        """Brings up to date what the rollout counts: deaths of sandboxes and what became of them, those of trajectories
        that no batch took included. It may have been started again since, and so may we."""
        observed = (
            self.observed
            if self.observed is not None and self.observed.born == now.born
            else RolloutCounters(born=now.born)
        )
        self.observed = now
        for name in ("killed", "recovered_equal", "trajectories_lost", "trajectories_retried"):
            setattr(self, name, getattr(self, name) + getattr(now, name) - getattr(observed, name))

    def add(self, trajectories: Iterable[Trajectory]) -> None:
        """Counts trajectories that have ended."""
        for trajectory in trajectories:
            self.trajectories += 1
            self.truncated += trajectory.status == "truncated"
            if trajectory.status in ("failed", "aborted"):
                reason = trajectory.reason or trajectory.status
                self.lost_reasons[reason] = self.lost_reasons.get(reason, 0) + 1
            for turn in trajectory.turns:
                self._add_turn(turn)

    def _add_turn(self, turn: TurnRecord) -> None:
        if turn.checkpoint is None:
            return  # nothing ran, or only a check of the environment's own: not judged
        self.turns += 1
        self.verdicts[turn.verdict] = self.verdicts.get(turn.verdict, 0) + 1
        self.full_bytes += turn.full_bytes
        if not turn.checkpoint_started or not turn.checkpoint_captured:
            return
        self.checkpoints += 1
        self.checkpoints_by_kind[turn.verdict] = self.checkpoints_by_kind.get(turn.verdict, 0) + 1
        self.stored_bytes += turn.stored_bytes
        span = max(0.0, turn.checkpoint_captured - turn.checkpoint_started)
        self.checkpoint_s += span
        self.frozen_s += turn.frozen_ms / 1000
        self.exposed_s += min(span, turn.waited_s)


def summary(
    totals: Totals,
    *,
    engine: str,
    seed: int,
    steps: int,
    version: int,
    pace: float,
    concurrency: int,
    machine: str,
    evaluated_on: Sequence[str] = (),
) -> dict[str, Any]:
    """The content of `summary.json`."""
    share = totals.hidden_share
    return {
        "reward_before": totals.reward_before,
        "reward_after": totals.reward_after,
        "wall_s": round(totals.wall_s, 1),
        "first_rollout_s": None if totals.first_rollout_s is None else round(totals.first_rollout_s, 1),
        "wall_split_s": {name: round(seconds, 1) for name, seconds in totals.wall_split_s.items()},
        "verdicts": totals.verdicts,
        "checkpoints": totals.checkpoints,
        "stored_bytes": totals.stored_bytes,
        "full_bytes": totals.full_bytes,
        "hidden_share": None if share is None else round(share, 4),
        "killed": totals.killed,
        "recovered_equal": totals.recovered_equal,
        "trajectories_lost": totals.trajectories_lost,
        "evaluated_on": list(evaluated_on),
        "engine": engine,
        "seed": seed,
        "steps": steps,
        "policy_version": version,
        "seconds_per_answer_at_least": pace,
        "concurrency": concurrency,
        "machine": machine,
        "turns": totals.turns,
        "trajectories": totals.trajectories,
        "trajectories_retried": totals.trajectories_retried,
        "truncated": totals.truncated,
        "checkpoints_by_kind": totals.checkpoints_by_kind,
        "checkpoint_ms_mean": _mean_ms(totals.checkpoint_s, totals),
        "frozen_ms_mean": _mean_ms(totals.frozen_s, totals),
        "lost_reasons": totals.lost_reasons,
        "put_aside": totals.put_aside,
    }


def _mean_ms(seconds: float, totals: Totals) -> float | None:
    return round(1000 * seconds / totals.checkpoints, 2) if totals.checkpoints else None


def write_summary(directory: Path, content: dict[str, Any]) -> None:
    """`summary.json`, complete or absent."""
    durable.publish(directory / "summary.json", msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")


def line(content: dict[str, Any]) -> str:
    """What runs are compared by, as one line of JSON."""
    return msgspec.json.encode({name: content[name] for name in COMPARED}).decode()


def table(content: dict[str, Any], directory: Path) -> Table:
    """The summary as a person reads it."""
    shown = Table(title=f"Run {directory}", show_header=False, title_justify="left")
    shown.add_column(style="bold")
    shown.add_column(overflow="fold")
    verdicts, stored, full = content["verdicts"], content["stored_bytes"], content["full_bytes"]
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(content["checkpoints_by_kind"].items()))
    means = f"mean {content['checkpoint_ms_mean']} ms, frozen {content['frozen_ms_mean']} ms"
    rows = {
        "held-out reward": f"{_mean(content['reward_before'])} before training, "
        f"{_mean(content['reward_after'])} after {content['steps']} steps",
        "evaluated on": "; ".join(content["evaluated_on"]),
        "wall time": f"{content['wall_s']:.0f} s, engine {content['engine']}",
        "sandboxes": f"{content['concurrency']} at once",
        "machine": content["machine"],
        "of which": ", ".join(f"{seconds:.0f} s {part}" for part, seconds in content["wall_split_s"].items()),
        "turns with commands": f"{content['turns']}: "
        + ", ".join(f"{count} {kind}" for kind, count in verdicts.items()),
        "checkpoints": f"{content['checkpoints']} ({kinds}); {means}" if kinds else "none was taken",
        "bytes stored": f"{stored / 1e6:.1f} MB; a full dump every turn: {full / 1e6:.1f} MB"
        + (f" ({1 - stored / full:.1%} saved)" if full else ""),
        "hidden behind generation": f"checkpoint time: {_share(content['hidden_share'])}",
        "sandboxes killed": f"{content['killed']}, recovered equal: {content['recovered_equal']}",
        "trajectories": f"{content['trajectories']}, lost: {content['trajectories_lost']}",
    }
    for name, value in rows.items():
        shown.add_row(name, value)
    return shown


def _mean(value: float | None) -> str:
    """Of rewards, which need not lie between 0 and 1."""
    return "not measured" if value is None else f"{value:.3f}"


def _share(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1%}"
