"""What the inspector adds to single system calls, in nanoseconds of processor time.

::

    pagurus bench hooks [--json] [--rounds N] [--folder DIRECTORY] [--object FILE]

Each round measures nine calls four times: without an inspector, loaded while no sandbox is watched (`idle`), attached
while the caller is in no watched group (`outside`), and in a watched one. `added` is the median over rounds of the
difference; `programs` is what the kernel accounts for each BPF program meanwhile (kernel.bpf_stats_enabled, whose own
clock is in it), of all tasks of the host. Processor time bears other load better than wall time does, but not for
nothing: compare figures of one run, and let no other daemon run meanwhile, whose inspector would be in `detached`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.harness import aftermath, command
from ebpf.inspector import Inspector
from sandbox.container.cgroup import hierarchy
from sandbox.errors import Unsupported

_STATISTICS = Path("/proc/sys/kernel/bpf_stats_enabled")


def build(directory: Path) -> Path:
    """The program that makes the calls."""
    if shutil.which("cc") is None:
        raise Unsupported("no C compiler", hint="install gcc and libc6-dev")
    program = directory / "calls"
    source = Path(__file__).with_name("native") / "calls.c"
    subprocess.run(["cc", "-O2", "-o", str(program), str(source)], check=True)
    return program


def measure(program: Path, directory: Path, group: Path | None) -> dict[str, float]:
    """Nanoseconds per call, by name; in a control group."""

    def join() -> None:
        os.setpriority(os.PRIO_PROCESS, 0, -15)
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    done = subprocess.run(
        [str(program), str(directory)], capture_output=True, text=True, check=True, preexec_fn=join, timeout=300
    )
    return {name: float(value) for name, value in (line.split() for line in done.stdout.splitlines())}


@contextlib.contextmanager
def accounted() -> Iterator[dict[str, dict[str, float]]]:
    """Fills the yielded table with runs and ns per run of the programs that are loaded now, when it ends."""
    before = _programs()
    result: dict[str, dict[str, float]] = {}
    _STATISTICS.write_text("1")
    try:
        yield result
    finally:
        _STATISTICS.write_text("0")
        for identity, (name, runs, taken) in _programs().items():
            _, runs_before, taken_before = before.get(identity, (name, 0, 0))
            if identity in before and runs > runs_before:
                ran = runs - runs_before
                result[name] = {"runs": ran, "ns": round((taken - taken_before) / ran, 1)}


def _programs() -> dict[int, tuple[str, int, int]]:
    if shutil.which("bpftool") is None:
        return {}
    done = subprocess.run(["bpftool", "-j", "prog", "list"], capture_output=True, text=True, check=True)
    return {
        one["id"]: (one["name"], one.get("run_cnt", 0), one.get("run_time_ns", 0))
        for one in json.loads(done.stdout)
        if one.get("name", "").startswith("on_")
    }


def run(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    program = build(directory)
    group = hierarchy().unified / f"bench-hooks-{os.getpid()}"
    group.mkdir()
    taken: dict[str, list[dict[str, float]]] = {"detached": [], "idle": [], "outside": [], "watched": []}
    programs: dict[str, dict[str, float]] = {}
    try:
        for _ in range(options.rounds):
            taken["detached"].append(measure(program, options.directory or directory, None))
            with Inspector.load(path=options.object) as inspector:
                taken["idle"].append(measure(program, options.directory or directory, None))
                inspector.watch(group.stat().st_ino, contained=False)
                taken["outside"].append(measure(program, options.directory or directory, None))
                taken["watched"].append(measure(program, options.directory or directory, group))
        with Inspector.load(path=options.object) as inspector:
            inspector.watch(group.stat().st_ino, contained=False)
            with accounted() as programs:
                measure(program, options.directory or directory, group)
    finally:
        group.rmdir()
    names = list(taken["detached"][0])
    added = {
        where: {
            name: round(
                statistics.median(
                    one[name] - other[name] for one, other in zip(taken[where], taken["detached"], strict=True)
                ),
                1,
            )
            for name in names
        }
        for where in ("idle", "outside", "watched")
    }
    return {
        "rounds": options.rounds,
        "detached_ns": {name: round(statistics.median(one[name] for one in taken["detached"]), 1) for name in names},
        "added_idle_ns": added["idle"],
        "added_outside_ns": added["outside"],
        "added_watched_ns": added["watched"],
        "programs": dict(sorted(programs.items(), key=lambda item: -item[1]["runs"] * item[1]["ns"])),
        "load": round(os.getloadavg()[0], 2),
    }


def main(arguments: list[str]) -> int:
    """Exit code 0 when it could be measured."""
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where the files of the calls lie (default: a temporary one)")
    parser.add_argument("--object", type=Path, help="another build of the inspector, of the same layout")
    options = parser.parse_args(arguments)
    with aftermath.TemporaryDirectory("pagurus-hooks-") as directory:
        result = run(options, Path(directory))
    command.show(result, options)
    return 0
