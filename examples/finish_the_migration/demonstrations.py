"""Scripted episodes: what a policy is fitted to before it learns from its own.

Owns: the scripts, clean and sloppy. Does not own: the sandbox that answers them (a twin will do) and the fitting.
Guarantee: a demonstration is a pure function of its seed; each command of a clean one is right; a sloppy one errs in
*habits* (migrates before it looks, overlooks a fault, gives up at a lock, forgets to check) and never in *skills*
(which word to replace by which, what to do after which message).
"""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import dataclass

from rollout.environments.shell import immediate

from .environment import FinishTheMigration
from .scenario import Scenario, scenario
from .twin import Twin

ROUNDS = 4  # of migrating and mending; more than any scenario needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """Chances of what a demonstration does, where it may choose."""

    late: float = 0.25  # mends a loud fault only when the migration has complained; costs turns, not the reward
    skip_poll: float = 0.0  # migrates before it has looked
    overlook: float = 0.0  # leaves a silent fault as it is
    give_up: float = 0.0  # leaves at a lock or a complaint
    skip_check: float = 0.0  # leaves without having checked


CLEAN = Habits()
SLOPPY = Habits(skip_poll=0.3, overlook=0.3, give_up=0.3, skip_check=0.35)


def demonstrate(seed: int, *, sloppy: bool) -> list[tuple[str, bool]]:
    """One scripted episode, as it runs on the twin: its texts in order, True beside each that is an action.

    Example: ``[("want\\n1 bach\\n...$ ", False), ("cat steps/*", True), ("1 ash anvil\\n...$ ", False), ...]``.
    """
    environment, twin = FinishTheMigration(), Twin()
    texts = [(immediate(environment.reset(twin, seed)).text, False)]
    commands = script(scenario(seed), SLOPPY if sloppy else CLEAN, random.Random(f"demonstration {seed} {sloppy}"))
    command: str | None = next(commands)
    while command is not None:
        texts.append((command, True))
        observation = immediate(environment.step(twin, command))
        if observation.text:
            texts.append((observation.text, False))
        command = None if observation.done else commands.send(observation.text)
    return texts


def script(case: Scenario, habits: Habits, rng: random.Random) -> Generator[str, str, None]:
    """Yields commands, is sent what they printed; the last is `exit`."""
    to_mend = [at for at, fault in enumerate(case.faults) if fault is not None]
    shown = False  # the schema
    if rng.random() >= habits.skip_poll:
        yield "cat steps/*"
        late = {at for at in to_mend if case.faults[at] != "target" and rng.random() < habits.late}
        left = {at for at in to_mend if case.faults[at] == "target" and rng.random() < habits.overlook}
        for at in to_mend:
            if at in late or at in left:
                continue
            if case.faults[at] == "source" and not shown:
                shown = True
                yield "cat schema"
            yield case.repair(at)
    for _ in range(ROUNDS):
        said = yield "./migrate"
        complaint = said.splitlines()[-2] if said.count("\n") else ""
        if complaint.endswith("ok") or not complaint:
            break
        if rng.random() < habits.give_up:
            yield "exit"
            return
        if complaint != "locked":
            at = int(complaint[0]) - 1
            if case.faults[at] == "source" and not shown:
                shown = True
                yield "cat schema"
            yield case.repair(at)
        yield "rm lock"
    if rng.random() >= habits.skip_check:
        yield "./check"
    yield "exit"
