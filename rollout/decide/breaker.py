"""When a part of the platform refuses: how long to pause, when to try with one only, when to stop. Pure.

Guarantee: a part that refuses everything is called at most once per pause, however many trajectories wait for it; the
pause doubles up to `MAX_PAUSE`; after `OPEN_AT` rounds the breaker is open and one trajectory at a time tries. No
prompt pays for it. The first success closes it.
"""

from __future__ import annotations

from rollout.decide.view import PartView, WaitReason

PAUSE_FIRST = 0.25  # seconds
MAX_PAUSE = 15.0
OPEN_AT = 3  # rounds


def note(existing: PartView | None, part: str, reason: str, now: float) -> PartView:
    """A failure of the part. Failures within one pause are one round: they began before it was known."""
    if existing is None:
        return PartView(part, 1, now, now, reason)
    if now < retry_at(existing):
        return PartView(part, existing.rounds, existing.since, existing.last, reason)
    return PartView(part, existing.rounds + 1, existing.since, now, reason)


def retry_at(existing: PartView) -> float:
    """When it may be tried again."""
    return existing.last + min(MAX_PAUSE, PAUSE_FIRST * 2.0 ** (existing.rounds - 1))


def is_open(existing: PartView) -> bool:
    return existing.rounds >= OPEN_AT


def slots(parts: list[PartView], *, free: int, trying: int, now: float) -> int:
    """How many trajectories may start now, with `trying` that have not sampled a token yet."""
    if any(now < retry_at(existing) for existing in parts):
        return 0
    if any(is_open(existing) for existing in parts):
        return 0 if trying else min(free, 1)
    return free


def waits(parts: list[PartView], now: float) -> list[WaitReason]:
    """Until its pause is over; after that, until the probe has succeeded or failed."""
    return [
        WaitReason(
            "rollout", f"{existing.part} refuses: {existing.reason}", existing.since, again if again > now else None
        )
        for existing in parts
        for again in [retry_at(existing)]
    ]


def hopeless(parts: list[PartView], *, timeout: float, now: float) -> PartView | None:
    """The part that has refused for too long."""
    return next((existing for existing in parts if is_open(existing) and now - existing.since > timeout), None)
