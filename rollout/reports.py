"""What the trajectories of a run did to the operating system, by rules: ``pagurus rollouts effects``."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from rollout.decide.effects import EffectRules, Evidence, evidence
from rollout.plan import NAME, read_plan
from rollout.store.samples import SampleStore
from sandbox.errors import Invalid, NotFound


class TrajectoryEvidence(msgspec.Struct, kw_only=True):
    """One trajectory with evidence."""

    prompt: str
    member: int
    reward: float
    then: str  # what followed: mask, penalty, or nothing
    evidence: list[Evidence]

    def by_kind(self) -> dict[str, list[Evidence]]:
        result: dict[str, list[Evidence]] = {}
        for item in self.evidence:
            result.setdefault(item.kind, []).append(item)
        return result


class EvidenceKind(msgspec.Struct, kw_only=True):
    """All trajectories with one kind of evidence."""

    trajectories: int
    reward: float  # mean
    others: float  # mean of those without; nan where there are none


class EvidenceReport(msgspec.Struct, kw_only=True):
    played: int
    kinds: dict[str, EvidenceKind]
    trajectories: list[TrajectoryEvidence]


def rules(run: Path, file: Path | None) -> EffectRules | None:
    """Those of a TOML file, else the run's own."""
    if file is None:
        return read_plan(run).config.effects if (run / NAME).exists() else None
    try:
        return msgspec.convert(tomllib.loads(file.read_text()).get("effects", {}), EffectRules)
    except FileNotFoundError:
        raise NotFound(f"no file {file}", hint="a TOML file with a table [effects]") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise Invalid(f"{file}: {error}", hint="see docs/rollout.md, effects as evidence") from None


def effects_of(directory: Path, existing: EffectRules) -> EvidenceReport:
    """Of all finished trajectories. `directory`: of the rollout."""
    store = SampleStore(directory, create=False)
    rewards: dict[tuple[str, int], float] = {}
    observed: list[TrajectoryEvidence] = []
    try:
        for prompt, member, _, reward in store.samples():
            trajectory = store.sample(prompt, member)
            rewards[prompt, member] = reward
            if result := evidence(trajectory, existing):
                then = "masked" if trajectory.masked else f"-{trajectory.penalty:g}" if trajectory.penalty else ""
                observed.append(
                    TrajectoryEvidence(prompt=prompt, member=member, reward=reward, then=then, evidence=result)
                )
    finally:
        store.close()
    kinds = sorted({item.kind for one in observed for item in one.evidence})
    return EvidenceReport(
        played=len(rewards), kinds={kind: _sums(kind, observed, rewards) for kind in kinds}, trajectories=observed
    )


def _sums(kind: str, observed: list[TrajectoryEvidence], rewards: dict[tuple[str, int], float]) -> EvidenceKind:
    with_it = {(one.prompt, one.member) for one in observed if kind in one.by_kind()}
    inside = [reward for name, reward in rewards.items() if name in with_it]
    outside = [reward for name, reward in rewards.items() if name not in with_it]
    return EvidenceKind(trajectories=len(inside), reward=_mean(inside), others=_mean(outside))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
