"""A host as a whole, of several on one machine: its control groups, and the loss of all that it is."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Protocol

from bench.harness.own_daemon import shims
from sandbox.container.cgroup import PARENT, hierarchy

GROUPS = "PAGURUS_CGROUP"


class Host(Protocol):
    """A daemon whose sandboxes have control groups of their own."""

    run: Path
    environment: dict[str, str]

    def kill(self) -> None: ...


def group(host: Host, sandbox: str) -> Path:
    return hierarchy().unified / host.environment.get(GROUPS, PARENT) / sandbox


def lose(host: Host) -> None:
    """Ends its daemon, what watches its lease, its sandboxes and their shims. Blocks."""
    doomed = shims(host.run)
    host.kill()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                inside = f"/{host.environment[GROUPS]}/" in (entry / "cgroup").read_text()
                command = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if inside or ("daemon.fence" in command and str(host.run) in command):
                    doomed.append(int(entry.name))
    for pid in doomed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def remove_groups(host: Host) -> None:
    """What a host leaves of control groups when it is cleaned up."""
    for root in {hierarchy().unified, *hierarchy().v1.values()}:
        top = root / host.environment[GROUPS]
        for path in sorted(top.rglob("*"), reverse=True) if top.is_dir() else []:
            if path.is_dir():
                with contextlib.suppress(OSError):
                    path.rmdir()
        with contextlib.suppress(OSError):
            top.rmdir()
