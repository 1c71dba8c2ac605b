"""The embedded engine's requests as the view that decides what users leave to rollouts. Pure.

Owns: the view. Does not own: deciding (rollout.decide.engines.lending), rows and batches (scheduler), tensors.
Guarantee: a request of priority 0 is a user's; all others get what users leave.
"""

from __future__ import annotations

from rollout.decide.engines.lending import Lending
from rollout.decide.engines.slack import EngineView, SlackStep, WaitingRequest
from rollout.engine.embedded.scheduler import Scheduler, Sequence


def share(lending: Lending, scheduler: Scheduler, now: float) -> SlackStep:
    """How much the next step does."""
    running, users = scheduler.running, scheduler.users
    waiting = [each for each in scheduler.waiting if not each.lent]
    unread = [each for each in [*running[:users], *waiting] if not each.ready]
    lent = running[users:]
    view = EngineView(
        waiting=[WaitingRequest(each.since, _left(each)) for each in unread],
        last_tokens=[each.since for each in running[:users] if each.ready],
        rollouts=sum(each.ready for each in lent),
        rollout_prompt=sum(_left(each) for each in lent if not each.ready),
        free=scheduler.room(waiting),  # requests, of which each needs a row and its tokens
        wanted=len(waiting),
        held=len(lent),
        frozen=lending.frozen,
    )
    return lending.step(view, now)


def _left(sequence: Sequence) -> int:
    return len(sequence.tokens) - sequence.computed
