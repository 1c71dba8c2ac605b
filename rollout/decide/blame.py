"""Whose doing a failure was, and what follows from it. Pure.

Guarantee: every pair of phase and cause has one answer; nothing is decided by the words of a message.

================  ===========================================================  =====================================
blame             examples                                                     what follows
================  ===========================================================  =====================================
policy            its command killed the sandbox, hit a limit of the sandbox,   the trajectory is scored, and stays
                  could not be executed; its time or its tokens were used up    in its group
environment       ``reset`` or ``step`` raised; an observation                  counted against the prompt, which is
                  that the engine cannot take                                   given up after `attempts` of them
platform          no sandbox, a dead engine, a restore that failed, a daemon    the trajectory is played again, its
                  that does not answer, a reward function that failed           clock is stopped for that
================  ===========================================================  =====================================
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class EpisodePhase(StrEnum):
    """What a trajectory is doing. Only `step` runs on the trajectory's own clock."""

    CREATE = "create"
    RESET = "reset"
    GENERATE = "generate"
    STEP = "step"
    SCORE = "score"
    CHECKPOINT = "checkpoint"  # the wait for the last turn's capture, before a command
    RECOVER = "recover"  # a restore, and what is executed again after it


class Blame(StrEnum):
    POLICY = "policy"
    ENVIRONMENT = "environment"
    PLATFORM = "platform"


class Cause(StrEnum):
    """What went wrong. Closed: each error of `sandbox.errors` leads to one of these."""

    RAISED = "raised"  # the environment's code raised
    LATE = "late"  # the phase took longer than its limit
    CUT = "cut"  # the action reached the token limit before it was complete
    LENGTH = "length"  # the trajectory holds as many tokens as it may
    TURNS = "turns"  # as many turns as there may be
    KILLED_ITSELF = "killed_itself"  # one command killed the sandbox each time, from an equal state
    QUOTA = "quota"  # a limit of the sandbox: its processes, its memory, its disk
    NONSENSE = "nonsense"  # a command that cannot be executed at all
    REFUSED = "refused"  # the host or the engine does not do it
    DIED = "died"  # the sandbox is dead and could not be brought back
    DIVERGED = "diverged"  # executed again after a restore, a command said something else than before
    ENGINE = "engine"  # the engine died or answered nonsense
    SCORER = "scorer"  # the process of the reward function hung or died, again and again
    HOST = "host"  # the daemon is gone, breaks the protocol, or has no room


class TrajectoryFailure(msgspec.Struct, frozen=True, kw_only=True):
    """One failure of one trajectory. `message` is for people."""

    phase: EpisodePhase
    cause: Cause
    message: str = ""

    def __str__(self) -> str:
        return f"{self.phase}/{self.cause}: {self.message}" if self.message else f"{self.phase}/{self.cause}"


_POLICY = (Cause.CUT, Cause.LENGTH, Cause.TURNS, Cause.KILLED_ITSELF, Cause.QUOTA, Cause.NONSENSE)


def blame(failure: TrajectoryFailure) -> Blame:
    """The table. Example: ``blame(TrajectoryFailure(phase=Phase.CREATE, cause=Cause.LATE)) is Blame.PLATFORM``."""
    phase, cause = failure.phase, failure.cause
    if phase is EpisodePhase.RESET and cause is Cause.LENGTH:
        return Blame.ENVIRONMENT  # its prompt leaves no room for an answer
    if cause in (Cause.CUT, Cause.LENGTH, Cause.TURNS):
        return Blame.POLICY
    if phase is EpisodePhase.STEP and (cause in _POLICY or cause is Cause.LATE):
        return Blame.POLICY
    if cause is Cause.RAISED:
        return Blame.ENVIRONMENT
    if phase is EpisodePhase.RESET and (cause in _POLICY or cause is Cause.LATE):
        return Blame.ENVIRONMENT  # its own commands did it, not the policy's
    if phase is EpisodePhase.GENERATE and cause is Cause.NONSENSE:
        return Blame.ENVIRONMENT  # the engine cannot take these tokens, and never will
    return Blame.PLATFORM


# Codes of `sandbox.errors`, in a phase in which a command is executed. `own`: the error names the sandbox, so that it
# is about its own limits; the same error without a sandbox is the host's.
_COMMAND: dict[tuple[str, bool], Cause] = {
    ("invalid", True): Cause.NONSENSE,
    ("invalid", False): Cause.NONSENSE,
    ("unsupported", True): Cause.RAISED,  # it requested what will never be there
    ("unsupported", False): Cause.RAISED,
    ("command_not_found", True): Cause.NONSENSE,
    ("command_not_found", False): Cause.NONSENSE,
    ("no_space", True): Cause.QUOTA,
    ("conflict", True): Cause.QUOTA,
    ("restore_failed", True): Cause.DIED,
    ("restore_failed", False): Cause.DIED,
    ("not_equal", True): Cause.DIED,
    ("not_equal", False): Cause.DIED,
    ("sandbox_dead", True): Cause.DIED,
    ("sandbox_dead", False): Cause.DIED,
}


def cause_of(code: str, phase: EpisodePhase, *, own: bool) -> Cause:
    """The cause behind an error code of `sandbox.errors` in a phase. Example: ``cause_of("no_space", Phase.CREATE,
    own=False) is Cause.REFUSED``."""
    if phase is EpisodePhase.CREATE:
        return Cause.LATE if code == "timeout" else Cause.REFUSED
    if phase is EpisodePhase.GENERATE:
        return Cause.NONSENSE if code == "invalid" else Cause.ENGINE
    if phase in (EpisodePhase.CHECKPOINT, EpisodePhase.RECOVER):
        return Cause.HOST if code not in ("restore_failed", "not_equal", "sandbox_dead") else Cause.DIED
    if code == "engine_failed":
        return Cause.ENGINE
    return _COMMAND.get((code, own), Cause.HOST)


PART = {  # which part of the platform a failure speaks of; a breaker watches each
    Cause.REFUSED: "create",
    Cause.ENGINE: "engine",
    Cause.SCORER: "scorer",
    Cause.HOST: "host",
    Cause.DIED: "host",
    Cause.DIVERGED: "host",
}


def part(failure: TrajectoryFailure) -> str:
    """The part of the platform that failed: create, engine, scorer or host."""
    if failure.phase is EpisodePhase.CREATE:
        return "create"
    return "engine" if failure.phase is EpisodePhase.GENERATE else PART.get(failure.cause, "host")
