"""Ignore rules: which paths and processes of a sandbox make no checkpoint by themselves.

Scope: a rule ignores *being changed* (a path) and *having lived on* (a process). What an ignored process does to
files, IPC objects, pipes, sockets or other processes counts; so does an ignored process that ended, since it is
impossible to find out who it was. Whatever cannot be identified for certain is not ignored.

Guarantee: a path is matched as it lies in the tree, never as a program wrote it: symbolic links are not followed, so
none can lead into an ignored directory.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from sandbox.errors import Invalid
from sandbox.messages import Effects
from sandbox.messages.ignore import IgnoreRules

MAX_RULES = 64
MAX_PATTERN = 512  # bytes
MAX_NAME = 14  # bytes: the kernel keeps 15 of a process name, so that one of 15 may have been longer


@dataclass(frozen=True)
class RunningTask:
    """A task that lives in a sandbox. `program` is "" where it could not be found out."""

    name: str
    new: bool
    ran: bool
    program: str = ""
    spoke: bool = False  # wrote to a pipe or socket that another process may hold


@dataclass(frozen=True)
class IgnoreRuleSet:
    """Rules that were checked."""

    patterns: tuple[tuple[str, ...], ...] = ()
    names: frozenset[str] = frozenset()
    programs: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.patterns or self.names or self.programs)

    def path(self, path: str) -> bool:
        """Whether a change of this path, or of anything below it, is ignored. Absolute, as it lies in the tree."""
        parts = tuple(path.strip("/").split("/"))
        return any(_matches(pattern, parts) for pattern in self.patterns)

    def process(self, task: RunningTask) -> bool:
        """Whether it is ignored that this task lives on."""
        return task.name in self.names or (task.program in self.programs and bool(task.program))


NOTHING = IgnoreRuleSet()


@functools.lru_cache(maxsize=256)
def _checked(paths: tuple[str, ...], processes: tuple[str, ...]) -> IgnoreRuleSet:
    if len(paths) + len(processes) > MAX_RULES:
        raise Invalid(f"{len(paths) + len(processes)} ignore rules are too many", hint=f"use at most {MAX_RULES}")
    programs = frozenset(rule for rule in processes if rule.startswith("/"))
    for name in processes:
        if not name or (not name.startswith("/") and len(name.encode()) > MAX_NAME):
            raise Invalid(
                f"{name!r} names no process for certain",
                hint=f"use a name of at most {MAX_NAME} bytes, or the absolute path of its program",
            )
    return IgnoreRuleSet(tuple(_pattern(path) for path in paths), frozenset(processes) - programs, programs)


def checked(rules: IgnoreRules | None) -> IgnoreRuleSet:
    """The rules, ready for use. Raises Invalid, naming the rule that cannot be."""
    return NOTHING if rules is None else _checked(tuple(rules.paths), tuple(rules.processes))


def _pattern(text: str) -> tuple[str, ...]:
    parts = tuple(text.strip("/").split("/"))
    if not (text.startswith(("/", "**/"))) or len(text.encode()) > MAX_PATTERN:
        raise Invalid(f"{text[:80]!r} is no path pattern", hint="begin it with / or **/, and keep it short")
    if any(part in ("", ".", "..") for part in parts) or all(set(part) == {"*"} for part in parts):
        raise Invalid(f"{text!r} would ignore everything, or nothing", hint="name at least one directory or file")
    return parts[:-1] if parts[-1] == "**" else parts


@functools.lru_cache(maxsize=1024)
def _component(pattern: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(pattern))


def _matches(pattern: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    """Whether the pattern is the path, or a directory above it. Takes time of the product of their lengths."""
    alive = {0}
    for part in parts:
        alive = _past(pattern, alive)
        if len(pattern) in alive:
            return True  # a directory above
        following = {at for at in alive if at < len(pattern) and pattern[at] == "**"}
        following |= {at + 1 for at in alive if at < len(pattern) and pattern[at] != "**" and _fits(pattern[at], part)}
        alive = following
    return len(pattern) in _past(pattern, alive)


def _past(pattern: tuple[str, ...], alive: Iterable[int]) -> set[int]:
    """Also the places behind `**`, which may stand for no directory at all."""
    result = set(alive)
    for at in sorted(result):
        while at < len(pattern) and pattern[at] == "**":
            at += 1
            result.add(at)
    return result


def _fits(pattern: str, part: str) -> bool:
    return _component(pattern).match(part) is not None


def without(effects: Effects, tasks: Iterable[RunningTask], rules: IgnoreRuleSet) -> Effects:
    """The effects but for processes that are ignored. `tasks` are all that live, as many as the effects count."""
    observed = list(tasks)
    if len(observed) != effects.survivors:
        return effects  # one was born or ended since: count them all
    left = [task for task in observed if not rules.process(task)]
    if len(left) == len(observed):
        return effects
    return msgspec.structs.replace(
        effects,
        ignored=len(observed) - len(left),
        survivors=len(left),
        survivors_new=sum(task.new for task in left),
        survivors_ran=sum(task.ran and not task.new for task in left),
        channels=effects.channels + sum(task.spoke for task in observed if rules.process(task)),
    )
