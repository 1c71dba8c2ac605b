"""`EngineSupervisor`: one engine server that is always there, with the last published weights.

Guarantee: a death is noticed when the kernel reports it, not by a time-out; after a restart the engine serves the
version published last, checked (I9); when it cannot be restarted every caller gets one error that names the log.

====================  =================================================================
state                 moved by
====================  =================================================================
starting              `__aenter__` (or adopted by it), or the watcher after a death
serving               health route answers and the weights were checked
failed                too many deaths, or a start that did not succeed; final
closed                `close`; final
====================  =================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO

from rollout.engine import adopted, keep
from rollout.engine.adopted import AdoptedProcess, RoleRecord
from rollout.engine.client import EngineClient, Generation, PublishResult, Sampling, wait_healthy
from rollout.engine.keep import die_with_parent
from rollout.engine.launch import IDLE_EXIT, Launch, LaunchCommand, embedded, vllm
from rollout.engine.standby import Standby
from rollout.engine.weights import named, weights_of
from rollout.store import stages
from sandbox.errors import Closed, EngineFailed, Invalid, NotFound, PagurusError, Timeout

__all__ = ["EngineSupervisor", "embedded", "vllm"]

log = logging.getLogger("pagurus.engine.supervisor")

MAX_RESTARTS = 5  # in a row, without an answer between two deaths
MAX_DEATHS = 100  # in a row, without a minute of service between two deaths
SERVED_WELL = 60.0  # seconds of service after which earlier deaths are forgotten
START_PAUSES = (0.5, 5.0)  # seconds before it is tried again, where a server that had died did not start
STANDBY_AFTER = 1.0  # seconds of service: what waits for the server comes before a spare one
STOP_TIMEOUT = 5.0  # seconds between SIGTERM and SIGKILL
LOG_TAIL = 15  # lines of the engine's log in an error
ROLE = "engine"
USED = "engine.used"  # in the directory of roles: locked by who uses the server


class EngineSupervisor:
    """``async with EngineSupervisor(embedded(), run / "weights", 0, log=run / "engine.log") as engine: ...``"""

    def __init__(self, launch: Launch, weights: Path | str, version: int, *, log: Path, roles: Path | None = None):
        """`weights`: where versions are published, or a model directory, which is then served for ever as `version`.

        The engine's mirror lies next to its log. `roles`: the directory where the server is written down. It then
        outlives this process if that is killed, and the next one adopts it; left alone, it ends by itself after a
        while.
        """
        self.launch, self.log, self.roles = launch, log, roles
        self.adopted = False
        self._generation = 0
        self.weights, self.version = weights_of(launch, weights, log.resolve().with_suffix(".weights")), version
        self.restarts = 0
        self.retried = 0
        self.publications: list[PublishResult] = []
        self.on_serving: Callable[[bool], None] = lambda serves: None  # called at its death, and when it serves again
        self.pid: int | None = None
        self._client: EngineClient | None = None
        self._process: asyncio.subprocess.Process | AdoptedProcess | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._serving = asyncio.Event()  # set while serving, and for ever once failed or closed
        self._failure: EngineFailed | Closed | None = None
        self._publishing = asyncio.Lock()
        self._using: IO[str] | None = None  # the lock that says so to who keeps the server
        self._standby = Standby(launch, log)
        self._answered = False  # anything, since it was started or adopted

    @property
    def outlives(self) -> bool:
        """Whether the server survives when this process is killed."""
        return self.roles is not None and (self.launch.leaves or self.launch.retained)

    def _retained(self, argv: list[str]) -> list[str]:
        if self.roles is None or not self.launch.retained:
            return argv
        return keep.command(argv, self.roles / USED, IDLE_EXIT)

    async def __aenter__(self) -> EngineSupervisor:
        try:
            if self.roles is not None:
                self._using = await asyncio.to_thread(keep.use, self.roles / USED)
            self.adopted = await self._adopt()
            if not self.adopted:
                await self._start()
        except BaseException:
            await asyncio.shield(self.close())
            raise
        self._watcher = asyncio.get_running_loop().create_task(self._watch(), name="engine watcher")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.shield(self.close())

    async def close(self) -> None:
        """Stop the server. Idempotent."""
        self._failure = self._failure or Closed("the engine supervisor is closed")
        if self._using is not None:
            self._using.close()
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher])
            self._watcher = None
        await self._standby.close()
        await self._stop()
        await self.weights.close()
        self._serving.set()

    @property
    def client(self) -> EngineClient:
        """The client of the server as it runs now. Raises when there is none for good."""
        if self._failure is not None:
            raise self._failure
        if self._client is None:
            raise EngineFailed("the engine is starting", hint="wait for it with wait_serving()")
        return self._client

    async def wait_serving(self) -> EngineClient:
        """The client, once the engine serves; raises when it never will again."""
        await self._serving.wait()
        return self.client

    @property
    def slots(self) -> int:
        return self.launch.slots

    def kill(self) -> None:
        """It answers no more: end it. It is started again with the last published weights."""
        self._signal(signal.SIGKILL)

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "") -> Generation:
        """Like the client's; a death of the engine on the way costs time only: called again after the restart."""
        while True:
            client = await self.wait_serving()
            try:
                generation = await client.generate(prompt_ids, sampling, request_id=request_id)
                self._answered = True
                return generation
            except EngineFailed:
                if not await self._died(client):
                    raise
                self.retried += 1

    async def fetch(self, version: int) -> None:
        """Have a version here before it is published; requests continue. Raises where it cannot be fetched."""
        await self.weights.fetch(await self.wait_serving(), version)

    async def publish(self, weights: Path | str, version: int) -> PublishResult:
        """Serve this version from now on; `weights` are those of the constructor. A version that cannot be pulled
        leaves the engine as it is. If the engine dies or refuses on the way, it is restarted with the new version."""
        if named(weights) != self.weights.place:
            raise Invalid(f"this engine takes its weights from {self.weights.place}", hint="publish there")
        async with self._publishing:
            client = await self.wait_serving()
            before, self.version = self.version, version
            started = time.monotonic()
            try:
                published = await self.weights.take(client, version)
            except (EngineFailed, Timeout, NotFound, Invalid) as error:
                if not await self._died(client) and await self._as_before(client, before):
                    self.version = before
                    raise
                log.warning("publication of version %d failed, restarting the engine with it: %s", version, error)
                published = await self._redo(client, before, started)
            self.publications.append(published)
            return published

    async def _as_before(self, client: EngineClient, version: int) -> bool:
        """Whether a server still serves an older version, as if it had got no request."""
        try:
            return await client.healthy() and not await client.is_paused() and await client.version() == version
        except EngineFailed:
            return False

    async def _redo(self, client: EngineClient, before: int, started: float) -> PublishResult:
        """End the server if it has not ended, and wait for the one that comes after it."""
        if not await self._died(client):
            self._signal(signal.SIGKILL)
            await self._died(client)
        try:
            await self.wait_serving()
        except EngineFailed:
            self.version = before
            raise
        seconds = time.monotonic() - started
        return PublishResult(version=self.version, seconds=seconds, paused_s=seconds)

    async def abort(self, request_ids: list[str] | None = None) -> None:
        await (await self.wait_serving()).abort(request_ids)

    def statistics(self) -> dict[str, float | int | str | None]:
        paused = [published.paused_s for published in self.publications]
        return {
            "engine": self.launch.name,
            "version": self.version,
            "pid": self.pid,
            "restarts": self.restarts,
            "retried": self.retried,
            "publications": len(paused),
            "paused_s": sum(paused),
        }

    async def _died(self, client: EngineClient) -> bool:
        """Whether the server behind `client` is gone (a connection may break an instant before the kernel says so)."""
        if self._client is not client:
            return True
        process = self._process
        if process is None:
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(process.wait()), STOP_TIMEOUT / 5)
        if process.returncode is not None and self._client is client:
            self._serving.clear()  # the watcher, notified by the same kernel, sets it again after the restart
        return process.returncode is not None

    async def _adopt(self) -> bool:
        """Take over the server that another process left, with our weights; False when there is none that obeys."""
        role = adopted.read(self.roles, ROLE) if self.roles is not None else None
        if role is None:
            return False
        self._generation = role.generation
        descriptor = adopted.hold(role)
        if descriptor is None:
            return False
        process, client = AdoptedProcess(role.pid, descriptor), EngineClient(role.url, tls=self.launch.tls)
        try:
            await self.weights.adopt(client, self.version)
        except (EngineFailed, Timeout, Invalid, NotFound) as error:
            log.warning("the engine that was left (pid %d) is of no use: %s", role.pid, error)
            await client.close()
            process.kill()
            await process.wait()
            return False
        self._process, self._client, self.pid = process, client, role.pid
        self._serving.set()
        return True

    async def _start(self) -> None:
        """Start a server of the last published weights and wait until it serves them."""
        await self.weights.ready(self.version)
        port = free_port(self.launch.host)
        command = self.launch.command(self.weights.model, port)
        command = LaunchCommand([*command.argv, *self.weights.arguments(self.version)], command.env)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            self._process = await self._standby.take(command) or await asyncio.create_subprocess_exec(
                *self._retained(command.argv),
                env={**os.environ, **command.env},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=None if self.outlives else die_with_parent,
            )
        self.pid = self._process.pid
        self._note(stages.BEGUN)
        client = EngineClient(self.launch.url(port), tls=self.launch.tls)
        self._write_down(client.url)
        ended = asyncio.ensure_future(self._process.wait())
        healthy = asyncio.ensure_future(wait_healthy(client))
        try:
            await asyncio.wait({ended, healthy}, timeout=self.launch.start_timeout, return_when=asyncio.FIRST_COMPLETED)
            if not healthy.done():
                why = (
                    f"ended with {ended.result()}" if ended.done() else f"not ready in {self.launch.start_timeout:g} s"
                )
                raise self._error(f"the {self.launch.name} engine did not start: {why}")
            await self.weights.begin(client, self.version)
        except BaseException:
            await client.close()
            await self._stop()
            raise
        finally:
            for waiter in (ended, healthy):
                waiter.cancel()
            await asyncio.wait({ended, healthy})
        self._client = client
        self._answered = False
        self._note(stages.READY)
        self.on_serving(True)
        self._serving.set()

    async def _start_again(self) -> None:
        """A server that was killed while it started, or that a busy machine kept from it, is not the end of a run."""
        for pause in START_PAUSES:
            try:
                await self._start()
                return
            except EngineFailed as error:
                log.warning("it is started once more after %g s: %s", pause, error)
                await asyncio.sleep(pause)
        await self._start()

    async def _watch(self) -> None:
        """Consumes: the server's death. Produces: a server with the last weights, or the final failure."""
        deaths = unanswered = 0
        while True:
            assert self._process is not None
            since = time.monotonic()
            ended = asyncio.ensure_future(self._process.wait())
            await asyncio.wait({ended}, timeout=STANDBY_AFTER)
            if self.outlives and not ended.done():
                await self._standby.prepare()
            code = await ended
            self._serving.clear()
            self._note(stages.NOTICED)
            self.on_serving(False)
            client, self._client = self._client, None
            log.warning(
                "engine %s (pid %s) ended with %s, restarting; log: %s", self.launch.name, self.pid, code, self.log
            )
            if client is not None:
                await client.close()
            await self._stop()  # children of a dead server
            served_well = time.monotonic() - since > SERVED_WELL
            deaths = 1 if served_well else deaths + 1
            unanswered = 1 if served_well or self._answered else unanswered + 1
            try:
                if unanswered > MAX_RESTARTS or deaths > MAX_DEATHS:
                    raise self._error(f"the {self.launch.name} engine died {deaths} times in a row, last with {code}")
                self.restarts += 1
                await self._start_again()
            except (PagurusError, OSError) as error:
                self._failure = error if isinstance(error, EngineFailed) else self._error(str(error))
                log.error("%s", self._failure)
                self._serving.set()
                return

    async def _stop(self) -> None:
        process, self._process, client, self._client = self._process, None, self._client, None
        if client is not None:
            await client.close()
        if process is None:
            return
        if isinstance(process, AdoptedProcess):  # no group is signalled by a number that may be reused by now
            process.kill()
            await process.wait()
            return
        if process.returncode is None:
            _signal_group(process.pid, signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), STOP_TIMEOUT)
            except TimeoutError:
                log.warning("engine pid %d ignores SIGTERM, killing it", process.pid)
        _signal_group(process.pid, signal.SIGKILL)
        await process.wait()

    def _note(self, stage: str) -> None:
        if self.roles is not None:
            stages.note(self.roles, ROLE, stage, self.pid)

    def _write_down(self, url: str) -> None:
        self._generation += 1
        if self.roles is not None and self.pid is not None and (at := adopted.started(self.pid)) is not None:
            role = RoleRecord(name=ROLE, pid=self.pid, started=at, at=time.time(), url=url, log=str(self.log))
            role.generation = self._generation
            adopted.write(self.roles, role)

    def _signal(self, number: signal.Signals) -> None:
        if isinstance(self._process, AdoptedProcess):
            self._process.kill()
        elif self._process is not None and self._process.returncode is None:
            _signal_group(self._process.pid, number)

    def _error(self, message: str) -> EngineFailed:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL:] if self.log.exists() else []
        quoted = "\n  ".join(["", *lines])
        return EngineFailed(f"{message}; its log {self.log} ends:{quoted}", hint=f"read {self.log}")


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of an address of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)
