"""What a successor does with the journal of a trajectory before it goes on.

Owns: putting the trajectory together again, the way back to a captured state and forward to the last turn. Does not
own: the action that comes then (rollout.episode.turns), the rows (rollout.store.journal).
Guarantee: after `rewind` the sandbox and the environment are where the last entry was written; each turn that was
executed again has said what the agent has read.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollout.environments.base import Environment
from rollout.episode.guard import Diverged, GuardedSandbox
from rollout.messages import Trajectory
from rollout.store.journal import TurnEntry
from sandbox.errors import RestoreFailed


def recall(trajectory: Trajectory, since: Sequence[TurnEntry]) -> None:
    """Tokens, turns and sums, as the last entry has them."""
    last = since[-1]
    for entry in since:
        trajectory.append(entry.at, entry.tokens, entry.mask, entry.logprobs, entry.versions)
        for record in entry.records:
            trajectory.turns[record.index :] = [record]
    trajectory.opening, trajectory.breaks = last.opening, list(last.breaks)
    trajectory.reward, trajectory.struck, trajectory.continued = last.reward, last.struck, last.continued + 1


async def rewind(env: Environment, guarded: GuardedSandbox, trajectory: Trajectory, since: Sequence[TurnEntry]) -> None:
    """The sandbox is dead, or nobody knows its state: back to a checkpoint, and forward to the last turn."""
    known = [n for n, entry in enumerate(since) if entry.checkpoint is not None and entry.state is not None]
    if not known:
        raise RestoreFailed("no turn of its journal has a captured checkpoint", sandbox=guarded.id)
    first = since[known[-1]]
    assert first.checkpoint is not None and first.state is not None
    await guarded.back(first.checkpoint)
    env.load(first.state)
    for entry in since[known[-1] : -1]:
        guarded.begin_turn(entry.turn)
        observation = await env.step(guarded, entry.action)
        seen = trajectory.turns[entry.turn].observation
        if observation.text != seen:
            raise Diverged(f"executed again, turn {entry.turn} said {observation.text!r:.80}, not {seen!r:.80}")
        guarded.recoveries[-1].replayed += 1
    guarded.begin_turn(since[-1].turn)
