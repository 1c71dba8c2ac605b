"""Images from Dockerfiles, built in sandboxes: ``host.images.build``.

Guarantee: a RUN has no more rights than any command in a sandbox; nothing outside the context directory is read; a
failure names the line and leaves no image and no sandbox behind. A step that is kept under its key is not carried out
again, and a stage of which nothing is missing is not begun.

::

    parse ▸ plan: the key of each step ▸ which are kept? ▸ from the last kept one on: carry out ▸ checkpoint ▸ keep
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import tarfile
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import ValidationError, convert

from sandbox.errors import CheckpointFailed, Conflict, Invalid, NotFound, PagurusError
from sandbox.image import dockerfile, reference
from sandbox.image.dockerfile import BuildStage, Dockerfile, Instruction
from sandbox.image.stages import BuildArguments, CopyInstruction, RunAction, StageState, apply, is_repository
from sandbox.messages import ImageInfo, Limits, Network
from sandbox.messages.images import ImageName
from sandbox.sdk import plan
from sandbox.sdk.handle import Sandbox
from sandbox.sdk.plan import BuildStep
from sandbox.sdk.sources.context import BuildContext, Hashes
from sandbox.sdk.sources.fetch import RemoteSources

if TYPE_CHECKING:
    from sandbox.sdk.build_steps import CopyOrigin, Output, StepRunner
    from sandbox.sdk.client import Client

SCRATCH = "scratch"
_CONTEXTS = "a directory, a git repository (URL#REF:DIRECTORY), or for FROM docker-image://NAME"


@dataclass(eq=False)
class _Stage:
    """A stage that is planned, and later built as far as it is needed."""

    title: str
    base: _Stage | str  # a former stage, or an image
    state: StageState  # behind all of its steps
    key: str  # of the tree behind all of its steps
    triggers: list[str] = field(default_factory=list)  # its ONBUILD instructions
    steps: list[BuildStep] = field(default_factory=list)
    checkpoint: str | None = None  # of that tree, once there is one
    sandbox: Sandbox | None = None  # that is based on it
    shown: bool = False
    first: int = 1  # number of its first step, among all of the build
    building: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def image(self) -> str | None:
        """The image whose tree it has, where none of its steps changes that."""
        if any(step.key is not None for step in self.steps):
            return None
        return self.base if isinstance(self.base, str) else self.base.image


class Builder:
    """One build: ``await Builder(host, context, file, ...).build("name")``."""

    def __init__(
        self,
        host: Client,
        context: BuildContext,
        file: Dockerfile,
        *,
        arguments: Mapping[str, str],
        network: Network,
        limits: Limits,
        cache: bool = True,
        offline: bool = False,
        secrets: Mapping[str, bytes] | None = None,
        agents: Mapping[str, Path] | None = None,
        contexts: Mapping[str, str] | None = None,
        output: Output | None = None,
        log: Output | None = None,
    ) -> None:
        """`log`: gets each line as well, whether or not there is an `output`."""
        self._host = host
        self._context = context
        self._file = file
        self._given = dict(arguments)
        self._network = network
        self._limits = limits
        self._cache = cache
        self._outputs = [item for item in (output, log) if item is not None]
        self._named = {name.lower(): place for name, place in (contexts or {}).items()}
        self._hashes = Hashes.of_context(context.root) if cache and context.lasting else Hashes(None)
        self._offline = offline
        self._sources = RemoteSources(cache, offline)
        self._shows = output is not None
        self._secrets, self._agents = secrets or {}, agents or {}
        self._count = 0  # steps of all stages that are needed
        self._planned: dict[str, _Stage] = {}
        self._retained: dict[str, str] = {}  # key of a step -> the checkpoint behind it
        self._keeping: list[asyncio.Future[None]] = []
        self._carried_out = 0
        self._undo = contextlib.AsyncExitStack()

    @functools.cached_property
    def _steps(self) -> StepRunner:
        from sandbox.sdk.build_steps import StepRunner  # a build that carries nothing out starts sooner without it

        return StepRunner(
            self._host, self._output, self._shows, self._network, self._secrets, self._agents, self._sources
        )

    def _output(self, line: str) -> None:
        for output in self._outputs:
            output(line)

    async def build(self, name: str, *, target: str | None = None, replace_name: bool = False) -> ImageInfo:
        """Carry out the stages up to `target` (the last one) and give what came out the name `name`."""
        last = self._position(target)
        await self._poll_at_name(name, replace_name)
        stages = self._file.stages
        arguments = BuildArguments.of(self._file, self._given, target or stages[-1].name)
        bases = [arguments.base(stage) for stage in stages[: last + 1]]
        async with self._undo:
            self._undo.enter_context(self._sources)
            try:
                for number in sorted(plan.needed(stages[: last + 1], bases, last, self._named)):
                    await self._plan(number, stages[number], bases[number], arguments)
                await asyncio.to_thread(self._hashes.save)
                keys = [step.key for stage in self._planned.values() for step in stage.steps if step.key is not None]
                if self._cache and keys:
                    result = await self._host.images.find_steps(list(dict.fromkeys(keys)))
                    self._retained = {step.key: step.checkpoint for step in result}
                made = await self._commit(self._planned[str(last)], name, replace_name)
            finally:
                await asyncio.gather(*self._keeping)
        if not self._carried_out:
            self._output("nothing was run: every step is kept from an earlier build")
        return made

    async def _poll_at_name(self, name: str, replace_name: bool) -> None:
        """A name that the image cannot have is refused before anything is built, as it would be at the end."""
        try:
            convert(name, ImageName)
        except ValidationError:
            raise Invalid(f"{name!r} is no name of an image", hint="write it like debian or team/tools:1.2") from None
        if not replace_name and name in {item.name for item in await self._host.images.list()}:
            raise Conflict(f"image {name} exists already", hint=f"replace it, or pagurus image rm {name}")

    async def _commit(self, stage: _Stage, name: str, replace_name: bool) -> ImageInfo:
        images, config = self._host.images, stage.state.config
        if stage.image is not None:  # nothing of the tree is new
            self._show(stage, len(stage.steps))
            return await images.give_name(stage.image, name, config=config, replace=replace_name)
        checkpoint = await self._checkpoint(stage)
        try:
            return await images.commit(checkpoint, name, config=config, replace=replace_name)
        except NotFound:
            if checkpoint not in self._retained.values():
                raise
        self._retained.clear()  # a user removed what was kept, just now
        stage.checkpoint = None
        return await images.commit(await self._checkpoint(stage), name, config=config, replace=replace_name)

    def _position(self, target: str | None) -> int:
        if target is None:
            return len(self._file.stages) - 1
        for number, stage in enumerate(self._file.stages):
            if target.lower() in (stage.name, str(number)):
                return number
        raise Invalid(f"the Dockerfile has no stage {target}", hint="name one of its stages, or its number")

    # ----------------------------------------------------------------- planning

    async def _plan(self, number: int, stage: BuildStage, name: str, arguments: BuildArguments) -> None:
        former = not name.isdecimal() and name.lower() not in self._named
        base = self._planned.get(name) if former else None  # in lower case, as with BuildKit
        title = f"FROM {stage.base}" + (f" AS {stage.name}" if stage.name else "")
        if base is not None:
            state, key, triggers = StageState.of(base.state.config, base.state.scope), base.key, base.triggers
            planned = _Stage(title, base, state, key)
        else:
            image = await self._image(self._named_image(name), stage.line)
            state, key, triggers = StageState.of(image.config), plan.image_key(image.digest), image.config.on_build
            planned = _Stage(title, image.name, state, key)
        planned.first = self._count + 1
        instructions = [item for text in triggers for item in _triggered(text, stage.line)] + stage.instructions
        self._count += len(instructions)
        for instruction in instructions:
            await self._plan_step(planned, instruction, arguments)
        planned.triggers = planned.state.config.on_build
        self._planned[str(number)] = planned
        if stage.name:
            self._planned[stage.name] = planned

    async def _plan_step(self, stage: _Stage, instruction: Instruction, arguments: BuildArguments) -> None:
        stage.state, action = apply(instruction, stage.state, arguments)
        key = None
        if action is not None:
            content = ""
            if isinstance(action, CopyInstruction):
                content = await self._content(action, instruction.line)
            elif isinstance(action, RunAction):
                origins = [(m.origin, m.source) for m in action.mounts if m.kind == "bind" or m.origin]
                content = " ".join(
                    [await self._copied(origin, (source,), instruction.line) for origin, source in origins]
                )
            key = stage.key = plan.step_key(
                stage.key, action, content=content, network=self._network, limits=self._limits
            )
        stage.steps.append(BuildStep(instruction, stage.state, action, key))

    async def _content(self, action: CopyInstruction, line: int) -> str:
        """What an instruction copies: a digest, or the key of the tree that it copies from."""
        copied = await self._copied(action.origin, action.sources, line) if action.sources else ""
        return " ".join([copied, *await self._sources.digests(action, line)])

    async def _copied(self, origin: str, sources: tuple[str, ...], line: int) -> str:
        result = await self._origin(origin, line)
        if isinstance(result, BuildContext):
            selection = await asyncio.to_thread(result.select, sources, line)
            hashes = self._hashes if result is self._context else Hashes(None)
            return await asyncio.to_thread(selection.digest, hashes)
        return result.key if isinstance(result, _Stage) else plan.image_key(result.digest)

    async def _origin(self, name: str, line: int) -> BuildContext | _Stage | ImageInfo:
        """What ``--from`` names: the context, a former stage, a context with a name, an image."""
        if not name:
            return self._context
        place = self._named.get(name.lower())  # which replaces a stage of that name
        if place is not None and is_repository(place):
            return await asyncio.to_thread(BuildContext.of, await self._sources.repository(place), lasting=False)
        if place is not None and "://" not in place:
            return await asyncio.to_thread(BuildContext.of, _directory(place, name))
        if place is None and (stage := self._planned.get(name.lower())) is not None:
            return stage
        return await self._image(self._named_image(name), line)

    def _named_image(self, name: str) -> str:
        place = self._named.get(name.lower())
        if place is None:
            return name
        kind, _, image = place.partition("://")
        if kind != "docker-image" or not image:
            raise Invalid(f"--build-context {name}={place} is no image", hint=_CONTEXTS)
        return image

    async def _image(self, name: str, line: int) -> ImageInfo:
        if name == SCRATCH:
            await self._need_scratch()
        try:
            return await self._host.images.get(name)
        except NotFound:
            if self._offline or not reference.is_one(name):
                raise
        self._output(f"pull {reference.parse(name).address}")
        try:
            return await self._host.images.pull(name)
        except PagurusError as error:
            text = f"line {line}: no image {name!r} on this host, and {error.message}"
            raise type(error)(text, hint=error.hint) from error

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
        async with stage.building:
            if stage.checkpoint is None:
                last = next((step.key for step in reversed(stage.steps) if step.key is not None), None)
                if last is None and isinstance(stage.base, _Stage):
                    stage.checkpoint = await self._checkpoint(stage.base)
                elif last in self._retained:
                    stage.checkpoint = self._retained[last]
                if stage.checkpoint is not None:
                    self._show(stage, len(stage.steps))
            if stage.checkpoint is None:
                sandbox = await self._sandbox(stage)
                if stage.checkpoint is None:
                    stage.checkpoint = (await sandbox.checkpoint()).id
            return stage.checkpoint

    async def _sandbox(self, stage: _Stage) -> Sandbox:
        """A sandbox that is based on the tree behind a stage. What it copies from is built concurrently."""
        if stage.sandbox is None:
            stage.sandbox, done = await self._begin(stage)
            self._show(stage, done)
            await self._build_origins(stage, done)
            for number, step in enumerate(stage.steps[done:], stage.first + done):
                began = time.monotonic()
                self._output(f"[{number}/{self._count}] {step.title}")
                if step.key is not None:
                    await self._step(stage, stage.sandbox, step)
                    self._output(f"[{number}/{self._count}] took {time.monotonic() - began:.1f} s")
        return stage.sandbox

    async def _build_origins(self, stage: _Stage, done: int) -> None:
        """Stages that the steps to come copy from, at the same time."""
        names = {name for step in stage.steps[done:] for name in _origins(step)}
        stages = {id(result): result for name in names if (result := self._planned.get(name.lower())) is not None}
        work = [asyncio.ensure_future(self._checkpoint(item)) for item in stages.values() if item.image is None]
        try:
            await asyncio.gather(*work)
        except BaseException:
            for item in work:
                item.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            raise

    async def _begin(self, stage: _Stage) -> tuple[Sandbox, int]:
        """A sandbox that is based on the last kept step of a stage or on its base; how many steps are behind it."""
        for done in range(len(stage.steps), 0, -1):
            checkpoint = self._retained.get(stage.steps[done - 1].key or "")
            if checkpoint is not None:
                with contextlib.suppress(PagurusError):  # removed just now: the step before it, then
                    return await self._fork(checkpoint), done
        if (image := stage.base if isinstance(stage.base, str) else stage.base.image) is not None:
            made = self._host.create(image, network=self._network, limits=self._limits, workdir="/", user="root")
            return await self._undo.enter_async_context(made), 0
        assert isinstance(stage.base, _Stage)
        return await self._fork(await self._checkpoint(stage.base)), 0

    async def _fork(self, checkpoint: str) -> Sandbox:
        (fork,) = await self._host.fork(checkpoint)
        return await self._undo.enter_async_context(fork.sandbox)

    def _show(self, stage: _Stage, done: int) -> None:
        if stage.shown:
            return
        stage.shown = True
        self._output(stage.title)
        for number, step in enumerate(stage.steps[:done], stage.first):
            self._output(f"[{number}/{self._count}] {step.title}" + (" (kept)" if step.key is not None else ""))

    async def _step(self, stage: _Stage, sandbox: Sandbox, step: BuildStep) -> None:
        assert step.action is not None and step.key is not None
        self._carried_out += 1
        origins = {name: await self._ready(name, step.instruction.line) for name in {"", *_origins(step)}}
        await self._steps.carry_out(sandbox, step.action, step.instruction, origins)
        stage.checkpoint = None
        try:
            stage.checkpoint = (await sandbox.checkpoint()).id
        except CheckpointFailed as error:  # something that still runs; the last checkpoint of all must succeed
            self._output(f"line {step.instruction.line}: this step is not kept: {error.message}")
            return
        self._keeping.append(asyncio.ensure_future(self._keep(step.key, stage.checkpoint, step.title)))

    async def _ready(self, name: str, line: int) -> CopyOrigin:
        """What a step copies from, built."""
        from sandbox.sdk.build_steps import CopyOrigin

        result = await self._origin(name, line)
        if isinstance(result, BuildContext):
            return CopyOrigin(context=result)
        if isinstance(result, _Stage):
            return (
                CopyOrigin(image=result.image)
                if result.image is not None
                else CopyOrigin(checkpoint=await self._checkpoint(result))
            )
        return CopyOrigin(image=result.name)

    async def _keep(self, key: str, checkpoint: str, title: str) -> None:
        try:
            await self._host.images.keep_step(key, checkpoint, title)
        except PagurusError as error:  # a full disk, a daemon that goes: the image does not depend on it
            self._output(f"{title}: not kept for the next build: {error.message}")


def _origins(step: BuildStep) -> list[str]:
    if isinstance(step.action, CopyInstruction):
        return [step.action.origin] if step.action.origin else []
    return [mount.origin for mount in step.action.mounts if mount.origin] if isinstance(step.action, RunAction) else []


def _triggered(text: str, line: int) -> list[Instruction]:
    """The instruction that an ONBUILD of the base stands for, as if it stood at the FROM."""
    return [replace(item, line=line) for item in dockerfile.instructions(text)]


def _directory(place: str, name: str) -> Path:
    directory = Path(place)
    if not directory.is_dir():
        raise Invalid(f"--build-context {name}={place} is no directory", hint=_CONTEXTS)
    return directory
