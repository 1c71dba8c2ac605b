"""The conversation of one sandbox with its model.

::

    request ─▶ follow the sandbox ─▶ decide ─┬ fresh ─▶ end of turn ─▶ journal ─▶ ask the upstream ─┐
               (was it restored?)            ├ join, again ──────────────────────────────────────────┤
                                             └ record ───────────────────────────────────────────────┤
    agent ◀── the whole answer ◀── captured (or durable) ◀───────────────────────────────────────────┘

Guarantee (I2): an answer of the main loop is given out only after the checkpoint of the state behind the request is
captured, or durable where the sandbox says so. Where a checkpoint fails, the answer says so in a header and the next
checkpoint has the content pending. An exchange is answered by one upstream call; the upstream is called again only if
no complete answer was ever journalled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

from daemon import metrics
from daemon.auth.shares import CallShare, Shares, memory_part
from daemon.checkpoints.capture import need_space
from daemon.gateway import replay
from daemon.gateway.answer import UpstreamAnswer, cut, deliver, is_open, pump
from daemon.gateway.journal import ConversationJournal, JournalCursor
from daemon.gateway.listener import SandboxShare
from daemon.gateway.replay import Do, ReplayChoice, ReplayExchange
from daemon.gateway.upstream import UpstreamResponse, Upstreams
from daemon.gateway.wire import AgentRequest
from daemon.turns.turns import LiveSandbox
from sandbox.errors import Closed, Conflict, NoSpace, PagurusError, SandboxDead
from sandbox.messages import CheckpointState, Gateway, GatewayStatistics, SandboxState

if TYPE_CHECKING:
    from daemon.host.host import Host

log = logging.getLogger("pagurus.gateway")

MAX_JOURNAL = 1 << 30  # bytes of the record of one sandbox
MAX_EXCHANGES = 100_000  # in it
REVIVAL = 600.0  # seconds for which an agent outside waits for its sandbox to be restored
BOOT = secrets.token_hex(4)  # answers of another daemon may have been lost on the way


@dataclass
class Ledger:
    """All exchanges of the host's sandboxes, without their content."""

    steps: dict[int, ReplayExchange] = field(default_factory=dict)
    by_checkpoint: dict[str, list[int]] = field(default_factory=dict)
    owner: dict[int, str] = field(default_factory=dict)
    sides: dict[str, dict[bytes, list[ReplayExchange]]] = field(
        default_factory=dict
    )  # by sandbox and key: there may be many
    count: Counter[str] = field(default_factory=Counter)  # of each sandbox

    def add(self, sandbox: str, step: ReplayExchange, *, main: bool) -> None:
        self.owner[step.id] = sandbox
        self.count[sandbox] += 1
        if not main:
            self.sides.setdefault(sandbox, {}).setdefault(step.key, []).append(step)
            return
        self.steps[step.id] = step
        if step.checkpoint is not None:
            self.by_checkpoint.setdefault(step.checkpoint, []).append(step.id)

    def drop(self, numbers: set[int]) -> None:
        for number in numbers:
            if (sandbox := self.owner.pop(number, None)) is not None:
                self.count[sandbox] -= 1
                if not self.count[sandbox]:
                    del self.count[sandbox]
            step = self.steps.pop(number, None)
            if step is not None and step.checkpoint is not None:
                left = [other for other in self.by_checkpoint.get(step.checkpoint, ()) if other != number]
                if left:
                    self.by_checkpoint[step.checkpoint] = left
                else:
                    self.by_checkpoint.pop(step.checkpoint, None)


@dataclass
class GatewayContext:
    """What all lines of a host share."""

    journal: ConversationJournal
    upstreams: Upstreams
    host: Host
    ledger: Ledger = field(default_factory=Ledger)
    counts: GatewayStatistics = field(default_factory=GatewayStatistics)
    answers: dict[int, UpstreamAnswer] = field(default_factory=dict)  # under way, by exchange
    memory: Shares = field(default_factory=lambda: Shares("of models' answers", memory_part()))


class LiveConversation:
    """One sandbox's conversation."""

    def __init__(self, sandbox: str, settings: Gateway, place: JournalCursor, handler: GatewayContext) -> None:
        self.sandbox = sandbox
        self.settings = settings
        self.place = place
        self.handler = handler
        self.share = SandboxShare()
        self.path: list[ReplayExchange] = replay.path_to(handler.ledger.steps, place.head)
        self.bytes = 0  # of its record
        self.deciding = asyncio.Lock()
        self._readers: dict[int, web.BaseRequest] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    # ----------------------------------------------------------------- the sandbox behind it

    @property
    def live(self) -> LiveSandbox:
        result = self.handler.host.live_sandboxes.get(self.sandbox)
        if result is None:
            raise Closed("the sandbox has been removed", hint="create a sandbox, and give the agent its address")
        return result

    @property
    def life(self) -> str:
        """Changes whenever the agent may have lost an answer."""
        return f"{BOOT}:{self.place.tree}"

    async def living(self) -> None:
        """An agent outside waits while its sandbox is dead or on its way back."""
        deadline = time.monotonic() + REVIVAL
        while (live := self.live).row.state is not SandboxState.RUNNING or not live.container.alive:
            if self.settings.agent == "inside" or time.monotonic() > deadline:
                raise SandboxDead("all its processes are gone", hint="restore it", sandbox=live.row.id)
            await asyncio.sleep(0.05)

    async def follow(self) -> bool:
        """Notice that the sandbox was restored since. True if that took it to another place on its path."""
        row = self.live.row
        if row.tree is None or row.tree == self.place.tree:
            return False
        head = head_now(self.handler, row.head, self.path)
        moved = head != self.place.head
        self.place.tree = row.tree
        if moved:
            self.path = replay.path_to(self.handler.ledger.steps, head)
            self.place.head, self.place.cursor, self.place.position = head, len(self.path) - 1, 0
            self.place.script = []
            log.info("continues from exchange %s", head, extra={"sandbox": row.id, "turn": row.turn})
        await self.handler.journal.put_place(row.id, self.place, drop_commands=moved)
        return moved

    # ----------------------------------------------------------------- requests

    async def serve(self, requested: AgentRequest, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request of the agent."""
        self.handler.counts.requests += 1
        self.need_space()
        if requested.route.conversation is None:
            return await self._pass_on(requested, request)
        if requested.main:
            await self.living()
        async with self.deciding:
            step, answer, source = await (self._main if requested.main else self._side)(requested)
            self._take(step, answer, request)
        try:
            return await self._give(requested, step, answer, request, source)
        finally:
            answer.leave(request)
            if self._readers.get(step.id) is request:
                del self._readers[step.id]

    def need_space(self) -> None:
        """Raise NoSpace when nothing more of this sandbox is written down."""
        if self.bytes > MAX_JOURNAL:
            raise NoSpace(
                f"the record of this sandbox has {MAX_JOURNAL >> 30} GiB", hint="continue in a fork or a new sandbox"
            )
        if self.handler.ledger.count[self.live.row.id] >= MAX_EXCHANGES:  # each is in the daemon's memory
            raise NoSpace(
                f"this sandbox has called its model {MAX_EXCHANGES} times", hint="continue in a fork or a new sandbox"
            )
        need_space(self.handler.journal.path.parent)  # the host's, which others need as well

    def _take(self, step: ReplayExchange, answer: UpstreamAnswer, request: web.BaseRequest) -> None:
        """`request` waits for this answer from now on, and no other."""
        before = self._readers.get(step.id)
        if before is not None and before is not request:
            cut(before)
            answer.leave(before)
        self._readers[step.id] = request
        answer.join(request)

    async def _give(
        self,
        requested: AgentRequest,
        step: ReplayExchange,
        answer: UpstreamAnswer,
        request: web.BaseRequest,
        source: str,
    ) -> web.StreamResponse:
        live, counts = self.live, self.handler.counts
        extra = {"x-pagurus-exchange": str(step.id), "x-pagurus-answer": source}
        requested_at = time.monotonic()
        await answer.head()
        if requested.main:
            began = time.monotonic()
            if source == "upstream":
                live.captures.thought(began - requested_at)
            if error := await self._captured(live, step):
                extra["x-pagurus-checkpoint-error"] = error
            held = time.monotonic() - began
            counts.held_ms += 1000 * held
            metrics.gateway_held.observe(held)
            extra |= {"x-pagurus-turn": str(step.turn), "x-pagurus-checkpoint": step.checkpoint or ""}
        response = await deliver(answer, request, extra)
        if response is None or self._readers.get(step.id) is not request:
            return response or web.Response(status=499)
        if answer.status < 300:
            step.last_seen = self.life
            await self.handler.journal.last_seen(step.id, from_record=source == "record")
        return response

    async def _captured(self, live: LiveSandbox, step: ReplayExchange) -> str:
        """Returns when the requesting state is captured, or durable; why not, if its checkpoint failed."""
        inflight = live.services.inflights.get(step.checkpoint or "")
        if inflight is None:
            await live.captures.finalized()
            row = live.services.checkpoints.get(step.checkpoint or "")
            bad = {CheckpointState.FAILED} | ({CheckpointState.CAPTURED} if live.row.durable_answers else set())
            if row is None or row.state not in bad:
                return ""
            return (row.error or row.state.value).replace("\n", " ")[:200]
        await inflight.finalized(durable=live.row.durable_answers)
        trouble = inflight.trouble(durable=live.row.durable_answers)
        return "" if trouble is None else str(trouble).replace("\n", " ")[:200]

    # ----------------------------------------------------------------- which exchange

    async def _main(self, requested: AgentRequest) -> tuple[ReplayExchange, UpstreamAnswer, str]:
        await self.follow()
        self._see_readers(self.path)
        if self.settings.agent == "inside":
            choice = replay.inside(self.path, requested.key, life=self.life, retry=requested.retry)
        else:
            choice = replay.outside(self.path, self.place.cursor, requested.key, retry=requested.retry)
        if choice.do is Do.LEFT:
            raise self._left(choice)
        if self.settings.agent == "outside" and choice.step is not None and choice.cursor != self.place.cursor:
            self.place.cursor, self.place.position = choice.cursor, 0
            await self.handler.journal.put_place(self.live.row.id, self.place)
        if choice.do is not Do.FRESH:
            assert choice.step is not None
            return await self._existing(choice.do, choice.step, requested)
        return await self._fresh(requested)

    def _left(self, choice: ReplayChoice) -> Conflict:
        where = "before its first request" if choice.step is None else f"at turn {choice.step.turn}"
        to = "created" if choice.step is None else choice.step.checkpoint
        return Conflict(
            f"the agent started over, and {where} it asks what the record does not know: the sandbox is further on",
            hint=f"restore the sandbox to checkpoint {to}, then ask again",
            sandbox=self.live.row.id,
        )

    async def _existing(
        self, do: Do, step: ReplayExchange, requested: AgentRequest
    ) -> tuple[ReplayExchange, UpstreamAnswer, str]:
        if do is Do.JOIN:
            return step, self.handler.answers[step.id], "upstream"
        if do is Do.AGAIN:
            return step, self._request(step, requested), "upstream"
        self.handler.counts.from_record += 1
        return step, UpstreamAnswer.of(await self.handler.journal.answer(step.id), self._memory()), "record"

    async def _fresh(self, requested: AgentRequest) -> tuple[ReplayExchange, UpstreamAnswer, str]:
        """A new exchange: the turn ends here."""
        live = self.live
        waiting = [step.id for step in self.path if step.id in self._readers]
        ended = await live.end_turn_by_request(f"{requested.route.method} {requested.route.path}")
        self.handler.counts.main += 1
        steps = self.handler.ledger.steps
        script = [steps[number] for number in self.place.script if number in steps]
        acted = replay.scripted(script, requested.key)
        self.place.script = self.place.script[1:] if acted is not None else []
        self.place.cursor, self.place.position = len(self.path), 0
        step = await self._begin(requested, ended.turn or 0, ended.checkpoint, waiting, acted)
        self.path.append(step)
        if acted is not None:
            return await self._existing(Do.RECORD, step, requested)
        return step, self._request(step, requested), "upstream"

    async def _begin(
        self,
        requested: AgentRequest,
        turn: int,
        checkpoint: str | None = None,
        waiting: Sequence[int] = (),
        acted: ReplayExchange | None = None,
    ) -> ReplayExchange:
        """Write a new exchange down. `acted`: its answer is that of another one."""
        sandbox, parent = self.live.row.id, self.place.head
        number, size = await self.handler.journal.begin(
            requested,
            sandbox=sandbox,
            parent=parent,
            checkpoint=checkpoint,
            turn=turn,
            open_=waiting,
            place=self.place,
            copied=None if acted is None else acted.id,
        )
        answered = acted is not None
        step = ReplayExchange(
            number, requested.key, parent, checkpoint, answered=answered, turn=turn, open=tuple(waiting)
        )
        self.handler.ledger.add(sandbox, step, main=requested.main)
        self.bytes += size
        return step

    async def _side(self, requested: AgentRequest) -> tuple[ReplayExchange, UpstreamAnswer, str]:
        """Outside the main loop: no turn, nothing is held; still one upstream call for one request."""
        live = self.live
        here = {None, *(step.id for step in self.path)}
        same = self.handler.ledger.sides.get(live.row.id, {}).get(requested.key, ())
        existing = [step for step in same if step.parent in here]
        self._see_readers(existing)
        for step in reversed(existing):
            choice = replay.inside([step], requested.key, life=self.life, retry=requested.retry)
            if choice.do is not Do.FRESH:
                return await self._existing(choice.do, step, requested)
        step = await self._begin(requested, live.row.turn)
        return step, self._request(step, requested), "upstream"

    def _see_readers(self, steps: Iterable[ReplayExchange]) -> None:
        """Who still waits for which of these."""
        for step in steps:
            reader = self._readers.get(step.id)
            step.waiting = reader is not None and is_open(reader)
            step.asking = step.id in self.handler.answers

    # ----------------------------------------------------------------- the upstream

    def _request(self, step: ReplayExchange, requested: AgentRequest) -> UpstreamAnswer:
        """Ask the upstream; the answer fills while the state is captured."""
        answer = self.handler.answers[step.id] = UpstreamAnswer(self._memory())
        work = self._pump(step, requested, answer)
        task = self.handler.host.services.spawn(work, f"exchange {step.id}", lasting=True)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return answer

    @property
    def _sharer(self) -> str:
        """With whose requests and answers those of this sandbox count."""
        row = self.live.row
        return row.owner or row.id

    def _memory(self) -> CallShare:
        return CallShare(self.handler.memory, self._sharer)

    def _open_upstream(self, requested: AgentRequest) -> contextlib.AbstractAsyncContextManager[UpstreamResponse]:
        return self.handler.upstreams.request(self.settings.upstream, requested, self._sharer)

    async def _pump(self, step: ReplayExchange, requested: AgentRequest, answer: UpstreamAnswer) -> None:
        journal, counts = self.handler.journal, self.handler.counts

        try:
            await journal.asking(step.id)
            counts.upstream_calls += 1
            async with self._open_upstream(requested) as response:
                await pump(answer, response)
                if answer.status < 300:
                    durable = self.settings.hold == "durable"
                    self.bytes += await journal.answered(step.id, answer.recorded(), durable=durable)
                    step.answered = True
                    metrics.exchanges_stored.inc()
                else:
                    await journal.failed(step.id, answer.status)
                    metrics.upstream_errors.labels("status").inc()
                answer.end()
        except PagurusError as error:
            counts.upstream_failures += 1
            metrics.upstream_errors.labels("unreachable").inc()
            log.warning("exchange %d: %s", step.id, error, extra={"sandbox": self.handler.ledger.owner.get(step.id)})
            await journal.failed(step.id, error.status)
            answer.fail(error)
        finally:
            self.handler.answers.pop(step.id, None)
            if not answer.ended:  # the daemon ends: the next one asks again
                answer.fail(Closed("the daemon ends", hint="ask again"))

    async def _pass_on(self, requested: AgentRequest, request: web.BaseRequest) -> web.StreamResponse:
        """A request that asks no model: neither journalled nor held."""
        answer = UpstreamAnswer(self._memory())
        answer.join(request)

        async def fill() -> None:
            try:
                async with self._open_upstream(requested) as response:
                    await pump(answer, response)
                    answer.end()
            except PagurusError as error:
                answer.fail(error)
            finally:
                if not answer.ended:
                    answer.fail(Closed("the daemon ends", hint="ask again"))

        task = self.handler.host.services.spawn(fill(), "side exchange", lasting=True)
        try:
            return await deliver(answer, request, {}) or web.Response(status=499)
        finally:
            task.cancel()
            answer.leave(request)

    async def close(self) -> None:
        """The daemon ends, or the sandbox is gone: waiting requests are cut off and may be repeated."""
        for request in self._readers.values():
            cut(request)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def head_now(handler: GatewayContext, head: str, path: list[ReplayExchange]) -> int | None:
    """The last exchange that the state of checkpoint `head` knows of."""
    checkpoints = handler.host.services.checkpoints
    row = checkpoints.get(head)
    return replay.head_of(
        handler.ledger.by_checkpoint,
        lambda name: checkpoints[name].parent,
        head,
        0 if row is None else row.turn,
        path,
    )
