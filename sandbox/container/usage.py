"""What a sandbox uses: processor, memory, disks, its file tree.

Guarantee: a counter that this host does not have is None, never 0.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from sandbox.container.cgroup import parse_bytes
from sandbox.messages import Metrics
from sandbox.messages.processes import SandboxUsage
from sandbox.tree.extents import added_bytes

if TYPE_CHECKING:
    from sandbox.container.container import Container


def read(container: Container) -> Metrics:
    """The counters of a living sandbox. Blocks, about 1 ms."""
    group = container.cgroup
    limits = container.spec.limits
    if group.pure:
        memory, peak = _number(group.path / "memory.current"), _number(group.path / "memory.peak")
        io = fields(_text(group.path / "io.stat"))
        moved = (io.get("rbytes"), io.get("wbytes")) if (group.path / "io.stat").exists() else (None, None)
    else:
        v1 = group.v1.get("memory")
        memory = _number(v1 / "memory.usage_in_bytes") if v1 else None
        peak = _number(v1 / "memory.max_usage_in_bytes") if v1 else None
        moved = _of_tasks(container.tasks())
    return Metrics(
        cpu_seconds=group.cpu_usage_usec() / 1e6,
        processes=len(container.tasks()),
        memory_bytes=memory,
        memory_peak_bytes=peak,
        memory_limit_bytes=None if limits.memory is None else parse_bytes(limits.memory),
        read_bytes=moved[0],
        written_bytes=moved[1],
        disk_bytes=added_bytes(container.tree, None),
        disk_limit_bytes=None if limits.disk is None else parse_bytes(limits.disk),
        oom_kills=group.oom_kills(),
    )


def read_briefly(sandbox: str, container: Container) -> SandboxUsage | None:
    """What changes from moment to moment, of a sandbox among many; None: it has just ended. Blocks, for two files."""
    group = container.cgroup
    v1 = group.v1.get("memory")
    memory = group.path / "memory.current" if group.pure else None if v1 is None else v1 / "memory.usage_in_bytes"
    try:
        cpu = group.cpu_usage_usec() / 1e6
    except OSError:
        return None
    return SandboxUsage(sandbox=sandbox, cpu_seconds=cpu, memory_bytes=None if memory is None else _number(memory))


def fields(text: str) -> dict[str, int]:
    """Sums of ``name=number`` over all lines of an ``io.stat``.

    >>> fields("8:0 rbytes=5 wbytes=1\\n8:16 rbytes=2 wbytes=0\\n")
    {'rbytes': 7, 'wbytes': 1}
    """
    result: dict[str, int] = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if equals and value.isdigit():
            result[name] = result.get(name, 0) + int(value)
    return result


def _of_tasks(pids: list[int]) -> tuple[int | None, int | None]:
    """By the processes that live now: what v1 hosts without a blkio group of ours know."""
    read = written = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            numbers = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
            read += int(numbers["read_bytes"])
            written += int(numbers["write_bytes"])
    return read, written


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None
