"""The fake host: the wire of the core of the SDK, over scripted commands and copied directories."""

from __future__ import annotations

import asyncio
import re
import secrets
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy as copy_of
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from sandbox.errors import Conflict, ImageNotFound, Invalid, NotFound, SandboxDead
from sandbox.messages import (
    Change,
    CheckpointInfo,
    CheckpointRequest,
    CheckpointState,
    CreateRequest,
    ExecRequest,
    ExecResult,
    ForkEntry,
    ForkRequest,
    ImageInfo,
    LabelsRequest,
    LifetimeRequest,
    RestoreRequest,
    RestoreResult,
    SandboxInfo,
    SandboxState,
    ServiceInfo,
    Statistics,
    TurnInfo,
    Verdict,
)
from sandbox.messages.runs import RUN_LABEL, RunEnded, RunInfo, RunRequest
from sandbox.sdk.client import Client
from sandbox.testing.file_routes import FileRoutes
from sandbox.testing.files import FakeFiles
from sandbox.testing.service_routes import ServiceRoutes, created, tree_of
from sandbox.testing.wire import body, copy, cut, delete, encoded, errors, reply, streamed

REASONS = {Verdict.NONE: "nothing changed", Verdict.FILES: "the tree changed"}
Effect = Callable[[FakeFiles, re.Match[str]], Any]


@dataclass
class _Script:
    pattern: re.Pattern[str]
    exit_code: int
    stdout: bytes
    stderr: bytes
    effect: Effect | None
    delay: float


@dataclass
class _Sandbox:
    info: SandboxInfo
    request: CreateRequest
    files: FakeFiles
    print: dict[str, str]  # of the tree at its head
    turns: list[TurnInfo] = field(default_factory=list)
    services: dict[str, ServiceInfo] = field(default_factory=dict)

    def tree(self, service: str | None) -> FakeFiles:
        """The tree that a call means which names this service."""
        return tree_of(self.request.composition, self.files, service)


class FakeHost(FileRoutes, ServiceRoutes):
    """A host whose commands are scripted. Enter it, then use :meth:`client`."""

    def __init__(self, *, images: tuple[str, ...] = ("debian",)) -> None:
        self.commands: list[str] = []  # all that were run, oldest first
        self._images = images
        self._scripts: list[_Script] = []
        self._sandboxes: dict[str, _Sandbox] = {}
        self._ended_runs: set[str] = set()
        self._checkpoints: dict[str, CheckpointInfo] = {}
        self._content: dict[str, str] = {}  # checkpoint -> the one whose copy of the tree it uses
        self._tally = Statistics()
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> FakeHost:
        self._directory = await asyncio.to_thread(tempfile.TemporaryDirectory, prefix="pagurus-fake-")
        app = web.Application(middlewares=[errors], client_max_size=1 << 30)
        routes = {
            ("GET", "/v1/health"): self._health,
            ("GET", "/v1/statistics"): self._statistics,
            ("GET", "/v1/images"): self._image_list,
            ("GET", "/v1/images/{name}"): self._image,
            ("GET", "/v1/sandboxes"): self._list,
            ("POST", "/v1/sandboxes"): self._create,
            ("GET", "/v1/sandboxes/{id}"): self._info,
            ("DELETE", "/v1/sandboxes/{id}"): self._remove,
            ("POST", "/v1/sandboxes/{id}/exec"): self._exec,
            ("POST", "/v1/sandboxes/{id}/stream"): self._stream,
            ("POST", "/v1/sandboxes/{id}/exec/{command}/signal"): self._signal_command,
            ("POST", "/v1/sandboxes/{id}/kill"): self._kill,
            ("GET", "/v1/sandboxes/{id}/turns"): self._turns,
            ("GET", "/v1/sandboxes/{id}/checkpoints"): self._tree,
            ("POST", "/v1/sandboxes/{id}/checkpoints"): self._checkpoint,
            ("POST", "/v1/sandboxes/{id}/restore"): self._restore,
            ("POST", "/v1/sandboxes/{id}/fork"): self._fork_sandbox,
            ("GET", "/v1/sandboxes/{id}/diff"): self._diff,
            ("PATCH", "/v1/sandboxes/{id}/labels"): self._set_labels,
            ("PUT", "/v1/sandboxes/{id}/lifetime"): self._set_lifetime,
            ("PUT", "/v1/runs/{run}"): self._renew_run,
            ("DELETE", "/v1/runs/{run}"): self._end_run,
            ("GET", "/v1/checkpoints"): self._checkpoint_list,
            ("GET", "/v1/checkpoints/{id:(?!have$)[^/]+}"): self._wait,
            ("POST", "/v1/checkpoints/{id}/fork"): self._fork,
        }
        for (method, path), handler in {**routes, **self._of_files(), **self._of_services()}.items():
            app.router.add_route(method, path, handler)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        await web.UnixSite(self._runner, self.address).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self._directory is not None:
            await asyncio.to_thread(self._directory.cleanup)

    @property
    def address(self) -> str:
        """The socket to connect to, also for ``sandbox.sync`` from another thread."""
        return f"{self._place}/socket"

    def client(self) -> Client:
        """A client of this host: the real SDK."""
        return Client(self.address)

    def on(
        self,
        pattern: str,
        *,
        exit_code: int = 0,
        stdout: bytes | str = b"",
        stderr: bytes | str = b"",
        effect: Effect | None = None,
        delay: float = 0.0,
    ) -> None:
        """What a command does that matches the regular expression `pattern` as a whole; the newest match counts.

        `effect` gets the files and the match; what it returns, when it is text or bytes, is the output. `delay`:
        seconds that it takes, so that time-outs can be tested.
        """
        self._scripts.append(_Script(re.compile(pattern), exit_code, encoded(stdout), encoded(stderr), effect, delay))

    def files(self, sandbox: str, service: str | None = None) -> FakeFiles:
        """The tree of a sandbox; of a composition, that of a service."""
        return self._find(sandbox).tree(service)

    @property
    def _place(self) -> Path:
        if self._directory is None:
            raise Invalid("the fake host is not open", hint="async with FakeHost() as fake")
        return Path(self._directory.name)

    # ----------------------------------------------------------------- finding

    def _find(self, name: str) -> _Sandbox:
        result = self._sandboxes.get(name)
        result = result or next((s for s in self._sandboxes.values() if s.info.name == name), None)
        if result is None:
            raise NotFound(f"no such sandbox: {name}", hint="list those there are with `pagurus ls`")
        return result

    def _alive(self, request: web.Request) -> _Sandbox:
        result = self._find(request.match_info["id"])
        if result.info.state is not SandboxState.RUNNING:
            raise SandboxDead("it has no living pid 1", hint="restore it", sandbox=result.info.id)
        return result

    def _saved(self, checkpoint: str) -> CheckpointInfo:
        if checkpoint not in self._checkpoints:
            raise NotFound(f"no such checkpoint: {checkpoint}", hint="list those there are with `pagurus tree`")
        return self._checkpoints[checkpoint]

    def _copy_of(self, checkpoint: str) -> Path:
        return self._place / "checkpoints" / self._content[checkpoint]

    # ----------------------------------------------------------------- the host

    async def _health(self, request: web.Request) -> web.Response:
        return reply({"status": "ok"})

    async def _statistics(self, request: web.Request) -> web.Response:
        self._tally.sandboxes = len(self._sandboxes)
        return reply(self._tally)

    async def _image_list(self, request: web.Request) -> web.Response:
        return reply([ImageInfo(name=name, digest="0" * 64) for name in sorted(self._images)])

    async def _image(self, request: web.Request) -> web.Response:
        if (name := request.match_info["name"]) not in self._images:
            raise ImageNotFound(f"no image {name!r}; there are: {', '.join(self._images) or 'none'}")
        return reply(ImageInfo(name=name, digest="0" * 64))

    async def _list(self, request: web.Request) -> web.Response:
        target = [part.partition("=") for part in request.query.get("label", "").split(",") if part]
        result = [sandbox.info for sandbox in self._sandboxes.values()]
        return reply([info for info in result if _labelled(info.labels, target)])

    async def _create(self, request: web.Request) -> web.Response:
        target = await body(request, CreateRequest)
        if target.composition is None and target.image not in self._images:
            raise ImageNotFound(f"no image {target.image!r}; there are: {', '.join(self._images) or 'none'}")
        if target.name and any(s.info.name == target.name for s in self._sandboxes.values()):
            raise Conflict(f"there is a sandbox named {target.name} already", hint="choose another name")
        sandbox = self._new(target, None)
        self._save(sandbox, Verdict.NONE, "created")
        return reply(sandbox.info, 201)

    def _new(self, target: CreateRequest, origin: str | None) -> _Sandbox:
        number = f"s-{secrets.token_hex(5)}"
        root = self._place / "sandboxes" / number
        if origin is None:
            root.mkdir(parents=True)
        else:
            copy(self._copy_of(origin), root)
        info = SandboxInfo(
            id=number,
            image=target.image,
            state=SandboxState.RUNNING,
            created_at=time.time(),
            name=target.name,
            head=origin,
            labels=target.labels,
            limits=target.limits,
        )
        files = FakeFiles(root)
        self._sandboxes[number] = _Sandbox(info, target, files, files.print())
        self._sandboxes[number].services = created(target.composition, self._images)
        if origin is not None and (parent := self._sandboxes.get(self._saved(origin).sandbox)) is not None:
            self._sandboxes[number].services = copy_of(parent.services)
        return self._sandboxes[number]

    async def _info(self, request: web.Request) -> web.Response:
        return reply(self._find(request.match_info["id"]).info)

    async def _remove(self, request: web.Request) -> web.Response:
        self._drop(self._find(request.match_info["id"]))
        return reply({})

    def _drop(self, sandbox: _Sandbox) -> None:
        del self._sandboxes[sandbox.info.id]
        delete(sandbox.files.root)

    async def _kill(self, request: web.Request) -> web.Response:
        self._alive(request).info.state = SandboxState.DEAD
        return reply({})

    async def _set_labels(self, request: web.Request) -> web.Response:
        sandbox = self._find(request.match_info["id"])
        merged = {**sandbox.info.labels, **(await body(request, LabelsRequest)).labels}
        sandbox.info.labels = {name: value for name, value in merged.items() if value is not None}
        return reply(sandbox.info)

    async def _set_lifetime(self, request: web.Request) -> web.Response:
        """Nothing ends by itself here."""
        sandbox = self._find(request.match_info["id"])
        seconds = (await body(request, LifetimeRequest)).seconds
        sandbox.info.lifetime = None if seconds is None else time.time() - sandbox.info.created_at + seconds
        return reply(sandbox.info)

    async def _renew_run(self, request: web.Request) -> web.Response:
        """Nothing ends by itself here."""
        name, target = request.match_info["run"], await body(request, RunRequest)
        if name in self._ended_runs:
            raise Conflict(f"the run {name} has ended", hint="begin another one")
        return reply(RunInfo(run=name, lease=target.lease))

    async def _end_run(self, request: web.Request) -> web.Response:
        name = request.match_info["run"]
        self._ended_runs.add(name)
        own = [s for s in self._sandboxes.values() if s.info.labels.get(RUN_LABEL) == name]
        for sandbox in own:
            self._drop(sandbox)
        return reply(RunEnded(removed=len(own)))

    # ----------------------------------------------------------------- commands

    async def _exec(self, request: web.Request) -> web.Response:
        return reply(await self._run(self._alive(request), await body(request, ExecRequest)))

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        return await streamed(request, await self._run(self._alive(request), await body(request, ExecRequest)))

    async def _signal_command(self, request: web.Request) -> web.Response:
        self._alive(request)
        raise NotFound("no command of this key runs", hint="those of this host end at once")

    async def _run(self, sandbox: _Sandbox, target: ExecRequest) -> ExecResult:
        """Carry out a command; one that is late ends with SIGTERM, as a real one."""
        command = target.command if isinstance(target.command, str) else " ".join(target.command)
        began = time.time()
        result = ExecResult(exit_code=127, stdout=b"", stderr=b"", duration=0.0)
        collected, files = self._scripted(command), sandbox.tree(target.service)
        delay = collected[0].delay if collected is not None else 0.0
        self.commands.append(command)
        if target.timeout is not None and delay > target.timeout:
            await asyncio.sleep(target.timeout)
            result.exit_code, result.timed_out = 143, True
        else:
            await asyncio.sleep(delay)
            self._act(files, command, collected, result)
        result.stdout, result.stdout_dropped = cut(result.stdout, target)
        result.stderr, result.stderr_dropped = cut(result.stderr, target)
        result.duration = time.time() - began
        if target.ends_turn:
            self._end_turn(sandbox, command, result, began)
        return result

    def _scripted(self, command: str) -> tuple[_Script, re.Match[str]] | None:
        for script in reversed(self._scripts):
            if (match := script.pattern.fullmatch(command)) is not None:
                return script, match
        return None

    @staticmethod
    def _act(
        files: FakeFiles, command: str, collected: tuple[_Script, re.Match[str]] | None, result: ExecResult
    ) -> None:
        """What a command does and says."""
        if collected is None:
            result.stderr = f"fake: no script for {command!r}; add one with FakeHost.on()\n".encode()
            return
        script, match = collected
        said = script.effect(files, match) if script.effect is not None else None
        result.exit_code, result.stderr = script.exit_code, script.stderr
        result.stdout = encoded(said) if isinstance(said, str | bytes) else script.stdout

    def _changes(self, sandbox: _Sandbox) -> Verdict:
        """What is new since its head."""
        return Verdict.FILES if sandbox.files.print() != sandbox.print else Verdict.NONE

    def _end_turn(self, sandbox: _Sandbox, command: str, result: ExecResult, began: float) -> None:
        info = sandbox.info
        info.turn += 1
        result.turn, result.verdict = info.turn, self._changes(sandbox)
        result.reason = REASONS[result.verdict]
        result.checkpoint = info.head if result.verdict is Verdict.NONE else self._save(sandbox, result.verdict).id
        self._tally.turns += 1
        self._tally.verdicts[result.verdict.value] = self._tally.verdicts.get(result.verdict.value, 0) + 1
        sandbox.turns.append(
            TurnInfo(
                sandbox=info.id,
                turn=info.turn,
                command=command,
                started_at=began,
                duration=result.duration,
                exit_code=result.exit_code,
                verdict=result.verdict,
                reason=result.reason,
                checkpoint=result.checkpoint,
            )
        )

    async def _turns(self, request: web.Request) -> web.Response:
        return reply(self._find(request.match_info["id"]).turns)

    # ----------------------------------------------------------------- checkpoints

    def _save(self, sandbox: _Sandbox, verdict: Verdict, label: str | None = None) -> CheckpointInfo:
        now, info = time.time(), sandbox.info
        saved = CheckpointInfo(
            id=f"c-{secrets.token_hex(6)}",
            sandbox=info.id,
            state=CheckpointState.DURABLE,
            verdict=verdict,
            parent=info.head,
            label=label,
            turn=info.turn,
            created_at=now,
            started_at=now,
            captured_at=now,
            durable_at=now,
        )
        shared = info.head if verdict is Verdict.NONE else None
        self._content[saved.id] = self._content[shared] if shared is not None else saved.id
        if shared is None:
            copy(sandbox.files.root, self._copy_of(saved.id))
        self._checkpoints[saved.id] = saved
        info.head, sandbox.print = saved.id, sandbox.files.print()
        return saved

    async def _checkpoint(self, request: web.Request) -> web.Response:
        sandbox, target = self._alive(request), await body(request, CheckpointRequest)
        return reply(self._save(sandbox, self._changes(sandbox), target.label), 201)

    async def _tree(self, request: web.Request) -> web.Response:
        target = self._find(request.match_info["id"]).info
        result = {saved.id for saved in self._checkpoints.values() if saved.sandbox == target.id}
        pending = [*result, target.head]
        while pending:
            saved = self._checkpoints.get(pending.pop() or "")
            if saved is not None:
                result.add(saved.id)
                pending += [saved.parent] if saved.parent not in result else []
        return reply([saved for saved in self._checkpoints.values() if saved.id in result])

    async def _checkpoint_list(self, request: web.Request) -> web.Response:
        return reply(list(self._checkpoints.values()))

    async def _restore(self, request: web.Request) -> web.Response:
        sandbox, target = self._find(request.match_info["id"]), await body(request, RestoreRequest)
        saved = self._saved(target.checkpoint or sandbox.info.head or "")
        delete(sandbox.files.root)
        copy(self._copy_of(saved.id), sandbox.files.root)
        sandbox.info.state, sandbox.info.head = SandboxState.RUNNING, saved.id
        sandbox.print = sandbox.files.print()
        self._tally.restores += 1
        return reply(RestoreResult(sandbox=sandbox.info.id, checkpoint=saved.id, total_ms=0.0, verified=target.verify))

    async def _fork_sandbox(self, request: web.Request) -> web.Response:
        sandbox, target = self._alive(request), await body(request, ForkRequest)
        saved = self._save(sandbox, self._changes(sandbox))
        return reply(self._forks(saved, target), 201)

    async def _fork(self, request: web.Request) -> web.Response:
        target = await body(request, ForkRequest)
        return reply(self._forks(self._saved(request.match_info["id"]), target), 201)

    def _forks(self, saved: CheckpointInfo, target: ForkRequest) -> list[ForkEntry]:
        if not 1 <= target.count <= 1024:
            raise Invalid(f"count must lie between 1 and 1024, not {target.count}")
        owner = self._find(saved.sandbox).request
        labels = owner.labels if target.labels is None else target.labels
        request = msgspec.structs.replace(owner, name=None, labels=labels)
        return [ForkEntry(sandbox=self._new(request, saved.id).info) for _ in range(target.count)]

    async def _diff(self, request: web.Request) -> web.Response:
        now = self._find(request.match_info["id"]).files.print()
        before = FakeFiles(self._copy_of(self._saved(request.query["checkpoint"]).id)).print()
        result: list[Change] = []
        for path in sorted(before.keys() | now.keys()):
            if path not in now:
                if not any(c.kind == "removed" and path.startswith(f"{c.path}/") for c in result):
                    result.append(Change(path=path, kind="removed"))
            elif path not in before:
                result.append(Change(path=path, kind="added"))
            elif before[path] != now[path]:
                result.append(Change(path=path, kind="modified"))
        return reply(result)

    async def _wait(self, request: web.Request) -> web.Response:
        return reply(self._saved(request.match_info["id"]))


def _labelled(labels: dict[str, str], target: list[tuple[str, str, str]]) -> bool:
    return all(name in labels and (not equals or labels[name] == value) for name, equals, value in target)
