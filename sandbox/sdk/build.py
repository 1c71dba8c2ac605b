"""Images from Dockerfiles, built in sandboxes: ``host.images.build``.

Owns: carrying out the stages of a Dockerfile in sandboxes that are gone at the end. Does not own: the language
(:mod:`sandbox.image.dockerfile`), the keys of steps (:mod:`sandbox.sdk.plan`), the context
(:mod:`sandbox.sdk.context`), mounts of a RUN (:mod:`sandbox.sdk.build_mounts`), what was built before (the daemon keeps
it). Guarantee: a RUN has no more rights than any command in a sandbox; nothing outside the context directory is read; a
failure names the line and leaves no image and no sandbox behind. A step that is kept under its key is not carried out
again, and a stage of which nothing is missing is not begun.

::

    parse ▸ plan: the key of each step ▸ which are kept? ▸ from the last kept one on: carry out ▸ checkpoint ▸ keep
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import posixpath
import re
import secrets
import shlex
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from msgspec import ValidationError, convert

from sandbox.errors import CheckpointFailed, CommandNotFound, Conflict, Invalid, NotFound, PagurusError
from sandbox.image import reference
from sandbox.image.dockerfile import BuildStage, Instruction
from sandbox.messages import ImageInfo, Limits, Network
from sandbox.messages.images import ImageName
from sandbox.sdk import build_mounts, context, fetch, plan
from sandbox.sdk.context import Ignored
from sandbox.sdk.handle import Sandbox
from sandbox.sdk.plan import BuildStep, StageState
from sandbox.tree import host_files

if TYPE_CHECKING:
    from sandbox.sdk.client import Client

SCRATCH = "scratch"
STEP_TIMEOUT = 3600.0  # seconds of one RUN
OUTPUT = 4000  # characters of a failed command's output that the error repeats
NO_NAMES = re.compile(
    "Temporary failure (in name )?resol|Could not resolve|Name or service not known|Network is unreachable"
    "|Failed to resolve|getaddrinfo|bad address|EAI_AGAIN"
)
Output = Callable[[str], Any]


@dataclass
class _Stage:
    """A stage that is planned, and later built as far as somebody needs it."""

    title: str
    base: _Stage | str  # a former stage, or an image
    state: StageState  # behind all of its steps
    key: str  # of the tree behind all of its steps
    steps: list[BuildStep] = field(default_factory=list)
    checkpoint: str | None = None  # of that tree, once there is one
    sandbox: Sandbox | None = None  # that stands on it
    shown: bool = False
    first: int = 1  # number of its first step, among all of the build


class _Lines:
    """Output in pieces becomes whole lines; `tail` keeps the end of it."""

    def __init__(self, output: Output) -> None:
        self._output, self._rest, self.tail = output, "", ""
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, data: bytes, *, final: bool = False) -> None:
        text = self._decode(data, final)
        self.tail = (self.tail + text)[-OUTPUT:]
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines + ([self._rest] if final and self._rest else []):
            self._output(line.rpartition("\r")[2] if not line.endswith("\r") else line.rstrip("\r"))


class Builder:
    """One build: ``await Builder(host, context, stages, ...).build("name")``."""

    def __init__(
        self,
        host: Client,
        folder: Path,
        stages: list[BuildStage],
        *,
        network: Network,
        limits: Limits,
        cache: bool = True,
        secrets: Mapping[str, bytes] | None = None,
        output: Output | None = None,
    ) -> None:
        self._host = host
        self._context = folder
        self._stages = stages
        self._network = network
        self._limits = limits
        self._cache = cache
        self._secrets = secrets or {}
        self._shows = output is not None
        self._output = output or (lambda line: None)
        self._hashes = context.Hashes.of_context(folder) if cache else context.Hashes(None)
        self._fetched: dict[tuple[int, str], Path] = {}  # line and address of an ADD -> the file
        self._count = 0  # steps of all stages that are needed
        self._planned: dict[str, _Stage] = {}
        self._origins: dict[int, _Stage | None] = {}  # line of a COPY --from -> its stage; None: an image
        self._kept: dict[str, str] = {}  # key of a step -> the checkpoint behind it
        self._keeping: list[asyncio.Future[None]] = []
        self._carried_out = 0
        self._undo = contextlib.AsyncExitStack()

    async def build(self, name: str, *, target: str | None = None, replace_name: bool = False) -> ImageInfo:
        """Carry out the stages up to `target` (the last one) and give what came out the name `name`."""
        last = self._position(target)
        await self._look_at_name(name, replace_name)
        async with self._undo:
            try:
                for number in sorted(plan.needed(self._stages, last)):
                    await self._plan(number, self._stages[number])
                await asyncio.to_thread(self._hashes.save)
                keys = [step.key for stage in self._planned.values() for step in stage.steps if step.key is not None]
                if self._cache and keys:
                    found = await self._host.images.find_steps(list(dict.fromkeys(keys)))
                    self._kept = {step.key: step.checkpoint for step in found}
                made = await self._commit(self._planned[str(last)], name, replace_name)
            finally:
                await asyncio.gather(*self._keeping)
        if not self._carried_out:
            self._output("nothing was run: every step is kept from an earlier build")
        return made

    async def _look_at_name(self, name: str, replace_name: bool) -> None:
        """A name that the image cannot have is refused before anything is built, as it would be at the end."""
        try:
            convert(name, ImageName)
        except ValidationError:
            raise Invalid(f"{name!r} is no name of an image", remedy="write it like debian or team/tools:1.2") from None
        if not replace_name and name in {each.name for each in await self._host.images.list()}:
            raise Conflict(f"image {name} exists already", remedy=f"replace it, or pagurus image rm {name}")

    async def _commit(self, stage: _Stage, name: str, replace_name: bool) -> ImageInfo:
        commit, config = self._host.images.commit, stage.state.config()
        checkpoint = await self._checkpoint(stage)
        try:
            return await commit(checkpoint, name, config=config, replace=replace_name)
        except NotFound:
            if checkpoint not in self._kept.values():
                raise
        self._kept.clear()  # somebody removed what was kept, just now
        stage.checkpoint = None
        return await commit(await self._checkpoint(stage), name, config=config, replace=replace_name)

    def _position(self, target: str | None) -> int:
        if target is None:
            return len(self._stages) - 1
        for number, stage in enumerate(self._stages):
            if target.lower() in (stage.name, str(number)):
                return number
        raise Invalid(f"the Dockerfile has no stage {target}")

    # ----------------------------------------------------------------- planning

    async def _plan(self, number: int, stage: BuildStage) -> None:
        base: _Stage | str = self._planned.get(stage.base.lower(), stage.base)
        if isinstance(base, _Stage):
            state, key = replace(base.state, arguments={}), base.key
        else:
            image = await self._image(base)
            state, key = StageState.of(image.config), plan.image_key(image.digest)
        title = f"FROM {stage.base}" + (f" AS {stage.name}" if stage.name != str(number) else "")
        planned = _Stage(title, base, state, key, first=self._count + 1)
        self._count += len(stage.instructions)
        for instruction in stage.instructions:
            planned.state = planned.state.after(instruction)
            changing = instruction.kind in plan.CHANGING
            if changing:
                planned.key = plan.step_key(
                    planned.key,
                    instruction,
                    planned.state,
                    content=await self._content(instruction),
                    network=self._network,
                    limits=self._limits,
                )
            planned.steps.append(BuildStep(instruction, planned.state, planned.key if changing else None))
        self._planned[str(number)] = self._planned[stage.name] = planned

    async def _content(self, instruction: Instruction) -> str:
        """What an instruction copies: a digest, or the key of the tree that it copies from."""
        if instruction.kind not in ("COPY", "ADD"):
            return ""
        if (origin := instruction.flags.get("from")) is not None:
            known = self._origins[instruction.line] = self._planned.get(origin.lower())
            return known.key if known is not None else plan.image_key((await self._image(origin)).digest)
        fetched = [await self._fetch(address, instruction) for address in plan.addresses(instruction)]
        return " ".join([await asyncio.to_thread(self._digest, instruction), *fetched])

    async def _fetch(self, address: str, instruction: Instruction) -> str:
        """The checksum of what an ADD fetches; without one in the Dockerfile it is fetched now, to know it."""
        if (checksum := instruction.flags.get("checksum")) is not None and self._cache:
            return checksum
        return (await self._file_of(address, instruction))[1]

    async def _file_of(self, address: str, instruction: Instruction) -> tuple[Path, str]:
        folder = self._undo.enter_context(host_files.fresh_directory())
        try:
            file, seen = await fetch.fetch(address, folder, checksum=instruction.flags.get("checksum"))
        except Invalid as error:
            raise Invalid(f"line {instruction.line}: {error.message}", remedy=error.remedy) from error
        self._fetched[instruction.line, address] = file
        return file, f"sha256:{seen}"

    def _digest(self, instruction: Instruction) -> str:
        ignored = context.ignored(self._context)
        paths = context.matching(self._context, plan.sources(instruction), ignored, instruction)
        return context.digest(self._context, paths, ignored, self._hashes)

    async def _image(self, name: str) -> ImageInfo:
        if name == SCRATCH:
            await self._need_scratch()
        try:
            return await self._host.images.get(name)
        except NotFound:
            if not reference.is_one(name):
                raise
        self._output(f"pull {reference.parse(name).address}")
        try:
            return await self._host.images.pull(name)
        except PagurusError as error:
            text = f"no image {name!r} on this host, and {error.message}"
            raise type(error)(text, remedy=error.remedy) from error

    async def _need_scratch(self) -> None:
        with contextlib.suppress(NotFound):
            await self._host.images.get(SCRATCH)
            return
        with tempfile.NamedTemporaryFile(suffix=".tar") as empty:
            with tarfile.open(fileobj=empty, mode="w"):
                pass
            empty.flush()
            await self._host.images.upload(SCRATCH, empty.name, replace=True)

    # ----------------------------------------------------------------- stages

    async def _checkpoint(self, stage: _Stage) -> str:
        """A checkpoint of the tree behind a stage. Where it is kept, nothing is carried out."""
        if stage.checkpoint is None:
            last = next((step.key for step in reversed(stage.steps) if step.key is not None), None)
            if last is None and isinstance(stage.base, _Stage):
                stage.checkpoint = await self._checkpoint(stage.base)
            elif last in self._kept:
                stage.checkpoint = self._kept[last]
            if stage.checkpoint is not None:
                self._show(stage, len(stage.steps))
        if stage.checkpoint is None:
            sandbox = await self._sandbox(stage)
            if stage.checkpoint is None:
                stage.checkpoint = (await sandbox.checkpoint()).id
        return stage.checkpoint

    async def _sandbox(self, stage: _Stage) -> Sandbox:
        """A sandbox that stands on the tree behind a stage."""
        if stage.sandbox is None:
            stage.sandbox, done = await self._begin(stage)
            self._show(stage, done)
            for number, step in enumerate(stage.steps[done:], stage.first + done):
                began = time.monotonic()
                self._output(f"[{number}/{self._count}] {step.title}")
                await self._step(stage, stage.sandbox, step)
                if step.key is not None:
                    self._output(f"[{number}/{self._count}] took {time.monotonic() - began:.1f} s")
        return stage.sandbox

    async def _begin(self, stage: _Stage) -> tuple[Sandbox, int]:
        """A sandbox that stands on the last kept step of a stage or on its base; how many steps are behind it."""
        for done in range(len(stage.steps), 0, -1):
            checkpoint = self._kept.get(stage.steps[done - 1].key or "")
            if checkpoint is not None:
                with contextlib.suppress(PagurusError):  # removed just now: the step before it, then
                    return await self._fork(checkpoint), done
        if isinstance(stage.base, _Stage):
            return await self._fork(await self._checkpoint(stage.base)), 0
        return await self._create(stage.base), 0

    async def _fork(self, checkpoint: str) -> Sandbox:
        (fork,) = await self._host.fork(checkpoint)
        return await self._undo.enter_async_context(fork.sandbox)

    async def _create(self, image: str) -> Sandbox:
        made = self._host.create(image, network=self._network, limits=self._limits)
        return await self._undo.enter_async_context(made)

    def _show(self, stage: _Stage, done: int) -> None:
        if stage.shown:
            return
        stage.shown = True
        self._output(stage.title)
        for number, step in enumerate(stage.steps[:done], stage.first):
            self._output(f"[{number}/{self._count}] {step.title}" + (" (kept)" if step.key is not None else ""))

    # ----------------------------------------------------------------- steps

    async def _step(self, stage: _Stage, sandbox: Sandbox, step: BuildStep) -> None:
        instruction, state = step.instruction, step.state
        if step.key is None:
            return
        self._carried_out += 1
        if instruction.kind == "WORKDIR":
            await sandbox.files.mkdir(str(state.workdir))
        elif instruction.kind == "RUN":
            await self._run(sandbox, state, instruction)
        else:
            await self._copy(sandbox, state, instruction)
        stage.checkpoint = None
        try:
            stage.checkpoint = (await sandbox.checkpoint()).id
        except CheckpointFailed as error:  # something that still runs; the last checkpoint of all must succeed
            self._output(f"line {instruction.line}: this step is not kept: {error.message}")
            return
        self._keeping.append(asyncio.ensure_future(self._keep(step.key, stage.checkpoint, step.title)))

    async def _keep(self, key: str, checkpoint: str, title: str) -> None:
        try:
            await self._host.images.keep_step(key, checkpoint, title)
        except PagurusError as error:  # a full disk, a daemon that goes: the image does not depend on it
            self._output(f"{title}: not kept for the next build: {error.message}")

    async def _run(self, sandbox: Sandbox, state: StageState, instruction: Instruction) -> None:
        command, variables = state.command(instruction), state.variables
        script = instruction.words[0] if instruction.documents else ""

        async def execute(argv: Sequence[str]) -> None:
            await self._exec(sandbox, [*argv], instruction)

        try:
            async with build_mounts.mounted(sandbox, instruction, self._secrets, execute) as secret:
                if script.startswith("#!"):  # a here-document for another interpreter than the shell
                    command = [f"/.pagurus-run-{secrets.token_hex(4)}"]
                    await sandbox.files.write(command[0], script, mode=0o755)
                env = {**variables, **secret}
                await self._exec(sandbox, command, instruction, env=env, cwd=state.workdir, user=state.user or 0)
                if script.startswith("#!"):
                    await sandbox.files.remove(command[0])
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
        lines = _Lines(self._output)
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
                lines.feed(chunk.data)
                continue
            lines.feed(b"", final=True)
            if chunk.result.timed_out or chunk.result.exit_code:
                why = "took too long" if chunk.result.timed_out else f"exit code {chunk.result.exit_code}"
                said = "" if self._shows else f"\n{lines.tail.strip()}"  # who was shown it has read it
                unreached = self._network.mode != "open" and NO_NAMES.search(lines.tail)
                raise Invalid(
                    f"line {instruction.line}: {instruction.kind} failed: {why}{said}",
                    remedy="RUN reaches no network unless told: build with --network open" if unreached else "",
                )

    # ----------------------------------------------------------------- copying

    async def _copy(self, sandbox: Sandbox, state: StageState, instruction: Instruction) -> None:
        sources, target = plan.sources(instruction), instruction.words[-1]
        place = state.workdir / target
        several = len(instruction.words) - 1 + len(instruction.documents) > 1
        into = target.endswith("/") or target in (".", "..") or several
        copied: list[str] = []
        for document in instruction.documents:
            copied.append(str(place / document.name if into else place))
            await sandbox.files.write(copied[-1], document.text)
        for address in plan.addresses(instruction):
            file = self._fetched.get((instruction.line, address)) or (await self._file_of(address, instruction))[0]
            await asyncio.to_thread(file.chmod, 0o600)
            copied += await self._copy_file(sandbox, file, place, into)
        async with self._sources(instruction, sources) as found:
            for root, ignored, named in found:
                for path in await asyncio.to_thread(context.matching, root, named, ignored, instruction):
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
        ignored: Ignored,
        place: PurePosixPath,
        into: bool,
        instruction: Instruction,
    ) -> list[str]:
        kind = await asyncio.to_thread(context.kind, path)
        if instruction.kind == "ADD" and kind == "archive":
            aside = f"/.pagurus-add-{secrets.token_hex(4)}"
            await sandbox.files.upload(path, aside)
            await sandbox.files.mkdir(str(place))
            archive = shlex.join(["tar", "-xf", f"{aside}/{path.name}", "-C", str(place)])
            await self._exec(sandbox, ["/bin/sh", "-c", archive], instruction)
            await sandbox.files.remove(aside, recursive=True)
            return []
        if kind == "directory":
            with host_files.fresh_directory() as chosen:
                kept = await asyncio.to_thread(context.gather, path, root, ignored, chosen)
                await sandbox.files.upload(chosen, str(place))
            return [str(place / name) for name in kept]
        return await self._copy_file(sandbox, path, place, into)

    async def _copy_file(self, sandbox: Sandbox, path: Path, place: PurePosixPath, into: bool) -> list[str]:
        if into:
            await sandbox.files.upload(path, str(place))
            return [str(place / path.name)]
        aside = f"/.pagurus-copy-{secrets.token_hex(4)}"
        await sandbox.files.upload(path, aside)
        await sandbox.files.move(f"{aside}/{path.name}", str(place))
        await sandbox.files.remove(aside, recursive=True)
        return [str(place)]

    @contextlib.asynccontextmanager
    async def _sources(
        self, instruction: Instruction, sources: list[str]
    ) -> AsyncIterator[list[tuple[Path, Ignored, list[str]]]]:
        """Directories with the sources that are relative to each: the context, or one for each source elsewhere.

        What comes from another stage is a stranger's: each source gets a fresh directory, where nothing that another
        one has brought is in its way.
        """
        origin = instruction.flags.get("from")
        if origin is None:
            yield [(self._context, await asyncio.to_thread(context.ignored, self._context), sources)]
            return
        known = self._origins[instruction.line]
        sandbox = await (self._create(origin) if known is None else self._sandbox(known))
        found: list[tuple[Path, Ignored, list[str]]] = []
        with contextlib.ExitStack() as undo:
            for source in instruction.words[:-1]:
                if any(char in source for char in "*?["):
                    raise Invalid(f"line {instruction.line}: patterns with --from are not supported")
                inside = PurePosixPath(posixpath.normpath(f"/{source}"))  # ".." does not lead above the root
                fresh = undo.enter_context(host_files.fresh_directory())
                kind = (await sandbox.files.stat(str(inside))).kind if inside.name else "directory"
                below = inside.name if kind == "directory" else ""
                await sandbox.files.download(str(inside), fresh, below=below)
                found.append((fresh, lambda path: False, [inside.name]))
            yield found
