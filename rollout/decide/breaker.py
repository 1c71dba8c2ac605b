"""When a part of the platform refuses: how long to pause, when to try with one only, when to stop. Pure.

Guarantee: a part that refuses everything is asked at most once per pause, however many trajectories wait for it; the
pause doubles up to `MAX_PAUSE`; after `OPEN_AT` rounds the breaker is open and one trajectory at a time tries. No
prompt pays for it. The first success closes it.
"""

from __future__ import annotations

from rollout.decide.view import PartView, WaitReason

PAUSE_FIRST = 0.25  # seconds
MAX_PAUSE = 15.0
OPEN_AT = 3  # rounds


def note(known: PartView | None, part: str, reason: str, now: float) -> PartView:
    """A failure of the part. Failures within one pause are one round: they began before it was known."""
    if known is None:
        return PartView(part, 1, now, now, reason)
    if now < retry_at(known):
        return PartView(part, known.rounds, known.since, known.last, reason)
    return PartView(part, known.rounds + 1, known.since, now, reason)


def retry_at(known: PartView) -> float:
    """When it may be tried again."""
    return known.last + min(MAX_PAUSE, PAUSE_FIRST * 2.0 ** (known.rounds - 1))


def is_open(known: PartView) -> bool:
    return known.rounds >= OPEN_AT


def slots(parts: list[PartView], *, free: int, trying: int, now: float) -> int:
    """How many trajectories may start now, with `trying` that have not sampled a token yet."""
    if any(now < retry_at(known) for known in parts):
        return 0
    if any(is_open(known) for known in parts):
        return 0 if trying else min(free, 1)
    return free


def waits(parts: list[PartView], now: float) -> list[WaitReason]:
    """Until its pause is over; after that, until whoever tries has succeeded or failed."""
    return [
        WaitReason("rollout", f"{known.part} refuses: {known.reason}", known.since, again if again > now else None)
        for known in parts
        for again in [retry_at(known)]
    ]


def hopeless(parts: list[PartView], *, patience: float, now: float) -> PartView | None:
    """The part that has refused for too long."""
    return next((known for known in parts if is_open(known) and now - known.since > patience), None)
