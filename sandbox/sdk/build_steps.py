"""One step of an image build, carried out in a sandbox: a command, a copy, a directory.

Guarantee: a failure names the line.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import re
import secrets as randomness
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from sandbox.container.pipes import in_thread
from sandbox.errors import CommandNotFound, Invalid, NoSpace, NotFound, PagurusError
from sandbox.image.dockerfile import Instruction
from sandbox.image.run_mounts import BuildMount
from sandbox.image.stages import Action, CopyInstruction, DirectoryAction, RunAction
from sandbox.messages import CopyRequest, CopyResult, Network
from sandbox.patterns import PatternList
from sandbox.sdk import build_mounts
from sandbox.sdk.handle import Sandbox
from sandbox.sdk.sources.context import BuildContext
from sandbox.sdk.sources.fetch import RemoteSources
from sandbox.tree import host_files

if TYPE_CHECKING:
    from sandbox.sdk.client import Client

STEP_TIMEOUT = 3600.0  # seconds of one RUN
OUTPUT = 4000  # characters of a failed command's output that the error repeats
CHUNK = 1 << 18
SCRIPTS = "/.pagurus-run-"  # where a here-document lies that is a program
NO_NAMES = re.compile(
    "Temporary failure (in name )?resol|Could not resolve|Name or service not known|Network is unreachable"
    "|Failed to resolve|getaddrinfo|bad address|EAI_AGAIN"
)
Output = Callable[[str], object]


@dataclass(frozen=True)
class CopyOrigin:
    """Where a step copies from: one of these."""

    context: BuildContext | None = None
    image: str = ""
    checkpoint: str = ""


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


class StepRunner:
    """How steps of one build are carried out."""

    def __init__(
        self,
        host: Client,
        output: Output,
        shows: bool,
        network: Network,
        secrets: Mapping[str, bytes],
        agents: Mapping[str, Path],
        sources: RemoteSources,
    ) -> None:
        self._host, self._output, self._shows = host, output, shows
        self._network, self._secrets, self._agents, self._sources = network, secrets, agents, sources

    async def carry_out(
        self, sandbox: Sandbox, action: Action, instruction: Instruction, origins: Mapping[str, CopyOrigin]
    ) -> None:
        """One action. `origins`: by their names, "" is the context. Raises Invalid with the line."""
        here = f"line {instruction.line}: "
        try:
            if isinstance(action, RunAction):
                await self._run(sandbox, action, instruction, origins)
            elif isinstance(action, DirectoryAction):
                request = CopyRequest(target=action.path, make_directory=True, directory_owner=action.owner)
                await self.copy(sandbox, request)
            else:
                await self._copy(sandbox, action, instruction, origins[action.origin])
        except (Invalid, CommandNotFound, NotFound, NoSpace) as error:  # no such user, working directory, source
            text = here + error.message.removeprefix(here)
            raise Invalid(text, hint=error.hint) from error

    # ----------------------------------------------------------------- commands

    async def _run(
        self, sandbox: Sandbox, run: RunAction, instruction: Instruction, origins: Mapping[str, CopyOrigin]
    ) -> None:
        network = self._network
        if run.network == "none" and network.mode != "none":
            await sandbox.network.set(Network.none())
        if run.workdir != "/" and not await sandbox.files.exists(run.workdir):  # removed by an earlier command
            await self.copy(sandbox, CopyRequest(target=run.workdir, make_directory=True, directory_owner=run.user))
        command = list(run.command)

        async def bind(mount: BuildMount, target: str) -> None:
            await self.copy_from(sandbox, origins[mount.origin], (mount.source,), target, instruction.line)

        async with build_mounts.mounted(
            sandbox, instruction.line, run.mounts, self._secrets, self._agents, self.copy, bind
        ) as secret:
            if run.script:  # a here-document for another interpreter than the shell
                command = [f"{SCRIPTS}{randomness.token_hex(4)}/{run.script_name}"]
                await sandbox.files.write(command[0], run.script, mode=0o755)
            await self._exec(sandbox, command, instruction, {**run.variables, **secret}, run.workdir, run.user or 0)
            if run.script:
                await sandbox.files.remove(command[0].rpartition("/")[0], recursive=True)
        if run.network == "none" and network.mode != "none":
            await sandbox.network.set(network)

    async def _exec(
        self,
        sandbox: Sandbox,
        command: list[str],
        instruction: Instruction,
        env: dict[str, str],
        cwd: str,
        user: int | str,
    ) -> None:
        lines = _Lines(self._output)
        streamed = sandbox.stream(command, env=env, cwd=cwd, user=user, timeout=STEP_TIMEOUT, ends_turn=False)
        result = None
        async with contextlib.aclosing(streamed):
            async for chunk in streamed:
                if chunk.result is None:
                    lines.feed(chunk.data)
                result = chunk.result or result
        lines.feed(b"", final=True)
        if result is None or not (result.timed_out or result.exit_code):
            return
        why = "took too long" if result.timed_out else f"exit code {result.exit_code}"
        said = "" if self._shows else f"\n{lines.tail.strip()}"  # who was shown it has read it
        unreached = self._network.mode != "open" and NO_NAMES.search(lines.tail)
        raise Invalid(
            f"line {instruction.line}: {instruction.kind} failed: {why}{said}",
            hint="RUN has no network by default: build with --network open" if unreached else "",
        )

    # ----------------------------------------------------------------- copying

    async def _copy(
        self, sandbox: Sandbox, copy: CopyInstruction, instruction: Instruction, origin: CopyOrigin
    ) -> None:
        target = copy.target
        if copy.sources:
            unpack = copy.unpack if copy.unpack is not None else copy.add
            await self.copy_from(sandbox, origin, copy.sources, target, instruction.line, copy, unpack=unpack)
        for name, place in await self._sources.files(copy, instruction.line):
            fetched = BuildContext(place, PatternList([]))
            await self.copy_from(
                sandbox, CopyOrigin(context=fetched), (name,), target, instruction.line, copy, unpack=bool(copy.unpack)
            )
        if copy.documents:
            with host_files.fresh_directory() as directory:
                names = await asyncio.to_thread(_write_documents, directory, copy.documents)
                documents = CopyOrigin(context=BuildContext(directory, PatternList([])))
                await self.copy_from(sandbox, documents, names, target, instruction.line, copy)

    async def copy_from(
        self,
        sandbox: Sandbox,
        origin: CopyOrigin,
        sources: tuple[str, ...],
        target: str,
        line: int,
        copy: CopyInstruction | None = None,
        *,
        unpack: bool = False,
    ) -> CopyResult:
        """Copy out of one origin; of `copy` its flags."""
        request = CopyRequest(
            sources=[*sources], target=target, image=origin.image, checkpoint=origin.checkpoint, unpack=unpack
        )
        if copy is not None:
            request.owner, request.mode = copy.owner, copy.mode
            request.parents, request.exclude = copy.parents, [*copy.exclude]
        if origin.context is None:
            return await self.copy(sandbox, request)
        selected = [item.replace("/./", "/", 1) for item in sources] if request.parents else [*sources]
        selection = await asyncio.to_thread(origin.context.select, selected, line)
        return await self.copy(sandbox, request, selection.pack)

    async def copy(
        self, sandbox: Sandbox, request: CopyRequest, pack: Callable[[IO[bytes]], None] | None = None
    ) -> CopyResult:
        """Have the daemon carry out a request, from the archive that `pack` writes or from what it names."""
        head = msgspec.msgpack.encode(request)
        reader, writer = os.pipe()
        packing = in_thread(_packed, pack, writer)
        try:
            answer = await self._host.raw(
                "PUT",
                f"/v1/sandboxes/{sandbox.id}/copy",
                _body(len(head).to_bytes(4, "big") + head, reader),
                "application/octet-stream",
            )
        finally:
            with contextlib.suppress(PagurusError) if pack is None else contextlib.nullcontext():
                await packing
        return msgspec.msgpack.decode(answer, type=CopyResult)


def _packed(pack: Callable[[IO[bytes]], None] | None, writer: int) -> None:
    with contextlib.suppress(BrokenPipeError), os.fdopen(writer, "wb", buffering=CHUNK) as out:
        if pack is not None:
            pack(out)


async def _body(head: bytes, reader: int) -> AsyncIterator[bytes]:
    with os.fdopen(reader, "rb", buffering=0) as stream:
        yield head
        while part := await asyncio.to_thread(stream.read, CHUNK):
            yield part


def _write_documents(directory: Path, documents: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    for name, content in documents:
        if "/" in name or name in (".", ".."):
            raise Invalid(f"a here-document cannot be called {name}", hint="use a plain name")
        (directory / name).write_bytes(content.encode("utf-8", "surrogateescape"))
        (directory / name).chmod(0o644)
    return tuple(name for name, _ in documents)
