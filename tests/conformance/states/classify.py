"""Every state that a process can have, made in a sandbox: does it come back, is it refused, is it said to be lost?

::

    start ▸ ask ▸ capture ▸ ask (it runs on) ▸ kill ▸ restore ▸ ask ▸ fork ▸ ask
              └───────────── equal ────────────────────┴─────────────┘ else silent

States that are promised to come back share sandboxes. Where a capture or restore of many fails, they are divided until
the one is found that was the reason. States that are promised to be refused have a sandbox each.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.checkpoint import Ours
from bench.harness import aftermath
from sandbox import paths
from sandbox.container.container import Container
from sandbox.errors import CheckpointFailed, PagurusError
from tests.conformance.states.promises import ALWAYS, PROMISES, Promise

SOURCES = paths.CHECKOUT / "tests" / "conformance" / "native" / "states"
PLACE = "states"  # in the sandbox: the program, and the directory of the states
TOGETHER = 120  # states in one sandbox
TIMEOUT = 120.0
NO_HINT = "the sandbox keeps running"


@dataclass(frozen=True)
class Row:
    """One state: name, group, and how a program makes it."""

    name: str
    group: str
    how: str

    @property
    def promise(self) -> Promise:
        return PROMISES.get(self.name, Promise("restored"))


@dataclass
class Observed:
    """What became of one state.

    `kind`: restored; refused at the dump; impossible to make; differs after the restore or in the fork; broken (the
    restore failed); disturbed by the dump; unstable (two looks differ); blind (a process without it sees the same).
    """

    kind: str
    said: str = ""  # the refusal with its hint, or what differs

    def verdict(self, promise: Promise) -> str:
        """Its class in the table: restored, refused, impossible, named, or silent."""
        if self.kind == promise.kind == "refused":
            return "refused" if promise.reason in self.said else "silent"
        if self.kind == "differs" and promise.kind == "named":
            return "named"
        return self.kind if self.kind == promise.kind else "silent"


@dataclass
class CrashResult:
    """What was seen of all."""

    observed: dict[str, Observed] = field(default_factory=dict)
    report: Callable[[str], None] = lambda text: None

    def note(self, name: str, kind: str, said: str = "") -> None:
        self.observed[name] = Observed(kind, said)
        self.report(f"{name}: {kind} {said}")


def compiled(directory: Path) -> Path:
    """The program, linked statically: it runs in any image."""
    program = directory / "states"
    sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
    options = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Wno-missing-field-initializers", "-Werror", "-static"]
    subprocess.run(["cc", *options, "-o", str(program), *sources], check=True)
    return program


def rows(program: Path) -> list[Row]:
    """The table, as the program has it."""
    listed = subprocess.run([str(program), "list"], check=True, capture_output=True, text=True).stdout
    return [Row(*line.split("\t")) for line in listed.splitlines()]


class States:
    """Sandboxes with processes in given states."""

    def __init__(self, ours: Ours, program: Path, result: CrashResult):
        self._ours = ours
        self._program = program
        self._result = result

    async def classify(self, target: Sequence[Row]) -> None:
        """Fill in what is seen of each of these rows."""
        together = [row for row in target if row.promise.kind not in ("refused",)]
        for first in range(0, len(together), TOGETHER):
            await self._divide([row.name for row in together[first : first + TOGETHER]])
        for row in target:
            if row.promise.kind == "refused":
                await self._divide([row.name])

    async def _divide(self, names: list[str]) -> None:
        failed = await self._try(names)
        if failed is None:
            return
        left = [name for name in names if name not in self._result.observed]
        if len(left) == 1:
            kind = "refused" if isinstance(failed, CheckpointFailed) else "broken"
            self._result.note(left[0], kind, f"{failed} | hint: {failed.hint}")
        else:
            await self._divide(left[: len(left) // 2])
            await self._divide(left[len(left) // 2 :])

    @contextlib.asynccontextmanager
    async def _sandbox(self) -> AsyncIterator[Container]:
        spec = self._ours.spec()
        await asyncio.to_thread(shutil.copy, self._program, spec.tree / "upper" / f"{PLACE}.bin")
        container = await Container.create(spec)
        try:
            yield container
        finally:
            await self._ours.checkpointer.forget(container)
            await container.destroy()

    async def _call(self, container: Container, verb: str, names: Sequence[str]) -> dict[str, str]:
        words = ["/bin/sh", "-c", f'mkdir -p /{PLACE}; exec /{PLACE}.bin "$@"', "states", verb, f"/{PLACE}", *names]
        done = await container.exec(words, timeout=TIMEOUT)
        if done.exit_code:
            raise RuntimeError(f"states {verb}: {done.exit_code} {done.stderr.decode()}")
        lines = done.stdout.decode(errors="replace").splitlines()
        return {name: text for name, _, text in (line.partition("\t") for line in lines)}

    async def _try(self, names: list[str]) -> PagurusError | None:
        """All of these at once; returns why they could not be captured or restored."""
        async with self._sandbox() as container:
            made = await self._call(container, "start", names)
            for name, text in made.items():
                if text.startswith("impossible: "):
                    self._result.note(name, "impossible", text.removeprefix("impossible: "))
            names = [name for name in names if name not in self._result.observed]
            if not names:
                return None
            before = await self._call(container, "ask", names)
            if not (names := await self._without_blind(names, before)):
                return None
            again = await self._call(container, "ask", names)
            self._note_unlike(names, before, again, "unstable")
            names = [name for name in names if name not in self._result.observed]
            if not names:
                return None
            trees: list[Path] = []
            number = next(self._ours.numbers)
            try:
                capture = await self._ours.checkpointer.capture(
                    container,
                    self._ours.checkpointer.captures / f"s{number}",
                    on_frozen=lambda: trees.append(self._ours.snapshot(container.tree, readonly=True)),
                )
            except CheckpointFailed as error:
                return error
            live = await self._call(container, "ask", names)
            try:
                await self._ours.checkpointer.forget(container)
                await container.kill()
                await container.remount(self._ours.snapshot(trees[0], readonly=False))
                await self._ours.checkpointer.restore(container, capture.dir)
                restored = await self._call(container, "ask", names)
                forked = await self._fork(capture.dir, trees[0], names)
            except PagurusError as error:
                return error
            finally:
                await asyncio.to_thread(shutil.rmtree, capture.dir)
        self._note_unlike(names, before, live, "disturbed")
        self._note_unlike(names, before, restored, "differs")
        self._note_unlike(names, before, forked, "differs", "in the fork: ")
        for name in names:
            if name not in self._result.observed:
                self._result.note(name, "restored")
        return None

    async def _without_blind(self, names: list[str], before: dict[str, str]) -> list[str]:
        """A process that did not make the state must see something else, or the look proves nothing."""
        async with self._sandbox() as plain:
            await self._call(plain, "plain", names)
            unmade = await self._call(plain, "ask", names)
        for name in names:
            if unmade.get(name) == before.get(name) and name not in ALWAYS:
                self._result.note(name, "blind", f"also without it: {before[name][:80]}")
        return [name for name in names if name not in self._result.observed]

    async def _fork(self, images: Path, tree: Path, names: Sequence[str]) -> dict[str, str]:
        child = await Container.prepare(self._ours.spec(self._ours.snapshot(tree, readonly=False)))
        try:
            await self._ours.checkpointer.restore(child, images)
            return await self._call(child, "ask", names)
        finally:
            await self._ours.checkpointer.forget(child)
            await child.destroy()

    def _note_unlike(
        self, names: Sequence[str], before: dict[str, str], after: dict[str, str], kind: str, where: str = ""
    ) -> None:
        for name in names:
            old, new = before.get(name, "no answer"), after.get(name, "no answer")
            if (old != new or old == "no answer") and name not in self._result.observed:
                self._result.note(name, kind, f"{where}{_around(old, new)} became {_around(new, old)}")


def _around(text: str, other: str) -> str:
    """Of two texts the part that differs, with a little of what is before it."""
    same = next((at for at, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    return repr(text[max(0, same - 30) : same + 50])


async def poll(image: Path, only: Sequence[str], report: Callable[[str], None]) -> tuple[list[Row], CrashResult]:
    """Classify all rows, or those with these names or groups, in sandboxes of their own."""
    directory = aftermath.directory("pagurus-bench-", "/var/tmp")
    result = CrashResult(report=report)
    try:
        program = await asyncio.to_thread(compiled, directory)
        target = [row for row in rows(program) if not only or row.name in only or row.group in only]
        async with Ours(directory, image) as ours:
            await States(ours, program, result).classify(target)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return target, result
