"""Cases and random programs for the inspector, and the loop that compares each verdict with the truth.

Owns: which operations make a case, the sandboxes that they run in, the comparison. Does not own: the operations
(native/effects.c), the truth (_oracle), the figures that are reported (inspector).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import secrets
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench import _oracle
from daemon.judge import judge
from ebpf.inspector import Inspector
from sandbox import btrfs
from sandbox.container import Container, ContainerSpec
from sandbox.errors import Unsupported
from sandbox.messages import Effects, Limits, Verdict
from sandbox.pool import Pool

NATIVE = Path(__file__).with_name("native")
WORK = "/work"
FIRST_UID = 40_000_000


def build(folder: Path) -> Path:
    """An image with nothing but the static generator and some files to copy up."""
    image = folder / "image"
    if shutil.which("cc") is None:
        raise Unsupported("no C compiler", remedy="install gcc and libc6-dev")
    for name in ("work", "lower/d", "proc", "dev", "dev/shm", "tmp", "root", "etc", "sys"):
        (image / name).mkdir(parents=True, exist_ok=True)
    for name in ("file", "two", "three", "gone", "moved", "d/x"):
        (image / "lower" / name).write_text("a line of the image\n")
    (image / "lower" / "page").write_bytes(b"P" * 4096)
    command = ["cc", "-O2", "-static", "-pthread", "-o", str(image / "effects"), str(NATIVE / "effects.c")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unsupported(f"the generator does not compile: {done.stderr[-500:]}", remedy="install libc6-dev")
    return image


def operations() -> dict[str, list[str]]:
    """Names of all operations, by the section of operations.h that they stand in."""
    sections: dict[str, list[str]] = {}
    for line in (NATIVE / "operations.h").read_text().splitlines():
        if line.startswith("/* --- "):
            current = sections.setdefault(line[7:].partition(":")[0].partition(" */")[0].partition(",")[0], [])
        elif line.startswith("OP(") and sections:
            current.append(line[3:].partition(",")[0])
    return sections


# --------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """Operations before the mark, and after it."""

    name: str
    program: tuple[str, ...]
    setup: tuple[str, ...] = ()


_SETUPS = {
    "kill_survivor": ["start_survivor", "start_server"],
    "stop_survivor": ["start_survivor"],
    "signal_survivor": ["start_survivor", "start_signal_taker", "start_signal_blocker"],
    "signal_survivor_0": ["start_survivor"],
    "write_survivor_memory": ["start_survivor"],
    "write_survivor_mem_file": ["start_survivor"],
    "renice_survivor": ["start_survivor"],
    "limit_survivor": ["start_survivor"],
    "pin_survivor": ["start_survivor"],
    "read_survivor": ["start_survivor"],
    "read_survivor_memory": ["start_survivor"],
    "fill_fifo": ["start_fifo_holder", "start_fifo_reader", "start_mapper"],
    "connect_server": ["start_server"],
    "connect_deaf_server": ["start_deaf_server"],
    "remove_ipc": ["store_shm_segment", "make_semaphores", "send_message"],
    "store_shm_segment": ["store_shm_segment"],
    "make_semaphores": ["make_semaphores"],
    "send_message": ["send_message"],
}


def cases() -> Iterator[Case]:
    """Every operation, by the main thread, a child and a second thread; alone and beside a survivor."""
    sections = operations()
    for section in ("nothing", "failures", "made and gone again", "content", "names", "metadata"):
        for name in sections[section]:
            for who in ("main", "child", "thread"):
                yield Case(f"{section}: {name} by {who}", (f"{who}:{name}",))
            if section in ("nothing", "made and gone again"):
                yield Case(f"{section}: {name} beside a survivor", (name,), ("start_survivor",))
    for name in sections["processes"]:
        if name in ("kill_all",):
            continue
        yield Case(f"processes: {name}", (name,))
        for setup in _SETUPS.get(name, ()):
            yield Case(f"processes: {name} after {setup}", (name,), (setup,))
    yield Case("processes: nothing beside a spinner", ("nothing",), ("start_spinner",))
    yield Case("processes: nothing beside a mapper", ("nothing",), ("start_mapper",))
    yield Case("processes: kill all", ("kill_all",), ("start_survivor", "survive_quietly"))


def programs(seed: int, count: int) -> Iterator[tuple[str, ...]]:
    """Random programs: one to six operations, each by the main thread, a child or a second thread."""
    rng = random.Random(seed)
    sections = operations()
    harmless = sections["nothing"] + sections["failures"] + sections["made and gone again"]
    changing = sections["content"] + sections["names"] + sections["metadata"]
    living = [name for name in sections["processes"] if name != "start_spinner"]
    for _ in range(count):
        pool = rng.choice((harmless, harmless + changing, harmless + changing, harmless + changing + living))
        words = []
        for _ in range(rng.randint(1, 6)):
            name = rng.choice(pool)
            who = "main" if name in living else rng.choice(("main", "main", "child", "thread"))
            words.append(f"{who}:{name}")
        yield tuple(words)


# --------------------------------------------------------------------------- the loop


@dataclass
class Tally:
    """What the comparison found."""

    cases: int = 0
    false_negatives: list[str] = field(default_factory=list)
    no_effect_cases: int = 0
    false_positives: list[str] = field(default_factory=list)
    safest: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, changes: tuple[list[str], list[str]], effects: Effects) -> None:
        files, processes = changes
        judgement = judge(effects)
        truth = Verdict.of(files=bool(files), processes=bool(processes))
        verdict = judgement.verdict
        self.cases += 1
        self.safest += judgement.safest
        self.verdicts[verdict] = self.verdicts.get(verdict, 0) + 1
        if truth.files > verdict.files or truth.processes > verdict.processes:
            self.false_negatives.append(f"{name}: judged {verdict}, changed {(files + processes)[:6]}")
        if truth is Verdict.NONE:
            self.no_effect_cases += 1
            if verdict is not Verdict.NONE:
                self.false_positives.append(f"{name}: judged {verdict}: {judgement.reason}")


class Arena:
    """Makes sandboxes of the generator's image, watched by one inspector."""

    def __init__(self, pool: Pool, image: Path, run: Path, inspector: Inspector):
        self.pool, self.image, self.run, self.inspector = pool, image, run, inspector
        self._numbers = itertools.count()

    @contextlib.asynccontextmanager
    async def sandbox(self) -> AsyncIterator[Container]:
        name = f"torture-{secrets.token_hex(5)}"
        tree = self.pool.sandboxes / name
        self.pool.create_tree(tree)
        spec = ContainerSpec(
            id=name, image=self.image, tree=tree, uid_base=FIRST_UID + 65536 * (next(self._numbers) % 64),
            hostname="crab", run_dir=self.run / name, limits=Limits(processes=512),
        )  # fmt: skip
        container = await Container.prepare(spec)
        try:
            self.inspector.watch(container.cgroup.id)
            await container.start()
            await self.do(container, "reset")
            yield container
        finally:
            self.inspector.unwatch(container.cgroup.id)
            await container.destroy()
            btrfs.delete_subvolume(tree)

    async def do(self, container: Container, *words: str) -> None:
        done = await container.exec(["/effects", WORK, *words], timeout=30)
        if done.exit_code == 2 or done.timed_out:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr.decode() or 'does not end'}")

    def mark(self, container: Container) -> None:
        """As the daemon does when it captures: nothing runs, the marks first, then the snapshot."""
        self.inspector.mark(container.cgroup.id)
        snapshot = self.pool.checkpoints / f"torture-{secrets.token_hex(5)}"
        btrfs.snapshot(container.spec.tree, snapshot, readonly=True)
        btrfs.delete_subvolume(snapshot)

    async def truth(self, container: Container) -> _oracle.Truth:
        """The truth once nothing ends any more."""
        while True:
            assert container.init_pid is not None
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                return _oracle.read(container.init_pid, container.tasks())
            await asyncio.sleep(0.001)

    async def judged(self, container: Container, words: tuple[str, ...]) -> Effects:
        await self.do(container, *words)
        return self.inspector.read(container.cgroup.id)

    async def run_cases(self, chosen: list[Case], tally: Tally) -> None:
        """Each case in a sandbox of its own."""
        for case in chosen:
            async with self.sandbox() as container:
                if case.setup:
                    await self.do(container, *case.setup)
                self.mark(container)
                before = await self.truth(container)
                effects = await self.judged(container, case.program)
                tally.add(case.name, (await self.truth(container)).changes(before), effects)

    async def run_programs(self, chosen: list[tuple[str, ...]], tally: Tally, *, each: int = 40) -> None:
        """Programs one after the other in the same sandbox, `each` of them, then a fresh one.

        As with the daemon's turns, the mark is set anew only after a verdict that captures something.
        """
        for start in range(0, len(chosen), each):
            async with self.sandbox() as container:
                before = None
                for number, words in enumerate(chosen[start : start + each]):
                    if number % 5 == 4:
                        await self.do(container, "kill_all", "reset")
                        before = None
                    if before is None:
                        self.mark(container)
                        before = await self.truth(container)
                    effects = await self.judged(container, words)
                    after = await self.truth(container)
                    tally.add(" ".join(words), after.changes(before), effects)
                    if judge(effects).verdict is not Verdict.NONE:
                        before = None
