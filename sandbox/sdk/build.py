"""Images from Dockerfiles, built in sandboxes: ``host.images.build``.

Owns: carrying out the stages of a Dockerfile, each in a sandbox of its own that is gone at the end. Does not own: the
language (:mod:`sandbox.dockerfile`). Guarantee: a RUN has no more rights than any command in a sandbox; nothing outside
the context directory is read; a failure names the line and leaves no image and no sandbox behind.

Not here: a cache of steps, RUN --mount, ADD from an address, here-documents. Those are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shlex
import shutil
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from sandbox import dockerfile
from sandbox.dockerfile import Instruction, Stage
from sandbox.errors import CommandNotFound, Invalid, NotFound
from sandbox.messages import ImageConfig, ImageInfo, Limits, Network
from sandbox.sdk.handle import Sandbox

if TYPE_CHECKING:
    from sandbox.sdk.client import Client

SCRATCH = "scratch"
STEP_TIMEOUT = 3600.0  # seconds of one RUN
OUTPUT = 4000  # characters of a failed command's output that the error repeats
Output = Callable[[str], Any]


@dataclass
class _State:
    """What the instructions of a stage have set so far."""

    env: dict[str, str]
    arguments: dict[str, str] = field(default_factory=dict)
    workdir: PurePosixPath = field(default_factory=lambda: PurePosixPath("/"))
    user: str = ""
    shell: tuple[str, ...] = ("/bin/sh", "-c")
    entrypoint: list[str] = field(default_factory=list)
    cmd: list[str] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, config: ImageConfig) -> _State:
        return cls(
            dict(config.env),
            workdir=PurePosixPath("/", config.workdir),
            user=config.user,
            entrypoint=list(config.entrypoint),
            cmd=list(config.cmd),
            labels=dict(config.labels),
        )

    def config(self) -> ImageConfig:
        return ImageConfig(
            env=self.env,
            workdir=str(self.workdir),
            user=self.user,
            entrypoint=self.entrypoint,
            cmd=self.cmd,
            labels=self.labels,
        )


class Builder:
    """One build: ``await Builder(host, context, stages, ...).build("name")``."""

    def __init__(
        self,
        host: Client,
        context: Path,
        stages: list[Stage],
        *,
        network: Network,
        limits: Limits,
        output: Output | None = None,
    ) -> None:
        self._host = host
        self._context = context
        self._stages = stages
        self._network = network
        self._limits = limits
        self._output = output or (lambda line: None)
        self._done: dict[str, tuple[Sandbox, _State]] = {}
        self._undo = contextlib.AsyncExitStack()

    async def build(self, name: str, *, target: str | None = None, replace_name: bool = False) -> ImageInfo:
        """Carry out the stages up to `target` (the last one) and give what came out the name `name`."""
        last = self._position(target)
        async with self._undo:
            for number in sorted(_needed(self._stages, last)):
                await self._stage(number, self._stages[number])
            sandbox, state = self._done[str(last)]
            checkpoint = await sandbox.checkpoint(f"image {name}")
            return await self._host.images.commit(checkpoint, name, config=state.config(), replace=replace_name)

    def _position(self, target: str | None) -> int:
        if target is None:
            return len(self._stages) - 1
        for number, stage in enumerate(self._stages):
            if target.lower() in (stage.name, str(number)):
                return number
        raise Invalid(f"the Dockerfile has no stage {target}")

    async def _stage(self, number: int, stage: Stage) -> None:
        self._output(f"FROM {stage.base}" + (f" AS {stage.name}" if stage.name != str(number) else ""))
        if (before := self._done.get(stage.base.lower())) is not None:
            origin, inherited = before
            (fork,) = await origin.fork()
            sandbox, state = await self._undo.enter_async_context(fork.sandbox), replace(inherited, arguments={})
        else:
            sandbox, state = await self._from_image(stage.base)
        for instruction in stage.instructions:
            await self._step(sandbox, state, instruction)
        self._done[str(number)] = self._done[stage.name] = (sandbox, state)

    async def _from_image(self, base: str) -> tuple[Sandbox, _State]:
        if base == SCRATCH:
            await self._need_scratch()
        image = await self._host.images.get(base)
        made = self._host.create(base, network=self._network, limits=self._limits)
        return await self._undo.enter_async_context(made), _State.of(image.config)

    async def _need_scratch(self) -> None:
        with contextlib.suppress(NotFound):
            await self._host.images.get(SCRATCH)
            return
        with tempfile.NamedTemporaryFile(suffix=".tar") as empty:
            with tarfile.open(fileobj=empty, mode="w"):
                pass
            empty.flush()
            await self._host.images.upload(SCRATCH, empty.name, replace=True)

    # ----------------------------------------------------------------- instructions

    async def _step(self, sandbox: Sandbox, state: _State, instruction: Instruction) -> None:
        kind, words = instruction.kind, instruction.words
        self._output(f"{kind} {' '.join(words) or ' '.join(f'{k}={v}' for k, v in instruction.pairs.items())}")
        if kind == "ARG":
            state.arguments.update(instruction.pairs)
        elif kind == "ENV":
            state.env = {**state.env, **instruction.pairs}
        elif kind == "LABEL":
            state.labels = {**state.labels, **instruction.pairs}
        elif kind == "WORKDIR":
            state.workdir = state.workdir / words[0]
            await sandbox.files.mkdir(str(state.workdir))
        elif kind == "USER":
            state.user = words[0]
        elif kind == "SHELL":
            state.shell = words
        elif kind in ("CMD", "ENTRYPOINT"):
            command = [*state.shell, *words] if instruction.shell else list(words)
            if kind == "CMD":
                state.cmd = command
            else:
                state.entrypoint, state.cmd = command, []
        elif kind == "RUN":
            await self._run(sandbox, state, instruction)
        else:
            await self._copy(sandbox, state, instruction)

    async def _run(self, sandbox: Sandbox, state: _State, instruction: Instruction) -> None:
        command = [*state.shell, *instruction.words] if instruction.shell else list(instruction.words)
        env = {**state.arguments, **state.env}
        try:
            await self._exec(sandbox, command, instruction, env=env, cwd=state.workdir, user=state.user or 0)
        except (Invalid, CommandNotFound) as error:  # no such user, working directory, shell
            here = f"line {instruction.line}: "
            raise Invalid(here + error.message.removeprefix(here), remedy=error.remedy) from error

    async def _exec(
        self,
        sandbox: Sandbox,
        command: list[str],
        instruction: Instruction,
        *,
        env: dict[str, str] | None = None,
        cwd: PurePosixPath | None = None,
        user: int | str = 0,
        stdin: bytes = b"",
    ) -> None:
        tail = ""
        streamed = sandbox.stream(
            command,
            env=env,
            cwd=str(cwd) if cwd else None,
            user=user,
            stdin=stdin,
            timeout=STEP_TIMEOUT,
            ends_turn=False,
        )
        async for chunk in streamed:
            if chunk.result is None:
                text = chunk.data.decode("utf-8", "replace")
                tail = (tail + text)[-OUTPUT:]
                self._output(text.rstrip("\n"))
            elif chunk.result.timed_out or chunk.result.exit_code:
                why = "took too long" if chunk.result.timed_out else f"exit code {chunk.result.exit_code}"
                raise Invalid(f"line {instruction.line}: {instruction.kind} failed: {why}\n{tail.strip()}")

    # ----------------------------------------------------------------- copying

    async def _copy(self, sandbox: Sandbox, state: _State, instruction: Instruction) -> None:
        *sources, target = instruction.words
        place = state.workdir / target
        into = target.endswith("/") or target in (".", "..") or len(sources) > 1
        copied: list[str] = []
        async with self._source(instruction) as (root, ignored):
            for path in await asyncio.to_thread(_matching, root, sources, ignored, instruction):
                copied += await self._copy_one(sandbox, path, root, ignored, place, into, instruction)
        for flag, program in (("chown", "chown"), ("chmod", "chmod")):
            if (wanted := instruction.flags.get(flag)) and copied:
                options = ["-h"] if program == "chown" else []
                listed = "\0".join(copied).encode()
                await self._exec(sandbox, ["xargs", "-0", program, *options, wanted], instruction, stdin=listed)

    async def _copy_one(
        self,
        sandbox: Sandbox,
        path: Path,
        root: Path,
        ignored: Callable[[Path], bool],
        place: PurePosixPath,
        into: bool,
        instruction: Instruction,
    ) -> list[str]:
        kind = await asyncio.to_thread(_kind, path)
        if instruction.kind == "ADD" and kind == "archive":
            aside = f"/.pagurus-add-{secrets.token_hex(4)}"
            await sandbox.files.upload(path, aside)
            await sandbox.files.mkdir(str(place))
            archive = shlex.join(["tar", "-xf", f"{aside}/{path.name}", "-C", str(place)])
            await self._exec(sandbox, ["/bin/sh", "-c", archive], instruction)
            await sandbox.files.remove(aside, recursive=True)
            return []
        if kind == "directory":
            with tempfile.TemporaryDirectory() as chosen:
                kept = await asyncio.to_thread(_gather, path, root, ignored, Path(chosen))
                await sandbox.files.upload(chosen, str(place))
            return [str(place / name) for name in kept]
        if into:
            await sandbox.files.upload(path, str(place))
            return [str(place / path.name)]
        aside = f"/.pagurus-copy-{secrets.token_hex(4)}"
        await sandbox.files.upload(path, aside)
        await sandbox.files.move(f"{aside}/{path.name}", str(place))
        await sandbox.files.remove(aside, recursive=True)
        return [str(place)]

    @contextlib.asynccontextmanager
    async def _source(self, instruction: Instruction) -> AsyncIterator[tuple[Path, Callable[[Path], bool]]]:
        """The directory that sources are relative to: the context, or what the sources name of another stage."""
        origin = instruction.flags.get("from")
        if origin is None:
            yield self._context, await asyncio.to_thread(_ignored, self._context)
            return
        if (found := self._done.get(origin.lower())) is not None:
            sandbox = found[0]
        else:
            sandbox, _ = await self._from_image(origin)
        with tempfile.TemporaryDirectory() as folder:
            for source in instruction.words[:-1]:
                if any(char in source for char in "*?["):
                    raise Invalid(f"line {instruction.line}: patterns with --from are not supported")
                pure = PurePosixPath("/", source)
                inside = Path(folder, *pure.parts[1:])
                kind = (await sandbox.files.stat(str(pure))).kind if pure.name else "directory"
                await sandbox.files.download(str(pure), inside if kind == "directory" else inside.parent)
            yield Path(folder), lambda path: False


def _needed(stages: list[Stage], last: int) -> set[int]:
    """The stages that `last` is made of."""
    names = {stage.name: number for number, stage in enumerate(stages)}
    names |= {str(number): number for number in range(len(stages))}
    needed, pending = set(), [last]
    while pending:
        number = pending.pop()
        if number in needed:
            continue
        needed.add(number)
        stage = stages[number]
        wanted = [stage.base, *(step.flags.get("from", "") for step in stage.instructions)]
        pending += [names[name.lower()] for name in wanted if names.get(name.lower(), number) < number]
    return needed


def _ignored(context: Path) -> Callable[[Path], bool]:
    """Whether a path below the context is left out by its .dockerignore."""
    from docker.utils.build import PatternMatcher

    file = context / ".dockerignore"
    lines = file.read_text().splitlines() if file.is_file() else []
    matcher = PatternMatcher([line.strip() for line in lines if line.strip() and not line.startswith("#")])
    return lambda path: bool(lines) and matcher.matches(str(path.relative_to(context)))


def _matching(root: Path, sources: list[str], ignored: Callable[[Path], bool], instruction: Instruction) -> list[Path]:
    found: list[Path] = []
    for source in sources:
        parts = PurePosixPath("/", source).parts[1:]
        if ".." in parts:
            raise Invalid(f"line {instruction.line}: {source} lies outside the context")
        pattern = "/".join(parts)
        matches = sorted(root.glob(pattern)) if pattern else [root]
        matches = [path for path in matches if path == root or not ignored(path)]
        if any(not path.resolve().is_relative_to(root.resolve()) for path in matches):
            raise Invalid(f"line {instruction.line}: {source} leads out of the context")
        if not matches:
            raise Invalid(f"line {instruction.line}: {source} is not in the context")
        found += matches
    return found


def _kind(path: Path) -> str:
    if path.is_dir():
        return "directory"
    return "archive" if tarfile.is_tarfile(path) else "file"


def _gather(path: Path, root: Path, ignored: Callable[[Path], bool], chosen: Path) -> list[str]:
    """Copy a directory's content but for what is ignored; the relative names."""
    kept = []
    for entry in sorted(path.rglob("*")):
        relative = entry.relative_to(path)
        if any(ignored(parent) for parent in (entry, *entry.parents) if parent != root and parent.is_relative_to(root)):
            continue
        target = chosen / relative
        if entry.is_dir() and not entry.is_symlink():
            target.mkdir(parents=True, exist_ok=True)
            shutil.copystat(entry, target)
        elif entry.is_symlink() or entry.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(entry, target, follow_symlinks=False)
        else:
            continue
        kept.append(str(relative))
    return kept


async def build(
    host: Client,
    name: str,
    context: str | Path,
    *,
    file: str | Path | None = None,
    arguments: dict[str, str] | None = None,
    target: str | None = None,
    network: Network | None = None,
    limits: Limits | None = None,
    replace: bool = False,
    output: Output | None = None,
) -> ImageInfo:
    """See :meth:`sandbox.sdk.images.Images.build`."""
    folder = Path(context)
    text = await asyncio.to_thread(Path(file).read_text if file else (folder / "Dockerfile").read_text)
    builder = Builder(
        host,
        folder,
        dockerfile.parse(text, arguments),
        network=network or Network.none(),
        limits=limits or Limits(),
        output=output,
    )
    return await builder.build(name, target=target, replace_name=replace)
