"""Runs cases and random programs in real sandboxes and compares each verdict with the truth.

Owns: the sandboxes that cases run in, the order mark - program - verdict - truth, the comparison. Does not own: which
cases there are (_torture_cases), the truth (_oracle), the figures that are reported (inspector).

::

    reset ─▶ setup ─▶ mark ─▶ truth before ─▶ program ─▶ verdict ─▶ truth after ─▶ compare

Cases of one place share a sandbox for as long as `reset` brings back the state it had at first; what cannot be reset
(a copied-up file of the image, a mount) costs a fresh one. As with the daemon's turns, the mark is set anew only after
a verdict that captures something.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from bench import _oracle
from bench._torture_cases import PLACES, WORK, Case, build, calls, cases, matrix, operations, programs
from bench._torture_enter import STILL, Enter, compiled
from daemon import netting
from daemon.inspection import Assessor, Trees
from daemon.judge import Judgement, judge
from ebpf.inspector import Inspector
from sandbox import btrfs
from sandbox.container import Container, ContainerSpec
from sandbox.held import held_files
from sandbox.messages import Effects, Limits, Verdict
from sandbox.pool import Pool

__all__ = ["Arena", "Case", "Tally", "build", "calls", "cases", "matrix", "operations", "programs"]

FIRST_UID = 40_000_000
EACH = 200  # cases in one sandbox, then a fresh one
CHILD_CGROUP = "child-cgroup"
SETTLING = 3.0  # seconds; a survivor that only computes never waits
PATIENT = netting.Bounds(seconds=2.0)


@dataclass
class Tally:
    """What the comparison found."""

    cases: int = 0
    false_negatives: list[str] = field(default_factory=list)
    no_effect_cases: int = 0
    false_positives: list[str] = field(default_factory=list)
    set_back: int = 0  # changes undone by the program; their verdicts are neither right nor wrong
    set_back_captured: int = 0
    only_times: int = 0  # nothing but modification times differs, and nobody set them: either verdict is right
    safest: int = 0
    wider: int = 0  # verdicts that capture a half which did not change, beside one which did
    verdicts: Counter[str] = field(default_factory=Counter)
    succeeded: Counter[str] = field(default_factory=Counter)  # calls of the matrix, by what the kernel answered
    refused: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)  # cases whose truth is not what their outcome promises
    tell: Callable[[str], None] | None = None  # told of every case

    def add(
        self,
        case: Case,
        changes: _oracle.Changes,
        effects: Effects,
        judgement: Judgement | None = None,
        output: str = "",
    ) -> None:
        """Count a case. `judgement` None: what the judge alone says of the effects."""
        judgement = judgement or judge(effects)
        verdict = judgement.verdict
        changes = _with_moved(case, changes)
        files = changes.files
        only_times = bool(files) and files == changes.times and not case.sets_times
        if self.tell is not None:
            self.tell(f"{case.name} [{case.way}: {' '.join((*case.setup, '|', *case.program))}] in {case.place}")
            self.tell(f"  judged {verdict}: {judgement.reason}")
            self.tell(f"  differs: {(changes.files + changes.processes)[:20] or 'nothing'}")
            self.tell(f"  seen: {effects}")
        self._check_oracle(case, changes, self._answered(output))
        self.cases += 1
        self.safest += judgement.safest
        self.verdicts[str(verdict)] += 1
        self.only_times += only_times
        truth = Verdict.of(files=bool(files) and not only_times, processes=bool(changes.processes))
        if truth.files > verdict.files or truth.processes > verdict.processes:
            changed = (changes.files + changes.processes)[:6]
            self.false_negatives.append(f"{case.name} {_words(case)}: judged {verdict}, changed {changed}")
        elif truth is not Verdict.NONE:
            self.wider += truth is not verdict
        elif only_times:
            pass
        elif case.sets_back:
            self.set_back += 1
            self.set_back_captured += verdict is not Verdict.NONE
        else:
            self.no_effect_cases += 1
            if verdict is not Verdict.NONE:
                self.false_positives.append(f"{case.name} {_words(case)}: judged {verdict}: {judgement.reason}")

    def _answered(self, output: str) -> bool:
        """What the calls of the matrix returned: lines of `word number`. True when all of them succeeded."""
        failed = False
        for line in output.splitlines():
            word, _, number = line.rpartition(" ")
            if word:
                failed |= number.strip() != "0"
                (self.refused if number.strip() != "0" else self.succeeded)[word.rpartition(":")[2]] += 1
        return bool(output) and not failed

    def _check_oracle(self, case: Case, changes: _oracle.Changes, succeeded: bool) -> None:
        """The outcome of a call says whether something must differ: an oracle that sees less, or more, is broken."""
        word = case.program[-1]
        if case.group >= 0 or "." not in word or word.endswith((".failed", ".restored")):
            return
        differs = bool(changes.files or changes.processes)
        promised = word.endswith((".created", ".changed"))
        if succeeded and differs is not promised:
            self.unexpected.append(f"{case.name}: {(changes.files + changes.processes)[:6] or 'nothing differs'}")

    def never_succeeded(self) -> list[str]:
        """Calls of the matrix that the kernel refused everywhere, though they were meant to succeed."""
        return sorted(word for word in self.refused if not self.succeeded[word] and not word.endswith(".failed"))


def _with_moved(case: Case, changes: _oracle.Changes) -> _oracle.Changes:
    """With the times of directories and FIFOs that the case sets on purpose."""
    names = case.sets_moving_times
    files = [path for path in changes.moved if path.rpartition("/")[2] in names]
    memory = [f"tmpfs {path}" for path in changes.moved_in_memory if path.rpartition("/")[2] in names]
    if not files and not memory:
        return changes
    return dataclasses.replace(changes, files=changes.files + files, processes=changes.processes + memory)


def _words(case: Case) -> str:
    return f"[{case.way}: {' '.join(case.program)}]" if case.group >= 0 else ""


@dataclass
class Stage:
    """A sandbox that cases share, and what it held when it was new."""

    container: Container
    place: str
    pristine: _oracle.Truth
    before: _oracle.Truth | None = None  # at the mark; None: it must be reset and marked first
    used: int = 0


class Arena:
    """Makes sandboxes of the generator's image, watched by one inspector."""

    def __init__(self, pool: Pool, image: Path, run: Path, inspector: Inspector, tag: str = "torture"):
        self.pool, self.image, self.run, self.inspector = pool, image, run, inspector
        self.tag = tag  # in the names of all that it makes
        self.lost_events = 0
        self._numbers = itertools.count()
        self._enter: Enter | None = None
        self._snapshots: dict[str, Trees] = {}

    def close(self) -> None:
        if self._enter is not None:
            self._enter.close()
            self._enter = None

    # ------------------------------------------------------------------ one sandbox

    @contextlib.asynccontextmanager
    async def sandbox(self, place: str = WORK) -> AsyncIterator[Container]:
        name = f"{self.tag}-{secrets.token_hex(5)}"
        tree = self.pool.sandboxes / name
        self.pool.create_tree(tree)
        spec = ContainerSpec(
            id=name, image=self.image, tree=tree, uid_base=FIRST_UID + 65536 * (next(self._numbers) % 64),
            hostname="crab", run_dir=self.run / name, limits=Limits(processes=512),
        )  # fmt: skip
        container = await Container.prepare(spec)
        nested = container.cgroup.path / CHILD_CGROUP
        nested.mkdir()
        try:
            self.inspector.watch(container.cgroup.id)
            await container.start()
            if place in (PLACES["tmpfs"], PLACES["bind mount"]):
                kind = "mount_tmpfs_here" if place == PLACES["tmpfs"] else "mount_bind_here"
                await self.do(container, kind, way="setns", place=place)
            for each in {WORK, place}:
                await self.do(container, "reset", place=each)
            yield container
        finally:
            self.lost_events += self.inspector.read(container.cgroup.id).lost_events
            self.inspector.unwatch(container.cgroup.id)
            self._forget_snapshot(container)
            await container.kill()
            nested.rmdir()
            await container.destroy()
            btrfs.delete_subvolume(tree)

    async def do(self, container: Container, *words: str, way: str = "exec", place: str = WORK) -> str:
        """Run operations; returns what the calls of the matrix answered."""
        argv = ["/effects", place, *words]
        if way == "exec":
            done = await container.exec(argv, env=STILL, timeout=30)
            status, output, failed = done.exit_code, done.stdout.decode(), done.exit_code in (1, 2) or done.timed_out
            output += done.stderr.decode() if failed else ""
        else:
            if self._enter is None:
                self.run.mkdir(parents=True, exist_ok=True)
                self._enter = Enter(compiled("enter.c", self.run / f"enter-{secrets.token_hex(4)}"))
            assert container.init_pid is not None
            cgroup = container.cgroup.path
            entered = self._enter.run(way, container.init_pid, cgroup, cgroup / CHILD_CGROUP, argv)
            status, output, failed = entered.exit_code, entered.output, entered.exit_code in (1, 2, 126)
        if failed:
            raise RuntimeError(f"{' '.join(words)} in {place} by {way}: {output or 'does not end'} ({status})")
        return output

    def mark(self, container: Container) -> None:
        """As the daemon does when it captures: nothing runs, the marks first, then the snapshot."""
        began = time.time()
        self.inspector.mark(container.cgroup.id)
        self._forget_snapshot(container)
        held = held_files(container).files
        snapshot = self.pool.checkpoints / f"{self.tag}-{secrets.token_hex(5)}"
        btrfs.snapshot(container.spec.tree, snapshot, readonly=True)
        self._snapshots[container.spec.id] = Trees(
            before=snapshot / "upper",
            now=container.spec.tree / "upper",
            lower=container.spec.image,
            taken_at=began,
            held=held,
        )

    def _forget_snapshot(self, container: Container) -> None:
        trees = self._snapshots.pop(container.spec.id, None)
        if trees is not None and trees.before is not None:
            btrfs.delete_subvolume(trees.before.parent)

    async def assess(self, container: Container) -> tuple[Effects, Judgement]:
        """The daemon's verdict. Its comparison of files may take longer here, where the machine is busy."""
        return await Assessor(PATIENT).assess(self.inspector, container, lambda: self.trees(container))

    def trees(self, container: Container) -> Trees | None:
        """The file tree of the last mark, and the one now."""
        return self._snapshots.get(container.spec.id)

    async def settle(self, container: Container) -> None:
        """Until every process waits: one that was woken shows as running from that instant on.

        What a survivor does after the verdict belongs to the next one; on a busy machine it may take its time.
        """
        deadline = time.monotonic() + SETTLING
        while _anybody_runs(container) and time.monotonic() < deadline:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.002)

    async def truth(self, container: Container) -> _oracle.Truth:
        """The truth once nothing ends any more."""
        while True:
            assert container.init_pid is not None
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                return _oracle.read(container.init_pid, _oracle.processes_below(container.cgroup.path))
            await asyncio.sleep(0.001)

    async def judged(self, container: Container, words: tuple[str, ...]) -> Effects:
        await self.do(container, *words)
        return self.inspector.read(container.cgroup.id)

    # ------------------------------------------------------------------ many cases

    async def run_cases(self, chosen: Iterable[Case], tally: Tally) -> None:
        """Cases that share a sandbox come one after the other: order them by place."""
        stage: Stage | None = None
        group = -1
        async with contextlib.AsyncExitStack() as last:
            for case in chosen:
                together = case.group >= 0 and case.group == group
                group = case.group
                if stage is not None and not together:
                    if case.setup or case.group >= 0:
                        stage.before = None  # not a state that this case starts from
                    if stage.place != case.place or stage.used >= EACH:
                        stage = None
                if stage is None or not await self._prepare(stage, case, reset=not together):
                    await last.aclose()
                    container = await last.enter_async_context(self.sandbox(case.place))
                    stage = Stage(container, case.place, await self.truth(container))
                    await self._prepare(stage, case, reset=False)
                await self._run_case(stage, case, tally)

    async def _prepare(self, stage: Stage, case: Case, *, reset: bool) -> bool:
        """Reset, set up, mark, unless that still holds. False when the reset did not bring the first state back."""
        container = stage.container
        if stage.before is not None:
            return True
        if reset:
            words = ["reset", "forget_ipc"]
            if len(_oracle.processes_below(container.cgroup.path)) > 1:
                words.insert(0, "kill_all")
            await self.do(container, *words, way="setns", place=case.place)
            now = await self.truth(container)
            changes = now.since(stage.pristine)
            if changes.files or changes.processes:
                return False
        stage.used += 1
        if case.setup:
            way = "exec" if case.way == "exec" and "mount_there" not in case.setup else "setns"
            await self.do(container, *case.setup, way=way, place=case.place)
        await self.settle(container)
        self.mark(container)
        stage.before = await self.truth(container)
        return True

    async def _run_case(self, stage: Stage, case: Case, tally: Tally) -> None:
        assert stage.before is not None
        answers = await self.do(stage.container, *case.program, way=case.way, place=case.place)
        await self.settle(stage.container)
        effects, judgement = await self.assess(stage.container)
        after = await self.truth(stage.container)
        changes = after.since(stage.before)
        tally.add(case, changes, effects, judgement, answers)
        captured = judgement.verdict is not Verdict.NONE
        # A change of mere times may stay unjudged; the truth to compare with is the one after it.
        stage.before = None if captured or case.setup or changes.processes or changes.files else after

    async def run_programs(self, chosen: Iterable[Case], tally: Tally) -> None:
        """Random programs, group by group."""
        await self.run_cases(chosen, tally)

    async def run_lanes(self, chosen: list[Case], tally: Tally, lanes: int) -> None:
        """The same, in several sandboxes side by side: most of a case's time is spent waiting for processes."""
        async with asyncio.TaskGroup() as together:
            for lane in _lanes(chosen, lanes):
                together.create_task(self.run_cases(lane, tally))


def _lanes(chosen: list[Case], lanes: int) -> list[list[Case]]:
    """Contiguous parts of about the same length; what belongs together stays together."""
    parts: list[list[Case]] = []
    start = 0
    for lane in range(1, lanes + 1):
        end = max(start, len(chosen) * lane // lanes)
        while 0 < end < len(chosen) and chosen[end].group >= 0 and chosen[end].group == chosen[end - 1].group:
            end += 1
        parts.append(chosen[start:end])
        start = end
    return [part for part in parts if part]


def _anybody_runs(container: Container) -> bool:
    for pid in _oracle.processes_below(container.cgroup.path):
        if pid == container.init_pid:
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in os.listdir(f"/proc/{pid}/task"):
                if Path(f"/proc/{pid}/task/{task}/stat").read_text().rpartition(")")[2].split()[0] in "RD":
                    return True
    return False
