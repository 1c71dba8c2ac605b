"""The embedded engine's requests as the view that decides what users leave to rollouts. Pure.

Guarantee: a request of priority 0 is a user's; all others get what users leave.
"""

from __future__ import annotations

from rollout.decide.engines.colocation import Colocation
from rollout.decide.engines.headroom import EngineView, HeadroomStep, WaitingRequest
from rollout.engine.embedded.scheduler import Scheduler, Sequence


def share(colocation: Colocation, scheduler: Scheduler, now: float) -> HeadroomStep:
    """How much the next step does."""
    running, users = scheduler.running, scheduler.users
    waiting = [item for item in scheduler.waiting if not item.colocated]
    unread = [item for item in [*running[:users], *waiting] if not item.ready]
    colocated = running[users:]
    view = EngineView(
        waiting=[WaitingRequest(item.since, _left(item)) for item in unread],
        last_tokens=[item.since for item in running[:users] if item.ready],
        rollouts=sum(item.ready for item in colocated),
        rollout_prompt=sum(_left(item) for item in colocated if not item.ready),
        free=scheduler.capacity(waiting),  # requests, of which each needs a row and its tokens
        target=len(waiting),
        held=len(colocated),
        frozen=colocation.frozen,
    )
    return colocation.step(view, now)


def _left(sequence: Sequence) -> int:
    return len(sequence.tokens) - sequence.computed
