"""A sandbox that runs moves to another host.

::

    copies while it runs, until the rest is small ▸ prepared at both hosts
    calls wait: held, and captured ▸ the rest is copied ▸ arrives there ▸ calls continue
    durable there ▸ removed here, but for its last state, which is a copy from then on

Guarantee: of one sandbox, one host acts. It is held at its host before it arrives at the other, and is let go there
only when it surely does not run at the other. A move that is cut short, by the death of the coordinator too, is
completed: it is finished where the sandbox has arrived, and else taken back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterator

import msgspec

from coordinator.copies import Copies
from coordinator.decide import lease, replicate
from coordinator.decide.replicate import CopyAction
from coordinator.failover import arrival, arrive
from coordinator.forward import HostConnection
from coordinator.members import Members, SandboxPlace
from coordinator.state import MoveRow
from sandbox.errors import Conflict, NotFound, PagurusError, Timeout
from sandbox.messages import CheckpointInfo, CheckpointRequest, SandboxInfo
from sandbox.messages.cluster import ArriveRequest, DepartedSandbox, HeldSandbox, HoldRequest, MoveResult
from sandbox.sdk.transport import part

log = logging.getLogger("pagurus.cluster")

POLL_INTERVAL = 0.5  # seconds between two looks at moves that were cut short
TIMEOUT = 120.0  # seconds for a step of a move
PAUSE = 25.0  # seconds for which calls wait; then it continues where it was. Answers that wait for copies wait longer
UNUSED_POLL_INTERVAL = 0.02  # seconds between two looks whether calls on a sandbox have ended
UNUSED = 5.0  # seconds for which a move waits until no call on the sandbox is under way
UNUSED_UNASKED = 20.0  # likewise of one that was not requested, which then does not take place


class Moves:
    """See the module."""

    def __init__(self, members: Members, copies: Copies) -> None:
        self.members = members
        self.copies = copies
        self._state = members.state
        self._waits = {sandbox: asyncio.Event() for sandbox in self._state.moves}  # set when calls on it continue
        self._calls: Counter[str] = Counter()  # that are under way
        self._last: dict[str, tuple[str, ArriveRequest]] = {}  # the state that one arrived with
        self._under_way: set[str] = set()
        members.moving |= self._state.moves.keys()
        members.leaving |= self._state.moves.keys()

    async def free(self, sandbox: str) -> None:
        """Until calls on it need not wait."""
        while (waiting := self._waits.get(sandbox)) is not None:
            await waiting.wait()

    @contextlib.contextmanager
    def calling(self, sandbox: str) -> Iterator[None]:
        """A call on it is under way at its host."""
        self._calls[sandbox] += 1
        try:
            yield
        finally:
            self._calls[sandbox] -= 1
            if not self._calls[sandbox]:
                del self._calls[sandbox]

    def in_use(self, sandbox: str) -> bool:
        return sandbox in self._calls

    def _go_on(self, sandbox: str) -> None:
        if (waiting := self._waits.pop(sandbox, None)) is not None:
            waiting.set()

    async def run(self) -> None:
        """For as long as the coordinator lives: settle what was cut short."""
        while True:
            for sandbox in self._state.moves.keys() - self._under_way:
                await self._try_to_settle(sandbox)
            await asyncio.sleep(POLL_INTERVAL)

    async def move(self, sandbox: str, host: str, *, unasked: bool = False) -> MoveResult:
        """Continue it at another host. `unasked`: unless it is in use."""
        existing = self.members.places.get(sandbox)
        if existing is None:
            raise NotFound(f"no such sandbox: {sandbox}", hint="list those there are with `pagurus ls`")
        if sandbox in self.members.moving:
            raise Conflict("it is being moved", sandbox=sandbox, hint="wait until the move has ended")
        if existing.host == host:
            return MoveResult(sandbox=sandbox, host=host, pause_ms=0.0)
        self.members.moving.add(sandbox)
        self._under_way.add(sandbox)
        try:
            size = await self._ahead(sandbox, existing.host, host)
            self.members.leaving.add(sandbox)
            base = self._base(sandbox, host)
            await self._prepare(existing, base, host)
            await self._state.put_move(sandbox, MoveRow(source=existing.host, target=host, sandbox=existing.row))
            try:
                await self._unused(sandbox, unasked=unasked)
                clock = _Clock()
                size += await self._switch(existing, base, host, clock)
            finally:
                await asyncio.shield(self._try_to_settle(sandbox))
        finally:
            self._under_way.discard(sandbox)
            if sandbox not in self._state.moves:
                self._let_go(sandbox)
        pause = sum(clock.parts_ms.values())
        return MoveResult(sandbox=sandbox, host=host, pause_ms=pause, copied_bytes=size, parts_ms=clock.parts_ms)

    # ----------------------------------------------------------------- while it runs

    def _let_go(self, sandbox: str) -> None:
        self.members.moving.discard(sandbox)
        self.members.leaving.discard(sandbox)
        self._last.pop(sandbox, None)

    def _base(self, sandbox: str, host: str) -> str:
        """The copy of it that a host has; "": none."""
        rows = self._state.copies.get(sandbox, {}).values()
        return next((row.checkpoint for row in rows if row.host == host), "")

    async def _ahead(self, sandbox: str, source: str, host: str) -> int:
        """Copy it until the rest is small; the bytes that travelled."""
        size = 0
        path = f"/v1/sandboxes/{sandbox}/checkpoints"
        took: list[float] = []
        while replicate.again(took):
            target = CheckpointRequest(wait="durable")
            checkpoint = await self._upstream(source).call("POST", path, CheckpointInfo, target, keyed=True)
            began = time.monotonic()
            base = self._base(sandbox, host)
            size += await self.copies.make(CopyAction(sandbox, checkpoint.id, source, host, base=base))
            took.append(time.monotonic() - began)
        return size

    async def _prepare(self, existing: SandboxPlace, base: str, host: str) -> None:
        target = arrival(existing.row)
        target.ahead = True
        there = f"/v1/checkpoints/{part(base)}/arrive"
        here = f"/v1/sandboxes/{existing.row.id}/hold"
        await self._upstream(host).call("POST", there, SandboxInfo, target, timeout=TIMEOUT)
        hold = HoldRequest(since=base)
        await self._upstream(existing.host).call("PUT", here, msgspec.Raw, hold, timeout=TIMEOUT)

    async def _unused(self, sandbox: str, *, unasked: bool) -> None:
        """Until no call on it is under way. Raises Conflict where one always is, and the move was not requested."""
        deadline = time.monotonic() + (UNUSED_UNASKED if unasked else UNUSED)
        while self.in_use(sandbox):
            if time.monotonic() > deadline:
                if unasked:
                    raise Conflict("it is in use", hint="wait until no call on it is in progress", sandbox=sandbox)
                return
            await asyncio.sleep(UNUSED_POLL_INTERVAL)

    # ----------------------------------------------------------------- while calls wait

    async def _switch(self, existing: SandboxPlace, base: str, host: str, clock: _Clock) -> int:
        """From one host to the other; the bytes that were copied."""
        self._waits[existing.row.id] = asyncio.Event()
        try:
            async with asyncio.timeout(PAUSE):
                size = await self._carried(existing, base, host, clock)
        except BaseException as error:
            await asyncio.shield(self._try_to_settle(existing.row.id))  # until then calls on it wait
            if isinstance(error, TimeoutError):
                why = f"it did not arrive at {host} within {PAUSE:g} s, and stays"
                raise Timeout(why, hint="move it when the host is less busy", sandbox=existing.row.id) from None
            raise
        self._go_on(existing.row.id)
        return size

    async def _carried(self, existing: SandboxPlace, base: str, host: str, clock: _Clock) -> int:
        row = existing.row
        held = await self._upstream(existing.host).call(
            "POST", f"/v1/sandboxes/{row.id}/hold", HeldSandbox, timeout=TIMEOUT
        )
        clock.passed("hold")
        size, _ = await asyncio.gather(
            self.copies.rest(existing.host, host, held.checkpoint, base, row.id),
            self._state.put_home(row.id, host),
        )
        clock.passed("copy")
        target = arrival(row)
        target.programs, target.conversation, target.turns = held.programs, held.conversation, held.turns
        target.verify = False  # as in restores and forks
        await arrive(self.members, row, held.checkpoint, host, target, moved=True)
        self._last[row.id] = held.checkpoint, target
        clock.passed("arrive")
        return size

    # ----------------------------------------------------------------- afterwards

    async def _try_to_settle(self, sandbox: str) -> None:
        if sandbox in self._state.moves:
            try:
                await self._finalize(sandbox)
            except PagurusError as error:  # a host does not answer: tried again
                log.warning("a move is not at its end yet: %s", error, extra={"sandbox": sandbox})

    async def _finalize(self, sandbox: str) -> None:
        """Finish the move where it has arrived, else take it back. Raises where a host does not answer."""
        move = self._state.moves[sandbox]
        info = await self._arrived(sandbox, move.target)
        if info is None:
            await self._back(sandbox, move)
        else:
            path = f"/v1/checkpoints/{part(info.head or '')}?wait=durable&timeout=60"
            head = await self._upstream(move.target).call("GET", path, CheckpointInfo, timeout=TIMEOUT)
            if head.durable_at is None:
                raise Conflict(
                    f"{sandbox} is not durable at {move.target} yet: {head.error}",
                    sandbox=sandbox,
                    hint="wait, or remove checkpoints on that host if its disk is full",
                )
            await self._state.went_on(sandbox, move.target)
            if (existing := self.members.places.get(sandbox)) is not None and existing.host == move.target:
                # A report from before shows a former state, which must not become the newest copy.
                existing.row.durable, existing.row.durable_turn, existing.since = head.id, head.turn, time.monotonic()
            # Of a host that is lost nothing is waited for: copies, and answers that wait for them, wait for this end.
            if move.source in self.members.hosts and not self._over(move.source):
                with contextlib.suppress(NotFound):
                    path = f"/v1/sandboxes/{sandbox}/left"
                    left = await self._upstream(move.source).call("POST", path, DepartedSandbox, timeout=TIMEOUT)
                    self.members.has_left(sandbox, move.source)
                    last, state = self._last.get(sandbox, ("", None))
                    newest = state if left.checkpoint == last else None
                    await self.copies.keep(sandbox, move.source, left.checkpoint, newest)
        await self._state.drop_move(sandbox)
        self._go_on(sandbox)
        if sandbox not in self._under_way:
            self._let_go(sandbox)

    async def _arrived(self, sandbox: str, host: str) -> SandboxInfo | None:
        """The sandbox at the other host; None: it does not run there, and will not."""
        if host not in self.members.hosts or self._over(host):
            return None
        for _ in range(2):  # what is on its way there has an end before the second look
            with contextlib.suppress(NotFound):
                return await self._upstream(host).call("GET", f"/v1/sandboxes/{sandbox}", SandboxInfo)
            await self._upstream(host).call("DELETE", f"/v1/arrivals/{sandbox}", msgspec.Raw, timeout=TIMEOUT)
        return None

    async def _back(self, sandbox: str, move: MoveRow) -> None:
        """It continues where and as it was. If that host is lost as well, it is one of the sandboxes of a lost host."""
        existing = self.members.places.get(sandbox)
        been = existing is not None and existing.host != move.source
        if been or self._state.homes.get(sandbox, move.source) != move.source:  # else a full disk delays nothing
            await self._state.put_home(sandbox, move.source)
        if move.source in self.members.hosts and not self._over(move.source):
            with contextlib.suppress(NotFound):
                await self._upstream(move.source).call("DELETE", f"/v1/sandboxes/{sandbox}/hold", msgspec.Raw)
        if been:  # what it has done at the other host has not taken place
            row = move.sandbox
            self.members.places[sandbox] = SandboxPlace(
                move.source, row, time.monotonic(), origin=row.head, origin_turn=row.turn
            )

    def _over(self, host: str) -> bool:
        """Whether a host surely acts no more."""
        return lease.over(self.members.member(host).lease, time.monotonic())

    def _upstream(self, host: str) -> HostConnection:
        return self.members.member(host).upstream


class _Clock:
    """Milliseconds of each part of a pause."""

    def __init__(self) -> None:
        self.parts_ms: dict[str, float] = {}
        self._since = time.monotonic()

    def passed(self, part: str) -> None:
        now = time.monotonic()
        self.parts_ms[part], self._since = 1000 * (now - self._since), now
