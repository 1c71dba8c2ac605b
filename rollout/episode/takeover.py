"""What a successor does with the journal of a trajectory before it continues.

Guarantee: after `rewind` the sandbox and the environment are where the last entry was written; each turn that was
executed again has said what the agent has read.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollout.environments.base import Environment
from rollout.episode.guard import GuardedSandbox, ReplayDivergence
from rollout.episode.parts import observed
from rollout.messages import Trajectory
from rollout.store.journal import TurnEntry
from rollout.store.retained import Visit
from sandbox.errors import RestoreFailed


def recall(trajectory: Trajectory, since: Sequence[TurnEntry]) -> None:
    """Tokens, turns and sums, as the last entry has them."""
    last = since[-1]
    for entry in since:
        trajectory.append(entry.at, entry.tokens, entry.mask, entry.logprobs, entry.versions, entry.experts)
        for record in entry.records:
            trajectory.turns[record.index :] = [record]
    trajectory.opening, trajectory.breaks, trajectory.lineage = last.opening, list(last.breaks), list(last.lineage)
    trajectory.base = last.base
    trajectory.reward, trajectory.injected, trajectory.continued = last.reward, last.injected, last.continued + 1


def visits(since: Sequence[TurnEntry]) -> list[Visit]:
    """The states before the turns of a journal, as far as they can be visited."""
    return [
        Visit(
            turn=entry.turn,
            at=entry.at + len(entry.tokens) - entry.records[-1].tokens,
            checkpoint=entry.checkpoint,
            state=entry.state,
            reward=entry.reward,
            own_s=entry.own_s,
        )
        for entry in since
        if entry.checkpoint is not None and entry.state is not None
    ]


async def rewind(env: Environment, guarded: GuardedSandbox, trajectory: Trajectory, since: Sequence[TurnEntry]) -> None:
    """The sandbox is dead, or its state is unknown: back to a checkpoint, and forward to the last turn."""
    existing = [n for n, entry in enumerate(since) if entry.checkpoint is not None and entry.state is not None]
    if not existing:
        raise RestoreFailed(
            "no turn of its journal has a captured checkpoint",
            sandbox=guarded.id,
            hint="nothing to do: the trajectory is played again",
        )
    first = since[existing[-1]]
    assert first.checkpoint is not None and first.state is not None
    await guarded.back(first.checkpoint)
    env.load(first.state)
    for entry in since[existing[-1] : -1]:
        guarded.begin_turn(entry.turn)
        observation = await observed(env.step(guarded, entry.action), "step")
        before = trajectory.turns[entry.turn].observation
        if observation.text != before:
            raise ReplayDivergence(
                f"executed again, turn {entry.turn} said {observation.text!r:.80}, not {before!r:.80}"
            )
        guarded.recoveries[-1].replayed += 1
    guarded.begin_turn(since[-1].turn)
