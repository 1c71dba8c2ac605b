"""Scripted episodes: what a policy is fitted to before it learns from its own.

Owns: the scripts, clean and sloppy. Does not own: the sandbox that answers them (a twin will do) and the fitting.
Guarantee: a demonstration is a pure function of its seed; each command of a clean one is right; a sloppy one
errs in *habits* (skips the look, starts before the repair, forgets `&`, forgets to check) and never in *skills*
(which value to replace by which), because reinforcement sharpens what a policy already can and adds nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from rollout.environments.shell import immediate

from .environment import FixTheService
from .scenario import Scenario, scenario
from .twin import Twin


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """Chance of each slip in a demonstration."""

    skip_poll: float = 0.0  # starts at once, without having looked
    skip_repair: float = 0.0  # looks, then starts without a repair
    foreground: float = 0.0  # forgets `&`
    skip_check: float = 0.0  # leaves without asking the service


CLEAN = Habits()
SLOPPY = Habits(skip_poll=0.3, skip_repair=0.25, foreground=0.35, skip_check=0.35)


def demonstrate(seed: int, *, sloppy: bool) -> list[tuple[str, bool]]:
    """One scripted episode, as it runs on the twin: its texts in order, True beside each that is an action.

    Example: ``[("want\\nport 8103\\n...$ ", False), ("cat app.conf", True), ("port 9101\\n...$ ", False), ...]``.
    """
    environment, twin = FixTheService(), Twin()
    texts = [(immediate(environment.reset(twin, seed)).text, False)]
    for command in script(seed, sloppy=sloppy):
        texts.append((command, True))
        observation = immediate(environment.step(twin, command))
        if observation.text:
            texts.append((observation.text, False))
    return texts


def script(seed: int, *, sloppy: bool) -> Iterator[str]:
    """The commands of one scripted episode for the scenario of this seed, the last of them `exit`."""
    return _script(scenario(seed), SLOPPY if sloppy else CLEAN, random.Random(f"demonstration {seed} {sloppy}"))


def _script(case: Scenario, habits: Habits, rng: random.Random) -> Iterator[str]:
    if rng.random() >= habits.skip_poll:
        yield "cat app.conf"
        if case.breakage == "missing":  # the configuration shows nothing wrong: look further
            yield "ls data"
        if rng.random() >= habits.skip_repair:
            yield case.repair
    start = "./serve" + rng.choice((" >log 2>&1", " >/dev/null 2>&1"))
    yield start if rng.random() < habits.foreground else start + " &"
    if rng.random() >= habits.skip_check:
        yield f"./ask {case.port}"
    yield "exit"
