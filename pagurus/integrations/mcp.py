"""``pagurus mcp``: sandboxes as tools of a model, by the Model Context Protocol.

Checkpoints, restores and forks are tools, so the agent undoes and branches by itself.

Guarantee: sandboxes that this server made end with it, unless configured otherwise. What a command does is a result; a
failure of the platform is a tool error that begins with ``pagurus/CODE:``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal, ParamSpec, TypeVar

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel

from pagurus import VERSION
from pagurus.integrations import common
from sandbox import Client, PagurusError, Sandbox

MAX_SAID = 64 << 10  # bytes of each output that a model is shown
MAX_READ = 256 << 10  # bytes of a file that a model is shown
MAX_FORKS = 16
MAX_CHANGES = 200
INSTRUCTIONS = (
    "Sandboxes are containers that you can undo. Every command ends a turn, and what it changed is saved by itself; "
    "`run` says which checkpoint holds the state after it. `restore` takes files and running processes back to any "
    "checkpoint, `fork` starts more sandboxes from one. Calls that name no sandbox are for the one used last, which "
    "is made when there is none."
)

P = ParamSpec("P")
T = TypeVar("T")


class CommandOutcome(BaseModel):
    """What a command did."""

    sandbox: str
    exit_code: int
    stdout: str
    stderr: str
    timed_out: bool = False
    left_out: int = 0  # bytes of output beyond the limit
    changed: str = ""  # what the turn did: none, files, processes, both
    checkpoint: str | None = None  # holds the state after it


class SandboxName(BaseModel):
    sandbox: str
    image: str


class SavedState(BaseModel):
    """A checkpoint."""

    checkpoint: str
    parent: str | None = None
    turn: int = 0
    label: str = ""
    head: bool = False  # the sandbox is based on it


class FileDifference(BaseModel):
    kind: str
    path: str


class SandboxTools:
    """The tools of one server. `image`: what sandboxes are made from that name no other."""

    def __init__(self, host: Client, image: str, internet: bool, keep: bool) -> None:
        self.host, self._image, self._internet, self._keep = host, image, internet, keep
        self.mine: dict[str, Sandbox] = {}
        self._current: str | None = None

    async def _box(self, name: str | None) -> Sandbox:
        """The sandbox of a call."""
        target = name or self._current
        if target is None:
            return await self._make(self._image, self._internet)
        self._current = target
        return self.mine.get(target) or await self.host.get(target)

    async def _make(self, image: str, internet: bool) -> Sandbox:
        box = await common.start(
            self.host,
            tool="mcp",
            image=image,
            limits=common.limits(memory_mb=2048),
            network=common.network(internet),
            keep=self._keep,
        )
        self._take(box)
        return box

    async def _marks(self) -> dict[str, str]:
        return await common.marks("mcp", keep=self._keep)

    def _take(self, box: Sandbox) -> None:
        self.mine[box.id] = box
        self._current = box.id

    async def end(self) -> None:
        """Remove what was made here."""
        for box in self.mine.values():
            with contextlib.suppress(PagurusError):  # it may be gone, and the others must go as well
                await box.remove()

    # ----------------------------------------------------------------- tools

    async def create(self, image: str = "", internet: bool = False) -> SandboxName:
        """Make a new sandbox and use it from now on."""
        box = await self._make(image or self._image, internet or self._internet)
        return SandboxName(sandbox=box.id, image=box.info.image)

    async def run(
        self, command: str, sandbox: str | None = None, timeout: float = 120.0, cwd: str | None = None
    ) -> CommandOutcome:
        """Run a bash command. Put what shall keep running into the background with `&`."""
        box = await self._box(sandbox)
        result = await box.exec(["/bin/bash", "-c", command], timeout=timeout, cwd=cwd, output_limit=MAX_SAID)
        return CommandOutcome(
            sandbox=box.id,
            exit_code=result.exit_code,
            stdout=common.text(result.stdout),
            stderr=common.text(result.stderr),
            timed_out=result.timed_out,
            left_out=result.stdout_dropped + result.stderr_dropped,
            changed=str(result.verdict or ""),
            checkpoint=result.checkpoint,
        )

    async def write_file(self, path: str, content: str, sandbox: str | None = None) -> str:
        """Write a text file; missing directories are made."""
        box = await self._box(sandbox)
        await box.files.write(path, content)
        return f"wrote {len(content.encode())} bytes to {path}"

    async def read_file(self, path: str, sandbox: str | None = None, offset: int = 0) -> str:
        """Read a text file, at most 256 KiB from `offset`."""
        box = await self._box(sandbox)
        return common.text(await box.files.read(path, offset=offset, limit=MAX_READ))

    async def checkpoint(self, label: str = "", sandbox: str | None = None) -> SavedState:
        """Save the state as it is now: files, processes, memory."""
        box = await self._box(sandbox)
        info = await box.checkpoint(label or None)
        return SavedState(checkpoint=info.id, parent=info.parent, turn=info.turn, label=info.label or "", head=True)

    async def checkpoints(self, sandbox: str | None = None) -> list[SavedState]:
        """All checkpoints of a sandbox, oldest first, and how they descend."""
        box = await self._box(sandbox)
        head = (await box.refresh()).head
        return [
            SavedState(
                checkpoint=item.id, parent=item.parent, turn=item.turn, label=item.label or "", head=item.id == head
            )
            for item in await box.tree()
        ]

    async def restore(self, checkpoint: str, sandbox: str | None = None) -> str:
        """Take a sandbox back to a checkpoint, in place: its files and its running processes."""
        box = await self._box(sandbox)
        await box.restore(checkpoint)
        return f"{box.id} is as it was at {checkpoint}"

    async def fork(
        self, count: int = 1, checkpoint: str | None = None, sandbox: str | None = None
    ) -> list[SandboxName]:
        """Start more sandboxes that continue from a checkpoint, or from a sandbox as it is now. Does not switch."""
        if not 1 <= count <= MAX_FORKS:
            raise ToolError(f"at most {MAX_FORKS} forks at once")
        current = self._current
        if checkpoint is not None:
            children = await self.host.fork(checkpoint, count, labels=await self._marks())
        else:
            box = await self._box(sandbox)
            current = self._current
            children = await box.fork(count, labels=await self._marks())
        made = [child.sandbox for child in children]
        for child in made:
            self._take(child)
        self._current = current
        return [SandboxName(sandbox=child.id, image=child.info.image) for child in made]

    async def diff(self, since: str, sandbox: str | None = None) -> list[FileDifference]:
        """Which files differ from a checkpoint; the first 200."""
        box = await self._box(sandbox)
        return [FileDifference(kind=str(item.kind), path=item.path) for item in (await box.diff(since))[:MAX_CHANGES]]

    async def remove(self, sandbox: str) -> str:
        """End a sandbox with its checkpoints."""
        box = await self._box(sandbox)
        await box.remove()
        self.mine.pop(box.id, None)
        self._current = next(reversed(self.mine), None)
        return f"{box.id} is removed"


def _named(act: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """A failure of the platform is a tool error that the model may read."""

    @functools.wraps(act)
    async def tool(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await act(*args, **kwargs)
        except PagurusError as error:
            raise ToolError(common.reason(error)) from error

    return tool


def server(*, image: str = "debian", internet: bool = False, keep: bool = False) -> Any:
    """The server with its tools. `keep`: its sandboxes stay when it ends."""
    tools = SandboxTools(common.connect(), image, internet, keep)

    @contextlib.asynccontextmanager
    async def life(_: Any) -> AsyncIterator[None]:
        async with tools.host:
            try:
                yield
            finally:
                if not keep:
                    await tools.end()

    made = MCPServer("pagurus", instructions=INSTRUCTIONS, version=VERSION, lifespan=life, log_level="WARNING")
    for act in (
        tools.create,
        tools.run,
        tools.write_file,
        tools.read_file,
        tools.checkpoint,
        tools.checkpoints,
        tools.restore,
        tools.fork,
        tools.diff,
        tools.remove,
    ):
        made.tool()(_named(act))
    return made


def serve(
    transport: Literal["stdio", "streamable-http"], *, image: str, internet: bool, keep: bool, host: str, port: int
) -> None:
    """Serve until the client leaves (stdio), or until Ctrl-C."""
    made = server(image=image, internet=internet, keep=keep)
    if transport == "stdio":
        made.run()
    else:
        made.run("streamable-http", host=host, port=port)
