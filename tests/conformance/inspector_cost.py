"""What the attached inspector costs a workload of many system calls: untar, git, pip install, compile.

One round runs every step twice, right after one another: with the inspector loaded, attached and watching the
step's control group, and with none loaded; which of them is first is drawn anew for each step. Sums over the steps of
a round make a pair. The estimate is the median of the pairs' ratios, with the 95 % interval of a bootstrap over pairs:
other load on the machine hits both halves of a pair alike, and what it hits alone moves no median.
Wall time and CPU time (user and system, of the step and all its children) are both estimated.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ebpf.inspector import Inspector
from sandbox.container.cgroup import hierarchy

_PACKAGES = ("asyncio", "json", "email", "http", "unittest", "importlib", "xml")
_RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A ratio with its 95 % interval, and the pairs behind it."""

    ratio: float
    low: float
    high: float
    pairs: int


def estimate(attached: list[float], detached: list[float], seed: int = 1) -> Estimate:
    """Median of the pairs' ratios.

    >>> estimate([2.0, 4.0, 6.0], [2.0, 4.0, 6.0]).ratio
    1.0
    """
    ratios = [one / other for one, other in zip(attached, detached, strict=True)]
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    low, high = medians[int(0.025 * _RESAMPLES)], medians[int(0.975 * _RESAMPLES)]
    return Estimate(statistics.median(ratios), low, high, len(ratios))


@dataclass
class Measured:
    """Seconds of each round; index 1 with the inspector, 0 without."""

    wall: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    cpu: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    steps: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)  # CPU seconds


class Workload:
    """The steps, each a shell script that is run in a directory of its own twice a round."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.inputs = directory / "inputs"
        self.inputs.mkdir(parents=True)
        source = Path(sysconfig.get_paths()["stdlib"])
        present = [source / name for name in _PACKAGES if (source / name).is_dir()]
        with tarfile.open(self.inputs / "source.tar", "w") as tar:
            for package in present:
                tar.add(package, package.name, filter=_source_only)
        _wheel(self.inputs / "workload-1.0-py3-none-any.whl", present[:4])
        pip = f"{sys.executable} -I -m pip --disable-pip-version-check --no-cache-dir --quiet"
        program = Path(__file__).parent / "native" / "enter.c"
        unpack = "mkdir $i && tar xf ../inputs/source.tar -C $i"
        self.steps = {
            "untar": f"for i in tree b c d e; do {unpack}; done; find . -type f | xargs stat >/dev/null",
            "git": "cd tree && git init -q . && git add -A && for i in $(seq 25); do git status >/dev/null; done",
            "pip": f"{pip} install --no-index --no-deps --target site ../inputs/workload-1.0-py3-none-any.whl",
            "compile": f"for i in 1 2 3 4 5; do cc -O1 -c -o x$i.o {program}; done",
        }

    def run(self, name: str, side: int, cgroup: Path) -> tuple[float, float]:
        """Seconds of wall time and of CPU time."""
        where = self.directory / str(side)
        where.mkdir(exist_ok=True)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.perf_counter()
        subprocess.run(
            ["/bin/sh", "-ec", f"echo $$ > {cgroup}/cgroup.procs; {self.steps[name]}"],
            cwd=where, check=True, stdout=subprocess.DEVNULL,
            env={**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "HOME": str(where)},
            preexec_fn=lambda: os.setpriority(os.PRIO_PROCESS, 0, -15),
        )  # fmt: skip
        wall = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def clean(self) -> None:
        for side in "01":
            shutil.rmtree(self.directory / side, ignore_errors=True)


def _source_only(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in member.name else member


def _wheel(path: Path, packages: list[Path]) -> None:
    """A wheel of these packages, as a build backend would write it."""
    info = "workload-1.0.dist-info"
    files = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: workload\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: bench\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    for package in packages:
        for file in sorted(package.rglob("*.py")):
            files[f"workload_{file.relative_to(package.parent)}"] = file.read_bytes()
    record = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


@contextlib.contextmanager
def _group(name: str) -> Iterator[Path]:
    cgroup = hierarchy().unified / f"bench-{name}"
    cgroup.mkdir()
    try:
        yield cgroup
    finally:
        cgroup.rmdir()


def measure(directory: Path, rounds: int, load: Callable[[], Inspector], seed: int = 1) -> Measured:
    """Run the workload `rounds` times with and without the inspector that `load` makes, below `directory` (on
    btrfs)."""
    rng = random.Random(seed)
    measured = Measured(steps={})
    workload = Workload(directory)
    with _group(directory.name) as cgroup:
        for number in range(-1, rounds):  # the first one warms the caches
            wall, cpu = [0.0, 0.0], [0.0, 0.0]
            os.sync()
            for name in workload.steps:
                order = rng.choice(((0, 1), (1, 0)))
                for side in order:
                    with contextlib.ExitStack() as stack:
                        if side:
                            inspector = stack.enter_context(load())
                            inspector.watch(cgroup.stat().st_ino, contained=False)
                        taken, used = workload.run(name, side, cgroup)
                    wall[side] += taken
                    cpu[side] += used
                    if number >= 0:
                        measured.steps.setdefault(name, ([], []))[side].append(used)
            workload.clean()
            if number >= 0:
                for side in (0, 1):
                    measured.wall[side].append(wall[side])
                    measured.cpu[side].append(cpu[side])
    return measured
