"""Runs cases and random programs in real sandboxes and compares each verdict with the truth.

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

from daemon.host import mounts
from daemon.verdict.assess import SMALL, Assessor, FileTrees
from daemon.verdict.judge import Judgement, judge
from ebpf.inspector import Inspector
from sandbox.container.container import Bind, Container, ContainerSpec
from sandbox.criu.open_files import held_files
from sandbox.messages import Effects, Limits, Verdict
from sandbox.tree import btrfs
from sandbox.tree.pool import BtrfsPool
from tests.crash.torture import oracle
from tests.crash.torture.cases import SCRATCH, WORK, Case, Place, build, calls, cases, matrix, operations
from tests.crash.torture.enter import STILL, Enter, compiled
from tests.crash.torture.programs import Series, Vocabulary, minimal

__all__ = ["Arena", "Case", "Tally", "build", "calls", "cases", "matrix", "operations"]

FIRST_UID = 40_000_000
ITEM = 200  # cases in one sandbox, then a fresh one
CHILD_CGROUP = "child-cgroup"
SETTLING = 3.0  # seconds; a survivor that only computes never waits
_UNHURRIED = dataclasses.replace(SMALL, seconds=60)
TRIES = 3  # of a program that is being made smaller: some misses are races


@dataclass
class Tally:
    """What the comparison found."""

    cases: int = 0
    false_negatives: list[str] = field(default_factory=list)
    missed: list[Case] = field(default_factory=list)  # the same, as cases
    no_effect_cases: int = 0
    false_positives: list[str] = field(default_factory=list)
    set_back: int = 0  # changes undone by the program; their verdicts are neither right nor wrong
    set_back_captured: int = 0
    only_times: int = 0  # nothing but modification times differs, and nobody set them: either verdict is right
    safest: int = 0
    scratch: int = 0  # cases after which nothing but scratch differs: they must be seen, and need no checkpoint
    scratch_captured: int = 0
    in_memory: int = 0  # cases on a tmpfs, which no sandbox can mount, after which nothing differs
    in_memory_captured: int = 0
    wider: int = 0  # verdicts that capture a half which did not change, beside one which did
    verdicts: Counter[str] = field(default_factory=Counter)
    succeeded: Counter[str] = field(default_factory=Counter)  # calls of the matrix, by what the kernel answered
    refused: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)  # cases whose truth is not what their outcome promises
    report: Callable[[str], None] | None = None  # told of every case

    def add(
        self,
        case: Case,
        changes: oracle.Changes,
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
        unseen = _unseen(case, changes, effects)
        if self.report is not None:
            self.report(f"{case.name} [{case.way}: {' '.join((*case.setup, '|', *case.program))}] in {case.place.name}")
            self.report(f"  judged {verdict}: {judgement.reason}")
            self.report(f"  differs: {_said(changes, 20)}")
            self.report(f"  seen: {effects}")
        self._check_oracle(case, changes, self._answered(output))
        self.cases += 1
        self.safest += judgement.safest
        self.verdicts[str(verdict)] += 1
        self.only_times += only_times
        truth = Verdict.of(files=bool(files) and not only_times, processes=bool(changes.processes))
        if truth.files > verdict.files or truth.processes > verdict.processes:
            self.missed.append(case)
            self.false_negatives.append(f"{case.name}: judged {verdict}, changed {_said(changes)}")
        elif unseen:
            self.missed.append(case)
            self.false_negatives.append(f"{case.name}: not seen in scratch: {_said(changes)}")
        elif truth is not Verdict.NONE:
            self.wider += truth is not verdict
        elif only_times:
            pass
        elif case.sets_back:
            self.set_back += 1
            self.set_back_captured += verdict is not Verdict.NONE
        elif case.place.kind == "tmpfs":
            self.in_memory += 1
            self.in_memory_captured += verdict is not Verdict.NONE
        else:
            self.no_effect_cases += 1
            self.scratch += bool(changes.scratch)
            if verdict is not Verdict.NONE:
                self.scratch_captured += bool(changes.scratch)
                self.false_positives.append(f"{case.name}: judged {verdict}: {judgement.reason}")

    def _answered(self, output: str) -> bool:
        """What the calls of the matrix returned: lines of `word number`. True when all of them succeeded."""
        failed = False
        for line in output.splitlines():
            word, _, number = line.rpartition(" ")
            if word and number.strip().isdigit():
                failed |= number.strip() != "0"
                (self.refused if number.strip() != "0" else self.succeeded)[word.rpartition(":")[2]] += 1
        return bool(output) and not failed

    def _check_oracle(self, case: Case, changes: oracle.Changes, succeeded: bool) -> None:
        """The outcome of a call says whether something must differ: an oracle that sees less, or more, is broken."""
        word = case.program[-1]
        if case.group >= 0 or "." not in word or word.endswith((".failed", ".restored")):
            return
        differs = bool(changes.files or changes.processes or changes.scratch)
        promised = word.endswith((".created", ".changed"))
        if succeeded and differs is not promised:
            self.unexpected.append(f"{case.name}: {_said(changes)}")

    def never_succeeded(self) -> list[str]:
        """Calls of the matrix that the kernel refused everywhere, though they were meant to succeed."""
        return sorted(word for word in self.refused if not self.succeeded[word] and not word.endswith(".failed"))


def _with_moved(case: Case, changes: oracle.Changes) -> oracle.Changes:
    """With the times of directories and FIFOs that the case sets on purpose."""
    names = case.sets_moving_times

    def chosen(paths: tuple[str, ...]) -> list[str]:
        return [path for path in paths if path.rpartition("/")[2] in names]

    return dataclasses.replace(
        changes,
        files=changes.files + chosen(changes.moved),
        processes=changes.processes + [f"tmpfs {path}" for path in chosen(changes.moved_in_memory)],
        scratch=(*changes.scratch, *chosen(changes.moved_in_scratch)),
    )


def _unseen(case: Case, changes: oracle.Changes, effects: Effects) -> bool:
    """Whether scratch differs and no effect on files was seen. A mere time that nobody set may stay unseen."""
    differs = set(changes.scratch) if case.sets_times else set(changes.scratch) - set(changes.scratch_times)
    return bool(differs) and not judge(effects).verdict.files


def _said(changes: oracle.Changes, limit: int = 6) -> str:
    result = [*changes.files, *changes.processes, *(f"scratch {path}" for path in changes.scratch)]
    return str(result[:limit]) if result else "nothing"


@dataclass
class Stage:
    """A sandbox that cases share, and what it held when it was new."""

    container: Container
    place: Place
    pristine: oracle.Truth
    before: oracle.Truth | None = None  # at the mark; None: it must be reset and marked first
    used: int = 0


class Arena:
    """Makes sandboxes of the generator's image, watched by one inspector."""

    def __init__(self, pool: BtrfsPool, image: Path, run: Path, inspector: Inspector, tag: str = "torture"):
        self.pool, self.image, self.run, self.inspector = pool, image, run, inspector
        self.tag = tag  # in the names of all that it makes
        self.lost_events = 0
        self._numbers = itertools.count()
        self._enter: Enter | None = None
        self._snapshots: dict[str, FileTrees] = {}

    def close(self) -> None:
        if self._enter is not None:
            self._enter.close()
            self._enter = None

    # ------------------------------------------------------------------ one sandbox

    @contextlib.asynccontextmanager
    async def sandbox(self, place: Place = WORK) -> AsyncIterator[Container]:
        name = f"{self.tag}-{secrets.token_hex(5)}"
        tree = self.pool.sandboxes / name
        self.pool.create_tree(tree)
        binds = self._binds(place, name)
        spec = ContainerSpec(
            id=name, image=self.image, tree=tree, uid_base=FIRST_UID + 65536 * (next(self._numbers) % 64),
            hostname="crab", run_dir=self.run / name, limits=Limits(processes=512), binds=binds,
        )  # fmt: skip
        container = await Container.prepare(spec)
        nested = container.cgroup.path / CHILD_CGROUP
        nested.mkdir()
        try:
            self.inspector.watch(container.cgroup.id)
            await container.start()
            if place.kind in ("tmpfs", "bind"):
                await self.do(container, f"mount_{place.kind}_here", way="setns", place=place)
            for item in {WORK, place}:
                await self.reset(container, item, way="exec")
            yield container
        finally:
            self.lost_events += self.inspector.read(container.cgroup.id).lost_events
            self.inspector.unwatch(container.cgroup.id)
            self._forget_snapshot(container)
            await container.kill()
            nested.rmdir()
            await container.destroy()
            for path in {tree, *(bind.source for bind in binds)}:
                btrfs.delete_subvolume(path)

    def _binds(self, place: Place, name: str) -> tuple[Bind, ...]:
        """As the daemon mounts them: scratch in the pool, and for what is read-only the same directory once more."""
        if place.kind not in ("scratch", "read-only"):
            return ()
        source = self.pool.sandboxes / f"{name}.scratch0"
        mounts.make_scratch(source, "1GiB")
        scratch = Bind(source, SCRATCH, read_only=False)
        return (scratch,) if place.kind == "scratch" else (scratch, Bind(source, place.path))

    async def reset(self, container: Container, place: Place, *before: str, way: str = "setns") -> None:
        """Bring back the state that cases start from; `before` are operations that run first."""
        await self._do(container, place.made_at, (*before, "reset", "forget_ipc"), way)

    async def do(self, container: Container, *words: str, way: str = "exec", place: Place = WORK) -> str:
        """Run operations; returns what the calls of the matrix answered."""
        return await self._do(container, place.path, words, way)

    async def _do(self, container: Container, path: str, words: tuple[str, ...], way: str) -> str:
        argv = ["/effects", path, *words]
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
            raise RuntimeError(f"{' '.join(words)} in {path} by {way}: {output or 'does not end'} ({status})")
        return output

    def mark(self, container: Container) -> None:
        """As the daemon does when it captures: nothing runs, the marks first, then the snapshot."""
        for bind in container.spec.binds:
            if not bind.read_only:  # a store to a page that is dirty already is no event; a snapshot writes them out
                btrfs.flush(bind.source)
        began = time.time()
        self.inspector.mark(container.cgroup.id)
        self._forget_snapshot(container)
        held = held_files(container)
        snapshot = self.pool.checkpoints / f"{self.tag}-{secrets.token_hex(5)}"
        btrfs.snapshot(container.spec.tree, snapshot, readonly=True)
        self._snapshots[container.spec.id] = FileTrees(
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
        """The daemon's verdict, but that a comparison ends on a busy machine too."""
        return await Assessor(_UNHURRIED).assess(self.inspector, container, lambda: self.trees(container))

    def trees(self, container: Container) -> FileTrees | None:
        """The file tree of the last mark, and the one now."""
        return self._snapshots.get(container.spec.id)

    async def finalize(self, container: Container) -> None:
        """Until every process waits: one that was woken shows as running from that instant on.

        What a survivor does after the verdict belongs to the next one; on a busy machine it may take its time.
        """
        deadline = time.monotonic() + SETTLING
        while _anybody_runs(container) and time.monotonic() < deadline:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.002)

    async def truth(self, container: Container) -> oracle.Truth:
        """The truth once nothing ends any more."""
        while True:
            assert container.init_pid is not None
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                tasks, excluded = (
                    oracle.processes_below(container.cgroup.path),
                    [item.target for item in container.spec.binds],
                )
                return oracle.read(container.init_pid, tasks, excluded)
            await asyncio.sleep(0.001)

    async def judged(self, container: Container, words: tuple[str, ...]) -> Effects:
        await self.do(container, *words)
        return self.inspector.read(container.cgroup.id)

    # ------------------------------------------------------------------ many cases

    async def run_cases(self, chosen: Iterable[Case], tally: Tally) -> None:
        """Cases that share a sandbox come one after the other: order them by place."""
        async with Lane(self) as lane:
            await lane.run(chosen, tally)

    async def run_lanes(self, chosen: list[Case], tally: Tally, lanes: int) -> None:
        """The same, in several sandboxes side by side: most of a case's time is spent waiting for processes."""
        async with asyncio.TaskGroup() as together:
            for lane in _lanes(chosen, lanes):
                together.create_task(self.run_cases(lane, tally))


class Lane:
    """A sandbox at a time, in which cases run one after the other; a fresh one when it cannot be reset."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._stage: Stage | None = None
        self._open = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Lane:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Remove the sandbox. The next case gets another."""
        self._stage = None
        await self._open.aclose()

    async def run(self, chosen: Iterable[Case], tally: Tally) -> None:
        """Run cases, and count them."""
        group = -1
        for case in chosen:
            try:
                await self._run(case, tally, together=0 <= case.group == group)
            except Exception as error:
                error.add_note(f"in {case.name}")
                raise
            group = case.group

    async def _run(self, case: Case, tally: Tally, *, together: bool) -> None:
        stage = self._stage
        if stage is not None and not together:
            if case.setup or case.group >= 0:
                stage.before = None  # not a state that this case starts from
            if stage.place != case.place or stage.used >= ITEM:
                stage = None
        if stage is None or not await self._prepare(stage, case, reset=not together):
            await self.close()
            container = await self._open.enter_async_context(self._arena.sandbox(case.place))
            stage = self._stage = Stage(container, case.place, await self._arena.truth(container))
            await self._prepare(stage, case, reset=False)
        await self._run_case(stage, case, tally)

    async def _prepare(self, stage: Stage, case: Case, *, reset: bool) -> bool:
        """Reset, set up, mark, unless that still holds. False when the reset did not bring the first state back."""
        arena, container = self._arena, stage.container
        if stage.before is not None:
            return True
        if reset:
            client = len(oracle.processes_below(container.cgroup.path)) > 1
            await arena.reset(container, case.place, *(["kill_all"] if client else []))
            now = await arena.truth(container)
            changes = now.since(stage.pristine)
            if changes.files or changes.processes or changes.scratch:
                return False
        stage.used += 1
        if case.setup:
            way = "exec" if case.way == "exec" and "mount_there" not in case.setup else "setns"
            await arena.do(container, *case.setup, way=way, place=case.place)
        await arena.finalize(container)
        arena.mark(container)
        stage.before = await arena.truth(container)
        return True

    async def _run_case(self, stage: Stage, case: Case, tally: Tally) -> None:
        assert stage.before is not None
        arena = self._arena
        answers = await arena.do(stage.container, *case.program, way=case.way, place=case.place)
        await arena.finalize(stage.container)
        effects, judgement = await arena.assess(stage.container)
        after = await arena.truth(stage.container)
        changes = after.since(stage.before)
        tally.add(case, changes, effects, judgement, answers)
        # A change of mere times, or of scratch, may stay uncaptured; the next case starts from the state reset.
        changed = changes.processes or changes.files or changes.scratch
        stage.before = None if judgement.verdict is not Verdict.NONE or case.setup or changed else after


async def smallest(arena: Arena, vocabulary: Vocabulary, series: Series, batch: str) -> Series | None:
    """The smallest series near this one of which something is missed; None: it did not happen again."""
    loop = asyncio.get_running_loop()
    stopped = False

    async def missed(lane: Lane, tried: Series) -> bool:
        for _ in range(TRIES):
            tally = Tally()
            try:
                await lane.run(tried.cases(), tally)
            except RuntimeError:  # a program that did not end says nothing about verdicts
                await lane.close()
                return False
            if tally.false_negatives:
                return True
        return False

    async with Lane(arena) as lane:

        def again(tried: Series) -> bool:
            if stopped:
                raise KeyboardInterrupt  # the only thing that hypothesis does not take for a finding
            return asyncio.run_coroutine_threadsafe(missed(lane, tried), loop).result()

        try:
            return await asyncio.to_thread(minimal, vocabulary, series, batch, again)
        finally:
            stopped = True


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
    for pid in oracle.processes_below(container.cgroup.path):
        if pid == container.init_pid:
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in os.listdir(f"/proc/{pid}/task"):
                if Path(f"/proc/{pid}/task/{task}/stat").read_text().rpartition(")")[2].split()[0] in "RD":
                    return True
    return False
