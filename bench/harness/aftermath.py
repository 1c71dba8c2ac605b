"""Leaves nothing behind a bench, however it ends: no process, mount, control group or folder.

::

    front       what was started: passes signals on, ends as the bench does
      └ guardian  in a process group of its own, so that what kills the group of the others spares it; whatever the
          │       bench starts and leaves is given to it by the kernel (PR_SET_CHILD_SUBREAPER)
          └ bench

A bench that is asked to end (SIGINT, SIGTERM, SIGHUP) cleans up by itself. What is left then, or was left by one that
was killed, the guardian ends and removes: all that descends from the bench, and what the bench has noted.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from sandbox import procfs
from sandbox.container.cgroup import PARENT, SHIMS, hierarchy
from sandbox.descriptors import closing
from sandbox.libc import checked, library
from sandbox.termination import termination_signals

_DEATH_SIGNAL, _SUBREAPER = 1, 36  # prctl
TIMEOUT = 20.0  # seconds for what was killed to be gone
_notes: list[int] = []  # the descriptor of a file that the bench writes and the guardian reads


def note(**what: object) -> None:
    """Something that is removed behind the bench, if it is still there: `directory`, with all mounts in it; what
    `command`
    removes; or `host`, the directory of a :class:`BenchHost`, with its `run`, `module` and `environment`.
    """
    for descriptor in _notes:
        os.write(descriptor, json.dumps(what, default=str).encode() + b"\n")


def directory(prefix: str, where: str | None = None) -> Path:
    """A new folder, noted."""
    path = tempfile.mkdtemp(prefix=prefix, dir=where)
    note(directory=path)
    return Path(path)


class TemporaryDirectory(tempfile.TemporaryDirectory[str]):
    """One of :mod:`tempfile`, noted."""

    def __init__(self, prefix: str, where: str | Path | None = None) -> None:
        super().__init__(prefix=prefix, dir=where)
        note(directory=self.name)


def guard() -> None:
    """Split this process, which has no threads yet. Returns in the bench alone."""
    sys.stdout.flush()
    sys.stderr.flush()
    group, front = os.getpgrp(), os.getpid()
    ending = termination_signals()
    if guardian := os.fork():
        _pass_on(guardian, ending)
        os._exit(_ended(guardian))
    os.setpgid(0, 0)
    checked(library.prctl(_SUBREAPER, 1))
    notes = os.memfd_create("notes", os.MFD_CLOEXEC)
    me = os.getpid()
    if bench := os.fork():
        _pass_on(bench, ending)
        _die_with(front, signal.SIGTERM)
        code = _ended(bench)
        _clean(notes, reported=code < 128)
        os._exit(code)
    os.setpgid(0, group)
    _die_with(me, signal.SIGTERM)
    _notes.append(notes)
    for number in ending:
        if number != signal.SIGINT:
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """As Ctrl-C, also where SIGINT is ignored: the loop's own handler, where one runs, cancels its main task."""
    handler = signal.getsignal(signal.SIGINT)
    (handler if callable(handler) else signal.default_int_handler)(number, frame)


def _die_with(parent: int, number: int) -> None:
    """Get this signal when the parent is gone."""
    checked(library.prctl(_DEATH_SIGNAL, number))
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def _pass_on(child: int, ending: Sequence[int]) -> None:
    """What asks us to end asks the child. A terminal's Ctrl-C reaches the bench by itself."""

    def request(number: int, _: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in ending:
        signal.signal(number, request)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _ended(child: int) -> int:
    """Its exit code, or 128 and the signal; the ends of others are taken meanwhile."""
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


# ---------------------------------------------------------------------------- what is left


def _clean(notes: int, *, reported: bool) -> None:
    if reported and (left := _descendants()):
        names = ", ".join(f"{task.pid} {procfs.status(task.pid, 'Name')}" for task in left[:8])
        _say(f"the bench left {len(left)} processes, which are ended now: {names}")
    groups = _end_all()
    entries = [json.loads(line) for line in os.pread(notes, 1 << 24, 0).splitlines()]
    for entry in entries:
        if "host" in entry and Path(entry["host"]).exists():
            _clean_host(entry)
    groups |= _end_all()
    for entry in reversed(entries):
        if "directory" in entry:
            _remove(Path(entry["directory"]))
        if "command" in entry:
            subprocess.run(entry["command"], capture_output=True, check=False)
    if groups:
        _remove_groups(groups)


def _clean_host(entry: dict[str, Any]) -> None:
    from bench.harness.own_daemon import BenchHost

    host = BenchHost(Path(entry["host"]), None, entry["module"], Path(entry["run"]))
    host.environment = entry["environment"]
    try:
        host.clean()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # the rest is removed all the same
        _say(f"a daemon's directory could not be cleaned up in its own way: {error}")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _descendants() -> list[procfs.ProcessIdentity]:
    """All processes that the bench started and that live, by whom they descend from."""
    children: dict[int, list[procfs.ProcessIdentity]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (task := procfs.task_of(int(name))) is not None:
            children.setdefault(task.parent, []).append(task)
    result = children.get(os.getpid(), [])
    for task in result:
        result += children.get(task.pid, [])
    return result


def _end_all() -> set[str]:
    """Kill until none is left; the names of their sandboxes' control groups."""
    groups: set[str] = set()
    deadline = time.monotonic() + TIMEOUT
    while (left := _descendants()) and time.monotonic() < deadline:
        for task in left:
            with contextlib.suppress(OSError), closing(os.pidfd_open(task.pid)) as handle:
                result = _sandbox_groups(Path(f"/proc/{task.pid}/cgroup").read_text())
                if procfs.task_of(task.pid) == task:  # and nobody else's number by now
                    groups |= result
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)
    return groups


def _sandbox_groups(text: str) -> set[str]:
    """Of lines such as ``4:memory:/pagurus/s-1/x``: ``pagurus/s-1``."""
    parts = [line.split(":", 2)[2].split("/")[1:3] for line in text.splitlines()]
    return {"/".join(item) for item in parts if len(item) == 2 and item[0].startswith(PARENT) and item[1] != SHIMS}


def _remove(place: Path) -> None:
    """A folder, and what is mounted in it first."""
    for mount in reversed(list(procfs.mounts())):
        if Path(mount.point).is_relative_to(place):
            done = subprocess.run(["umount", "-q", mount.point], check=False)
            if done.returncode:
                subprocess.run(["umount", "-q", "--lazy", mount.point], check=False)
    shutil.rmtree(place, ignore_errors=True)


def _remove_groups(names: set[str]) -> None:
    """And what hosts had theirs in that have one of their own."""
    host = hierarchy()
    names = {top if (top := name.partition("/")[0]) != PARENT else name for name in names}
    for root in {host.unified, *host.v1.values()}:
        for name in names:
            for path in [*sorted((root / name).rglob("*/"), reverse=True), root / name]:
                with contextlib.suppress(OSError):
                    path.rmdir()
