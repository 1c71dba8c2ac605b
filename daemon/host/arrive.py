"""A sandbox of another host continues here, under its own id.

::

    arrive   = row ▸ tree, container, network ▸ processes ▸ published
    prepare  = row ▸ tree, container, network
               ├▶ of this checkpoint: processes, frozen                     then arrive: they run ▸ published
               └▶ of a newer one, which is to come: a pid 1 of ours, next to which CRIU starts, and its end ▸ raw images
                  of this one unpacked       then arrive: tree and processes of the newer one ▸ published

Guarantee: it is the same sandbox: id, name, owner, host name and machine id, limits and settings, sessions and
processes, the record of its turns and its conversation with a model, as far as they were sent; no fork hooks run.
Nothing of a sandbox runs here before it arrives: what is frozen is marked, so that :mod:`daemon.fence` does not let
it run. A repeated request gets the same answer. What was prepared and is not used ends after `MAX_PREPARED`
seconds, and with the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import shutil
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path

from daemon import states
from daemon.catalogue import CheckpointRow, SandboxRow, drop_sandbox, programs_from, put_sandbox, put_turn
from daemon.host.attachments import attach_all
from daemon.host.host import Host
from daemon.host.leave import mark
from daemon.turns.turns import LiveSandbox
from sandbox.content import dumpfile
from sandbox.content.renewed import Former
from sandbox.criu.carried import frozen
from sandbox.errors import Conflict
from sandbox.messages import SandboxInfo
from sandbox.messages.cluster import ArriveRequest

MAX_PREPARED = 300.0  # seconds
_Tasks = dict[str, asyncio.Task[SandboxInfo]]


@dataclass
class PreparedSandbox:
    """What waits for a sandbox."""

    live: LiveSandbox
    complete: str  # the checkpoint of which all is here, and is frozen; "": a newer one is to come
    former: Former | None  # raw images, for the import of that
    undo: contextlib.AsyncExitStack  # if it does not come
    end: contextlib.ExitStack  # in any case
    timer: asyncio.TimerHandle | None = None


@dataclass
class Arrivals:
    """Those of one host. See the module."""

    host: Host
    _prepared: dict[str, PreparedSandbox] = field(default_factory=dict)
    _preparing: _Tasks = field(default_factory=dict)
    _arriving: _Tasks = field(default_factory=dict)

    async def arrive(self, checkpoint: str, request: ArriveRequest) -> SandboxInfo:
        """It runs when this returns. Raises Conflict where the id is taken by something else, or nothing may act."""
        self.host.fence.need_lease()
        return await self._one(self._arriving, request.id, self._arrive(checkpoint, request))

    @staticmethod
    async def _one(under_way: _Tasks, sandbox: str, work: Coroutine[None, None, SandboxInfo]) -> SandboxInfo:
        """The end of this work, of which there is one for a sandbox at a time, and which `drop` ends."""
        if sandbox in under_way:
            work.close()
            raise Conflict(f"{sandbox} is arriving already", hint="ask again", sandbox=sandbox)
        task = under_way[sandbox] = asyncio.create_task(work, name=f"arrival of {sandbox}")
        try:
            return await task
        except asyncio.CancelledError:
            if (current := asyncio.current_task()) is not None and current.cancelling():
                raise
            raise Conflict("it is not to come any more", hint="ask the cluster", sandbox=sandbox) from None
        finally:
            del under_way[sandbox]

    def coming(self) -> set[str]:
        """Sandboxes that are arriving."""
        return set(self._arriving)

    async def _arrive(self, checkpoint: str, request: ArriveRequest) -> SandboxInfo:
        host = self.host
        origin = await self._origin(checkpoint, request)
        if (existing := host.live_sandboxes.get(request.id)) is not None:
            if existing.row.origin == origin.id:
                return existing.row.info()
            raise Conflict(f"{request.id} is here already", hint="remove it first", sandbox=request.id)
        if (preparing := self._preparing.get(request.id)) is not None:
            await asyncio.wait([preparing])
        prepared = await self._fitting(origin)
        try:
            row = self._row(origin, request) if prepared is None else prepared.live.row
            row.programs = origin.programs = programs_from(request.programs)
            row.turn = origin.turn
            if host.gateway is not None:
                await host.gateway.arriving(row, request.conversation)
            with host.collector.pin(origin):
                if prepared is None:
                    with host.made(row):
                        await host.make(row, host.restorer.tree_below(row), origin, verify=request.verify)
                else:
                    await self._use(prepared, origin, verify=request.verify)
        except BaseException:
            if prepared is not None:
                await asyncio.shield(_undo(prepared))
            raise
        if host.gateway is not None:
            host.gateway.arrived(row)
        turns = [item for item in request.turns if item.sandbox == request.id and item.turn <= origin.turn]
        host.services.catalogue.later([put_turn(item) for item in turns])
        origin.owner = request.owner  # who sees the sandbox sees what it came from
        return row.info()

    async def _origin(self, checkpoint: str, request: ArriveRequest) -> CheckpointRow:
        origin = await self.host.restorable(checkpoint)
        if origin.sandbox != request.id:  # another one's memory and files, which its owner would see
            raise Conflict(f"checkpoint {origin.id} is of another sandbox: {origin.sandbox}", hint="fork it instead")
        return origin

    def _row(self, origin: CheckpointRow, request: ArriveRequest) -> SandboxRow:
        row = self.host.forked(origin)
        row.id, row.hostname = request.id, request.id.removeprefix("s-")
        row.name, row.owner = request.name, request.owner
        row.created_at = request.created_at or row.created_at
        return row

    async def _fitting(self, origin: CheckpointRow) -> PreparedSandbox | None:
        """What was prepared for this checkpoint. What was prepared for another one goes."""
        prepared = self._take(origin.sandbox)
        if (
            prepared is None
            or not prepared.complete
            or (prepared.complete == origin.id and prepared.live.container.alive)
        ):
            return prepared
        await asyncio.shield(_undo(prepared))
        return None

    async def _use(self, prepared: PreparedSandbox, origin: CheckpointRow, *, verify: bool) -> None:
        live = prepared.live
        if prepared.complete:
            await self._let_go_on(prepared)
        else:  # as a restore in place, of a sandbox that is published with it
            live.row.origin = origin.id
            live.step(states.Event.RESTORE)
            await self.host.restorer.replace(live, origin, verify=verify)
        prepared.undo.pop_all()
        prepared.end.close()
        self.host.publish(live)

    async def _let_go_on(self, prepared: PreparedSandbox) -> None:
        """What is frozen runs when this returns, and its row is written."""
        host, live = self.host, prepared.live
        await attach_all(host.attachments, live.row, live.container)  # how it reaches a model is known only now
        live.step(states.Event.START)
        mark(host, live).unlink()  # before the row: who takes it over after a crash thaws it
        prepared.undo.callback(host.services.catalogue.later, drop_sandbox(live.row.id))
        await host.services.catalogue.write([put_sandbox(live.row)], durable=True)
        await asyncio.to_thread(frozen.thaw, live.container, host.services.inspector.notes)

    # ----------------------------------------------------------------- ahead

    async def prepare(self, checkpoint: str, request: ArriveRequest) -> SandboxInfo:
        """Make all that takes long, from a former checkpoint of the sandbox, or from the one that it will come from."""
        return await self._one(self._preparing, request.id, self._prepare(checkpoint, request))

    async def _prepare(self, checkpoint: str, request: ArriveRequest) -> SandboxInfo:
        host = self.host
        host.fence.need_lease()
        origin = await self._origin(checkpoint, request)
        await self._drop(request.id)
        if request.id in host.live_sandboxes:
            raise Conflict(f"{request.id} is here already", hint="remove it first", sandbox=request.id)
        row, checkpointer = self._row(origin, request), host.services.capturer.checkpointer
        with contextlib.ExitStack() as end:
            async with contextlib.AsyncExitStack() as undo:
                undo.callback(host.give_up, row)
                end.enter_context(host.making.admitted(row))
                with host.collector.pin(origin):
                    container = await host.restorer.capacity(row, host.restorer.tree_below(row), origin.files, undo)
                    live = LiveSandbox(row, container, host.services)
                    undo.push_async_callback(checkpointer.forget, container)
                    former = None
                    if request.newer:
                        await self._make_ready(live)
                        former = await asyncio.to_thread(self._unpack, origin, end)
                    else:
                        held = functools.partial(mark(host, live).touch, mode=0o600)
                        await host.restorer.bring_back(container, origin, verify=request.verify, hold=held)
                        await checkpointer.warm_dump(container)  # of the awaited answer
                complete = "" if request.newer else origin.id
                self._prepared[row.id] = prepared = PreparedSandbox(
                    live, complete, former, undo.pop_all(), end.pop_all()
                )
        loop = asyncio.get_running_loop()
        prepared.timer = loop.call_later(MAX_PREPARED, self._expire, row.id)
        return row.info()

    async def _make_ready(self, live: LiveSandbox) -> None:
        """For a restore that is quick: its CRIU waits."""
        checkpointer = self.host.services.capturer.checkpointer
        live.step(states.Event.START)
        await live.container.start()
        await checkpointer.warm(live.container)
        await checkpointer.forget(live.container, restoring=True)
        await live.container.kill()

    def _unpack(self, origin: CheckpointRow, end: contextlib.ExitStack) -> Former:
        capturer = self.host.services.capturer
        directory = capturer.places.dump(f".coming-{secrets.token_hex(6)}")
        end.callback(self._remove_later, directory)
        if origin.dump is None:
            directory.mkdir(mode=0o700)
        else:
            dumpfile.unpack(capturer.places.packed(origin.dump), directory, capturer.checkpointer.pages)
        return Former.at(directory)

    def _remove_later(self, directory: Path) -> None:
        """No caller needs to wait until raw images have gone."""
        removing = asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
        self.host.services.spawn(removing, f"removal of {directory.name}")

    def former(self, sandbox: str) -> Former | None:
        """The raw images that wait for the sandbox, once: their user changes them."""
        prepared = self._prepared.get(sandbox)
        if prepared is None:
            return None
        former, prepared.former = prepared.former, None
        return former

    def _take(self, sandbox: str) -> PreparedSandbox | None:
        prepared = self._prepared.pop(sandbox, None)
        if prepared is not None and prepared.timer is not None:
            prepared.timer.cancel()
        return prepared

    def _expire(self, sandbox: str) -> None:
        self.host.services.spawn(self.drop(sandbox), f"end of what was prepared for {sandbox}")

    async def drop(self, sandbox: str) -> None:
        """What was prepared is not needed; one that is arriving gives up, or has arrived by then. Idempotent."""
        for task in (self._arriving.get(sandbox), self._preparing.get(sandbox)):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        await self._drop(sandbox)

    async def _drop(self, sandbox: str) -> None:
        if (prepared := self._take(sandbox)) is not None:
            await _undo(prepared)


async def _undo(prepared: PreparedSandbox) -> None:
    prepared.end.close()
    await prepared.undo.aclose()
