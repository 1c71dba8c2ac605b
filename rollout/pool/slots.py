"""Who of those that wait gets which server's slot.

Guarantee: a slot that was given is given back by its holder, or was never announced; one decision is made for all slots
that become free in one turn of the event loop.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rollout.decide.engines.affinity import Profiles
from rollout.decide.engines.prefixes import Prefixes
from rollout.decide.engines.routing import RoutedRequest, RouteView, RoutingRules, Send, route
from rollout.pool.member import PoolMember
from sandbox.errors import PagurusError

Log = Callable[[RouteView, list[Send]], None]


@dataclass(eq=False)
class SlotRequest:
    """A request that waits for a server."""

    key: int
    priority: int
    ids: list[int]
    blocks: list[int]  # see rollout.decide.engines.prefixes.chain
    kind: str  # of environment
    held: int = 0  # tokens that its server holds, once it has one
    existing: int = 0  # that some server holds
    slot: asyncio.Future[PoolMember] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def __lt__(self, other: SlotRequest) -> bool:
        return (self.priority, self.key) < (other.priority, other.key)


class Slots:
    """``member = await slots.wait(ticket)``, and in any case ``slots.release(member, len(ticket.ids))``"""

    def __init__(
        self, members: Mapping[str, PoolMember], rules: RoutingRules, counts: Counter[str], report: Log | None
    ):
        self.members, self.rules, self.counts, self._report = members, rules, counts, report
        self.slow_ms: list[float] = []  # of recent requests: from a free slot to the server's connection
        self.prefixes, self.profiles = Prefixes(), Profiles()
        self.changed = asyncio.Event()
        self._waiting: list[SlotRequest] = []
        self._deciding = False  # a decision is due in this turn of the event loop

    @property
    def waiting(self) -> int:
        return sum(not ticket.slot.done() for ticket in self._waiting)

    async def wait(self, ticket: SlotRequest) -> PoolMember:
        """A server; the caller gives the slot back."""
        began = time.perf_counter()
        heapq.heappush(self._waiting, ticket)
        self._decide()
        waited = not ticket.slot.done()
        try:
            member = await ticket.slot
        except asyncio.CancelledError:
            if ticket.slot.done() and not ticket.slot.cancelled() and ticket.slot.exception() is None:
                self.release(ticket.slot.result(), len(ticket.ids))
            ticket.slot.cancel()
            raise
        if not waited:
            self.slow_ms.append(1000 * (time.perf_counter() - began))
            del self.slow_ms[:-20_000]
        return member

    def release(self, member: PoolMember, tokens: int) -> None:
        member.load -= 1
        member.tokens -= tokens
        self.decide_soon()

    def refuse(self, error: PagurusError) -> None:
        """All that wait."""
        for ticket in self._waiting:
            if not ticket.slot.done():
                ticket.slot.set_exception(error)
        self._waiting.clear()

    def decide_soon(self) -> None:
        """At the end of this turn of the event loop."""
        if not self._deciding:
            self._deciding = True
            asyncio.get_running_loop().call_soon(self._decide)

    def _decide(self) -> None:
        """Gives free slots to those who wait, as the rules say."""
        self._deciding = False
        while first := self._first(self._free):
            existing = {ticket.key: self.prefixes.deepest(ticket.blocks) for ticket in first}
            view = RouteView(
                servers=[member.view for member in self.members.values()],
                waiting=[
                    RoutedRequest(t.key, t.priority, *existing[t.key], len(t.ids), self.profiles.need(t.kind))
                    for t in first
                ],
                rates=self.profiles.rates(),
            )
            sends = route(view, self.rules)
            if self._report is not None:
                self._report(view, sends)
            tickets = {ticket.key: ticket for ticket in first}
            for send in sends:
                self._give(tickets.pop(send.key), self.members[send.server], existing[send.key][1], send.why)
            for ticket in tickets.values():
                heapq.heappush(self._waiting, ticket)
            if tickets:
                break
        self.changed.set()

    @property
    def _free(self) -> int:
        return sum(max(0, m.server.slots - m.load) for m in self.members.values() if m.state == "serving")

    def _first(self, free: int) -> list[SlotRequest]:
        """Takes the first requests out of those that wait, as many as there are free slots."""
        result: list[SlotRequest] = []
        while self._waiting and len(result) < min(free, self.rules.batch):
            ticket = heapq.heappop(self._waiting)
            if not ticket.slot.done():
                result.append(ticket)
        return result

    def _give(self, ticket: SlotRequest, member: PoolMember, existing: int, why: str) -> None:
        member.load += 1
        member.tokens += len(ticket.ids)
        self.counts[f"routed_{why}"] += 1
        self.counts["prompt_tokens"] += len(ticket.ids)
        self.counts["prefix_ideal"] += existing
        ticket.existing = existing
        ticket.held = existing if why == "prefix" else self.prefixes.depth(member.name, ticket.blocks)
        self.counts["prefix_hit"] += ticket.held
        self.prefixes.remember(member.name, ticket.blocks)
        ticket.slot.set_result(member)

    async def change(self) -> None:
        """Until something has changed."""
        self.changed.clear()
        await self.changed.wait()
