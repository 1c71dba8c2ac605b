"""`EnginePool`: engine servers, of one class or several, as if they were one that never fails.

Guarantee: a request ends with an answer, its refusal as nonsense, or its cancellation; the death or the silence of a
server costs time alone: what was streamed is kept, the rest is sampled elsewhere after prompt and kept tokens. Each
token's span names the weights that sampled it; where that cannot be known the token is sampled again, and no reader has
got it. While weights are taken by some servers the others continue.

::

    generate ─▶ waiting ──route──▶ member: stream ─▶ deltas ─▶ answer ─▶ whole
                   ▲                   │ lost, hung
                   └── prompt + deltas ┘
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from rollout.decide.engines.measuring import AnswerTimer, StepTimes
from rollout.decide.engines.prefixes import chain
from rollout.decide.engines.routing import RoutingRules, judge, next_to_update
from rollout.decide.view import FleetView
from rollout.engine.asking import KIND
from rollout.engine.client import Delta, EngineClient, Generation, PublishResult, Sampling
from rollout.pool.answer import PartialGeneration
from rollout.pool.member import Note, PoolMember, ServerHandle
from rollout.pool.slots import Log, SlotRequest, Slots
from sandbox.errors import Closed, Conflict, EngineFailed, NotFound, PagurusError

T = TypeVar("T")
log = logging.getLogger("pagurus.pool")

TICK = 0.25  # seconds between two looks at the servers' health
PROBE_INTERVAL = 2.0  # seconds

Enough = Callable[[list[int]], int | None]  # of an answer's tokens so far, how many are all; None: not yet


class EnginePool:
    """``async with EnginePool() as pool: await pool.join("a", server); await pool.generate(ids, sampling)``"""

    def __init__(
        self,
        *,
        rules: RoutingRules | None = None,
        at_once: int = 1,
        report: Log | None = None,
        note: Note | None = None,
    ):
        """`at_once`: servers that take weights at the same time. `report` hears each decision, with its view; `note`
        each change of a server's state or load."""
        self.rules, self.at_once, self._note = rules or RoutingRules(), at_once, note
        self.members: dict[str, PoolMember] = {}
        self.counts: Counter[str] = Counter()
        self.steps = StepTimes()
        self.slots = Slots(self.members, self.rules, self.counts, report)
        self._keys = itertools.count()
        self._target: tuple[Path | str, int] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def __aenter__(self) -> EnginePool:
        self._spawn(self._watch(), "pool health")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends no server: who started them ends them. Requests that wait are refused. Idempotent."""
        self._closed = True
        self.slots.refuse(Closed("the pool is closed"))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ----------------------------------------------------------------- servers

    async def join(self, name: str, server: ServerHandle, *, hardware: str = "", colocated: bool = False) -> None:
        """A server more; it takes the pool's version first if it serves another one. Servers of one `hardware` are
        alike; where there are several, requests go where they cost least (`rollout.decide.engines.affinity`).
        `colocated`:
        it serves users, takes requests as its `slots` of the moment say, and may end them when its users need all of
        it."""
        if name in self.members:
            raise Conflict(f"the pool has a server {name!r}", hint="choose another name")
        member = self.members[name] = PoolMember(name, server, hardware, colocated, note=self._note)
        await self._revive(member)

    async def drain(self, name: str) -> ServerHandle:
        """A server less: it finishes what it has and gets nothing new. It is not ended, but given back."""
        member = self.members.get(name)
        if member is None:
            raise NotFound(f"the pool has no server {name!r}", hint=f"there are: {', '.join(self.members) or 'none'}")
        if member.state == "serving":
            member.state = "draining"
        while member.load:
            await self.slots.change()
        del self.members[name]
        self.slots.prefixes.forget(name)
        return member.server

    def fleet(self) -> FleetView:
        """For who decides how many of them rest."""
        ours = [member for member in self.members.values() if not member.colocated]
        base, item = self.steps.line()
        return FleetView(
            engines=sum(member.state == "serving" for member in ours),
            slots=min((member.server.slots for member in ours), default=0),
            base=base,
            item=item,
            rested=any(member.state == "resting" for member in ours),
        )

    def rest(self, stay: int) -> None:
        """Servers rest until the next version, all but the first `stay`. Their requests continue at these, from now
        on."""
        serving = [item for item in self.members.values() if item.state == "serving" and not item.colocated]
        for member in serving[stay:]:
            log.info("server %s rests until the next version; its %d requests move", member.name, member.load)
            self.counts["rested"] += 1
            member.give_up()
            member.state = "resting"
            self.slots.prefixes.forget(member.name)
            member.asleep = self._spawn(self._sleep(member), f"{member.name} goes to rest")

    async def _sleep(self, member: PoolMember) -> None:
        while member.load:
            await self.slots.change()
        try:
            async with asyncio.timeout(self.rules.silence):
                await (await member.server.wait_serving()).rest()
        except (EngineFailed, TimeoutError) as error:  # a server started in its place has nothing to do either
            log.warning("server %s is given no requests, but does not rest: %s", member.name, error)

    async def _wake(self, member: PoolMember) -> None:
        """From rest, to the version that the pool has now."""
        if member.asleep is not None:
            await asyncio.wait([member.asleep])
        with suppress(EngineFailed):  # it died, and who is started in its place is awake
            await (await member.server.wait_serving()).resume()
        await self._come_back(member)

    async def _revive(self, member: PoolMember) -> None:
        """Wait until it serves; bring it to the pool's version; then it takes requests."""
        member.state, member.updating_since = "starting", None
        self.slots.prefixes.forget(member.name)
        member.client, member.version = await self._answers(member)
        if self._target is not None and member.version != self._target[1]:
            await self._update(member, *self._target)
        else:
            member.state = "serving"
        self.slots.decide_soon()

    async def _answers(self, member: PoolMember) -> tuple[EngineClient, int]:
        """A client that answers, and the version that it serves. One whose death was not noticed yet does not."""
        while True:
            client = await member.server.wait_serving()
            try:
                return client, await client.version()
            except EngineFailed:
                await asyncio.sleep(TICK)

    def _down(self, member: PoolMember, why: str) -> None:
        """It is lost or hangs: its requests go elsewhere, and it returns when it serves again."""
        if member.state in ("starting", "draining") or self.members.get(member.name) is not member:
            return
        log.warning("server %s of the pool: %s; its %d requests continue elsewhere", member.name, why, member.load)
        self.counts[why] += 1
        member.restarts += 1
        member.give_up()
        if why == "hung":
            member.server.kill()
        member.state = "starting"
        self._spawn(self._come_back(member), f"revive {member.name}")

    async def _come_back(self, member: PoolMember) -> None:
        try:
            await self._revive(member)
        except EngineFailed as error:  # it is down for good; the others continue, and callers get the error
            log.error("server %s of the pool does not return: %s", member.name, error)
            member.state = "down"
            self._wake_all()  # the others, who may be all that is left
            self._refuse_if_hopeless(error)
        except PagurusError as error:
            log.warning("server %s of the pool keeps the version that it has: %s", member.name, error)

    def _refuse_if_hopeless(self, error: EngineFailed) -> None:
        if all(member.state == "down" for member in self.members.values()):
            self.slots.refuse(EngineFailed(f"no server of the pool is left: {error}", hint=error.hint))

    async def _watch(self) -> None:
        """Consumes: signs of life. Produces: servers that are given up."""
        probed = 0.0
        while True:
            await asyncio.sleep(TICK)
            now = time.monotonic()
            if self.slots.waiting and any(member.colocated for member in self.members.values()):
                self.slots.decide_soon()  # there is no event when users leave more room
            for member in list(self.members.values()):
                if member.state not in ("serving", "updating", "resting"):
                    continue
                result = [judge(signs, self.rules, now) for signs in member.signs()]
                if "hung" in result:
                    self._down(member, "hung")
                elif now - probed > PROBE_INTERVAL and member.state != "updating":
                    self._spawn(self._probe(member), f"probe {member.name}")
            if now - probed > PROBE_INTERVAL:
                probed = now

    async def _probe(self, member: PoolMember) -> None:
        await member.probe()
        if member.state == "down":
            member.state = "serving"  # what `_down` expects of one that it takes down
            self._down(member, "lost")

    # ----------------------------------------------------------------- requests

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "", priority: int = 0
    ) -> Generation:
        """Like an engine's. `priority`: lower goes first."""
        answer = PartialGeneration(sampling)
        async with aclosing(self._grow(prompt_ids, answer, request_id, priority)) as grown:
            async for _ in grown:
                pass
        return answer.generation

    async def stream(
        self,
        prompt_ids: list[int],
        sampling: Sampling,
        *,
        request_id: str = "",
        priority: int = 0,
        enough: Enough | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Like an engine's. Spans come with the last delta, and cover all servers. Closing it ends the request.

        Tokens that may have to be sampled again are sent when it is certain that they need not.
        `enough` is called after each piece, and ends the answer: the engine stops, and reports which weights sampled
        it.
        """
        answer, reported = PartialGeneration(sampling), 0
        async with aclosing(self._grow(prompt_ids, answer, request_id, priority, enough)) as grown:
            async for _ in grown:
                if (certain := answer.certain) > reported:
                    yield Delta(
                        token_ids=answer.token_ids[reported:certain], logprobs=answer.logprobs[reported:certain]
                    )
                    reported = certain
        last = answer.generation
        yield Delta(
            token_ids=last.token_ids[reported:],
            logprobs=last.logprobs[reported:],
            spans=last.spans,
            finish_reason=last.finish_reason,
            experts=last.experts,
        )

    async def _grow(
        self,
        prompt_ids: list[int],
        answer: PartialGeneration,
        request_id: str,
        priority: int,
        enough: Enough | None = None,
    ) -> AsyncGenerator[None, None]:
        """The answer, piece by piece, to its end."""
        self.counts["requests"] += 1
        key = next(self._keys)
        blocks: list[int] = []
        while True:
            ids = prompt_ids + answer.token_ids
            blocks = chain(ids, blocks)
            ticket = SlotRequest(key, priority, ids, blocks, KIND.get())
            if self._closed:
                raise Closed("the pool is closed", hint="make a new EnginePool")
            member = await self.slots.wait(ticket)
            name = f"{request_id or key}.{answer.parts}"
            new, read = len(ids) - ticket.existing, len(ids) - ticket.held
            loop = asyncio.get_running_loop()
            measured = AnswerTimer(member, ticket.kind, new=new, read=read, now=loop.time(), steps=self.steps)
            try:
                async with aclosing(self._from(member, ids, answer, name)) as deltas:
                    async for delta in deltas:
                        answer.add(delta)
                        if delta.token_ids:
                            measured.piece(len(delta.token_ids), loop.time())
                        if enough is not None and not answer.enough:
                            await self._end(member, answer, name, enough)
                        yield
                self.slots.prefixes.remember(member.name, chain(prompt_ids + answer.token_ids, blocks))
                if answer.token_ids:
                    self.slots.profiles.learn(measured.answered)
                return
            except (EngineFailed, TimeoutError) as error:
                dropped = answer.break_off()
                if answer.enough:  # only the engine's last word is missing; whether it lives is for a probe to say
                    return
                self._lost(member, error)
                self.counts["moved"] += 1
                self.counts["moved_tokens"] += len(answer.token_ids)
                self.counts["dropped_tokens"] += dropped
                if answer.complete:
                    return
            finally:
                measured.leave()
                self.slots.release(member, len(ids))

    async def _from(
        self, member: PoolMember, ids: list[int], answer: PartialGeneration, name: str
    ) -> AsyncGenerator[Delta, None]:
        """The deltas of one server. TimeoutError: the server was given up."""
        client = member.client
        if client is None or member.state not in ("serving", "updating"):
            raise EngineFailed(f"server {member.name} is gone", hint="send the request again: another server takes it")
        version, sampling = member.version, answer.begin(member.version)
        updates = member.updates if member.state == "serving" else -1
        async with aclosing(client.stream(ids, sampling, request_id=name, priority=int(member.colocated))) as deltas:
            while (delta := await self._waited(member, anext(deltas, None))) is not None:
                member.last_seen = time.monotonic()
                if member.updates != updates:
                    answer.doubt()
                if delta.finish_reason == "abort" and not answer.enough:
                    raise EngineFailed(
                        f"server {member.name} ended a request of version {version}", hint="send the request again"
                    )
                yield delta

    async def _end(self, member: PoolMember, answer: PartialGeneration, name: str, enough: Enough) -> None:
        """Ask whether the answer is enough; if so, end its request. What the engine says last has its versions."""
        count = enough(answer.token_ids)
        if count is not None:
            answer.cut(count)
            if answer.finish is None and member.client is not None:
                await self._waited(member, member.client.abort([name]))

    async def _waited(self, member: PoolMember, reported: Awaitable[T]) -> T:
        """A server's answer. TimeoutError: it was given up."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                member.waits[limit] = time.monotonic()
                return await reported
        finally:
            member.waits.pop(limit, None)

    def _lost(self, member: PoolMember, error: Exception) -> None:
        """A request failed there. Whether the server did is for a probe to say, but for a connection that broke."""
        if member.state in ("serving", "updating") and isinstance(error, EngineFailed):
            log.info("a request to server %s failed: %s", member.name, error)
            self._down(member, "lost")

    # ----------------------------------------------------------------- weights

    async def publish(self, directory: Path | str, version: int) -> PublishResult:
        """Have every server take the version, some at a time. Those that are down take it when they return.

        `directory`: where versions are published, a directory or an URL.
        """
        self._target, began, paused = (directory, version), time.monotonic(), 0.0
        waking = self._wake_all()
        await asyncio.gather(*(self._fetch(item, version) for item in self.members.values() if item.state == "serving"))
        running: dict[asyncio.Task[float], PoolMember] = {}
        while self._target == (directory, version):
            takings = [member.taking for member in self.members.values()]
            for name in next_to_update(takings, version, at_once=self.at_once):
                member = self.members[name]
                running[asyncio.create_task(self._update(member, directory, version))] = member
                member.state = "updating"
            if not running:
                if any(member.version == version for member in self.members.values()):
                    break
                await self.slots.change()  # none serves: the first that returns takes it
                continue
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                del running[task]
                paused = max(paused, task.result())
        if waking:  # servers that died since return later
            await asyncio.wait(waking, timeout=self.rules.silence)
        return PublishResult(version=version, seconds=time.monotonic() - began, paused_s=paused)

    def _wake_all(self) -> list[asyncio.Task[None]]:
        resting = [member for member in self.members.values() if member.state == "resting"]
        for member in resting:
            member.state = "starting"
        return [self._spawn(self._wake(member), f"wake {member.name}") for member in resting]

    async def _fetch(self, member: PoolMember, version: int) -> None:
        """One server fetches the version while it serves. Where it cannot, `_update` finds out why."""
        try:
            async with asyncio.timeout(self.rules.update):
                await self._answers_soon(member)
                await member.server.fetch(version)
        except (TimeoutError, PagurusError) as error:
            log.warning("server %s has not fetched version %d: %s", member.name, version, error)

    async def _update(self, member: PoolMember, directory: Path | str, version: int) -> float:
        """One server takes the version; its requests pause and continue. Seconds of the pause."""
        member.state, member.updating_since = "updating", time.monotonic()
        member.updates += 1
        try:
            await self._answers_soon(member)
            published = await member.server.publish(directory, version)
        except TimeoutError:
            self._down(member, "hung")
            return 0.0
        except EngineFailed as error:
            if member.state == "updating":
                self._down(member, "lost")
            log.warning("server %s did not take version %d: %s", member.name, version, error)
            return 0.0
        except PagurusError:  # no such version can be had: it serves what it served before
            if member.state == "updating":
                member.state, member.updating_since = "serving", None
                self.slots.decide_soon()
            raise
        member.updating_since = None
        member.version = version
        member.client = await member.server.wait_serving()
        member.last_seen = time.monotonic()
        self.slots.prefixes.forget(member.name)
        if member.state == "updating":
            member.state = "serving"
        self.slots.decide_soon()
        return published.paused_s

    async def _answers_soon(self, member: PoolMember) -> None:
        """TimeoutError where it is silent: the others do not wait for their weights for as long as weights may take."""
        if member.client is not None:
            async with asyncio.timeout(self.rules.silence):
                await member.client.version()

    # ----------------------------------------------------------------- to look at

    def statistics(self) -> dict[str, object]:
        counts, ideal = self.counts, self.counts["prefix_ideal"]
        return {
            **counts,
            "waiting": self.slots.waiting,
            "prefix_hit_share": counts["prefix_hit"] / ideal if ideal else 1.0,
            "servers": {
                member.name: {"state": member.state, "version": member.version, "load": member.load}
                for member in self.members.values()
            },
        }

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
