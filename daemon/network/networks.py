"""The networks of all sandboxes of this host, as one attachment.

Guarantee: a sandbox's packets pass only while its address, its policy and its resolver are in force: they are put in
place before its link is, and taken away after it. What fails half-way leaves no link. A sandbox that has no network
and never had one costs a dictionary look-up.

::

    attach     policy ▸ table ▸ link ▸ resolver
    set        policy ▸ row ▸ table (one batch; connections are judged again)
    detach     resolver ▸ link ▸ table
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from ipaddress import IPv4Address
from itertools import chain
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from daemon.catalogue import SandboxRow
from daemon.network import links
from daemon.network.elements import Element, ElementChange, addressed, generation, named, permitted, service
from daemon.network.links import SandboxLink
from daemon.network.names import MAX_TTL, open_seconds
from daemon.network.policy import Policy, compile_policy, is_private, judge_answer, judge_name, why_refused
from daemon.network.refusals import Packet, RefusalListener, RefusalLog
from daemon.network.resolver import RETAINED, Resolver, UpstreamResolver
from daemon.network.table import NftTable
from daemon.network.watch import TableWatch
from sandbox.criu.tcp import POOL
from sandbox.errors import Conflict, PagurusError, Unsupported
from sandbox.messages import Network, NetworkCounters, NetworkStatistics, NetworkStatus

if TYPE_CHECKING:
    from sandbox.container.container import Container

log = logging.getLogger("pagurus.network")

GENERATION = ("generations", "current")
MOVE_TIMEOUT = 30.0  # seconds
MAX_NAMED = 4096  # addresses that names have opened to one sandbox
T = TypeVar("T")


@dataclass
class AttachedNetwork:
    """A sandbox with a network."""

    sandbox: str
    link: SandboxLink
    resolver: Resolver
    memory: RefusalLog
    policy: Policy = field(default_factory=Policy)
    elements: set[Element] = field(default_factory=set)  # of it in the table, but for what names have opened
    named: dict[Element, tuple[str, float]] = field(default_factory=dict)  # name, and until when (loop time)

    @property
    def address(self) -> IPv4Address:
        return self.link.address


class Networks:
    """See the module. An :class:`daemon.host.attachments.Attachment`."""

    def __init__(self, run: Path) -> None:
        tag = base64.b32encode(hashlib.sha256(str(run).encode()).digest())[:5].decode().lower()
        self.prefix = f"pg{tag}-"
        name = "pagurus" if run == Path("/run/pagurus") else f"pagurus_{tag}"
        self._group = 1 + int.from_bytes(hashlib.sha256(tag.encode()).digest()[:2], "big") % 65_000
        self.table = NftTable(name, self.prefix, self._group)
        self._attached: dict[str, AttachedNetwork] = {}
        self._by_address: dict[IPv4Address, AttachedNetwork] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._ready = False
        self._making = asyncio.Lock()
        # pyroute2's sockets and the table are for one thread at a time; removing a link waits for the kernel.
        self._writer = ThreadPoolExecutor(1, "pagurus-nft")
        self._movers = ThreadPoolExecutor(4, "pagurus-link")
        self._upstream: UpstreamResolver | None = None
        self._listener = RefusalListener(self._group, self._refused_packet)
        self._watch = TableWatch(name, self._lost_table)
        self._renewal: asyncio.Task[None] | None = None
        self._lost = False
        #: Where a name leads in a sandbox instead of where it points to: (sandbox, name).
        self.redirect: Callable[[str, str], IPv4Address | None] = lambda *_: None
        self._requested = 0, 0  # questions allowed and refused, of sandboxes that are gone

    # ------------------------------------------------------------------ the daemon's life

    async def open(self, rows: Sequence[SandboxRow]) -> None:
        """Take over what a former daemon left for `rows`; collect the rest."""
        target = {row.id for row in rows if row.network.mode != "none"}
        there = await self._move(lambda: links.result(self.prefix))
        try:
            existing = await self._write(self._stored)
        except (OSError, PagurusError) as error:  # nftables do not work here: who needs them gets the error
            if target:
                raise
            log.warning("no sandbox can be given a network: %s", error)
            for link in there:
                await self._move(partial(links.disconnect, link.name))
            return
        retained = {link.address: link for link in there if link.owner in target}
        for link in there:
            if link.address not in retained:
                await self._move(partial(links.disconnect, link.name))
        strays = [element for element in existing if _address_of(element) not in retained]
        if retained:
            await self._ensure(existing=[element for element in existing if _address_of(element) in retained])
        if strays and self._ready:
            await self._write(lambda: self.table.apply([ElementChange(item, add=False) for item in strays]))
        elif not retained and await self._write(self.table.present):
            await self._write(self.table.remove)
        for link in retained.values():
            attached = self._new(link)
            mine = [element for element in existing if _address_of(element) == link.address]
            names = {element for element in mine if element.set in ("names", "name_ports")}
            attached.elements = set(mine) - names
            soon = asyncio.get_running_loop().time() + open_seconds(MAX_TTL)
            attached.named = {element: ("", soon) for element in names}  # whatever it was that opened them

    async def close(self) -> None:
        """The links, the table and its elements stay: connections continue, names wait for the next daemon."""
        for attached in self._attached.values():
            await attached.resolver.close()
        self._listener.close()
        self._watch.close()
        if self._renewal is not None:
            await self._renewal
        if self._ready and not self._attached:
            try:
                await self._write(self.table.remove)
            except (OSError, PagurusError) as error:  # it is empty, and the next daemon tries again
                log.warning("the table %s stays: %s", self.table.name, error)
        await self._write(self.table.close)
        self._writer.shutdown()
        self._movers.shutdown()

    def _stored(self) -> list[Element]:
        return self.table.stored() if self.table.present() else []

    async def _ensure(self, existing: Sequence[Element] = ()) -> None:
        """The table, before the first sandbox needs it. `existing` is put back when the rules had to be renewed."""
        async with self._making:
            if self._ready:
                return
            self._watch.start()  # first: what is taken away before it looks stays away
            await self._write(partial(self.table.ensure, existing))
            self._listener.start()
            self._upstream = UpstreamResolver()
            self._ready = True

    def _lost_table(self) -> None:
        self._lost = True
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.ensure_future(self._renew())

    async def _renew(self) -> None:
        """Another program has removed the table: put it back, as it was. A second removal during that is noticed."""
        while self._lost:
            self._lost = False
            elements = self._everything()
            try:
                if await self._write(partial(self.table.ensure, elements)):
                    log.error("the table %s was removed (`nft flush ruleset`?) and put back", self.table.name)
                    put = set(elements)  # a change that was under way has been noted by now
                    late = [ElementChange(item) for item in self._everything() if item not in put]
                    await self._write(partial(self.table.apply, late))
            except (OSError, PagurusError) as error:
                log.critical("the table %s was removed and cannot be put back: %s", self.table.name, error)

    def _everything(self) -> list[Element]:
        """What is in the table, or ought to be. What names have opened stays open for as long as it would have."""
        now = asyncio.get_running_loop().time()
        elements: list[Element] = []
        for attached in self._attached.values():
            elements += attached.elements
            left = {item: ceil(end - now) for item, (_, end) in attached.named.items()}
            elements += [replace(item, seconds=seconds) for item, seconds in left.items() if seconds > 0]
        return elements

    # ------------------------------------------------------------------ attachment

    async def attach(self, row: SandboxRow, container: Container) -> None:
        """See :class:`daemon.host.attachments.Attachment`."""
        if row.network.mode == "none" and row.id not in self._attached:
            return
        self._follow(row, container)
        async with self._lock(row.id):
            await self._fit(row, container, compile_policy(row.network))

    async def detach(self, row: SandboxRow, container: Container) -> None:
        """See :class:`daemon.host.attachments.Attachment`."""
        async with self._lock(row.id):
            await self._take_away(row.id)
        self._locks.pop(row.id, None)

    async def set(
        self, row: SandboxRow, container: Container | None, network: Network, publish: Callable[[], Any]
    ) -> None:
        """Another policy for a sandbox; `publish` writes its row. Connections that it does not allow end.

        One change of each owner at a time: there is one table, and an owner that changes many delays no other.
        """
        policy = compile_policy(network)
        async with self._lock(f"changes of {row.owner}"), self._lock(row.id):
            former, row.network = row.network, network
            try:
                await publish()
                if container is not None:
                    self._follow(row, container)
                    await self._fit(row, container, policy)
            except BaseException:  # refused, failed or cancelled half-way: one policy is in force, the former
                row.network = former
                await asyncio.shield(self._return(row, container, publish))
                raise

    async def _return(self, row: SandboxRow, container: Container | None, publish: Callable[[], Any]) -> None:
        """A change failed half-way: the former policy is in force again, and nothing if even that fails."""
        await publish()
        if container is not None:
            try:
                await self._fit(row, container, compile_policy(row.network))
            except PagurusError as error:
                log.error("cut off, its network cannot be put back: %s", error, extra={"sandbox": row.id})
                await self._take_away(row.id)

    def _follow(self, row: SandboxRow, container: Container) -> None:
        """A restore that makes a new network namespace says so, from a thread, before anything runs in it."""
        loop = asyncio.get_running_loop()

        def follow(namespace: Path) -> None:
            moving = self.moved(row, container, namespace)
            asyncio.run_coroutine_threadsafe(moving, loop).result(timeout=MOVE_TIMEOUT)

        container.followers["network"] = follow

    async def moved(self, row: SandboxRow, container: Container, namespace: Path) -> None:
        """The sandbox's processes will run in this namespace, not in the one that we knew."""
        async with self._lock(row.id):
            await self._fit(row, container, compile_policy(row.network), namespace)

    async def _fit(self, row: SandboxRow, container: Container, policy: Policy, namespace: Path | None = None) -> None:
        """Bring a sandbox's network to what its policy asks for."""
        try:
            await self._adjust(row, container, policy, namespace)
        except OSError as error:
            raise Unsupported(
                f"cannot give it its network: {error}", hint="see `pagurus doctor`", sandbox=row.id
            ) from error

    async def _adjust(self, row: SandboxRow, container: Container, policy: Policy, namespace: Path | None) -> None:
        where = namespace or container.netns
        attached = self._attached.get(row.id)
        if policy.mode == "none":
            await self._take_away(row.id)
            container.address = None
            await container.outside.keep(RETAINED, ())
            return
        await self._ensure()
        if attached is not None and await self._move(lambda: links.address_inside(where)) != attached.address:
            former = attached.address
            await self._take_away(row.id, forget=False)
            attached = await self._connect(row.id, where, policy, former, attached)
        elif attached is None:
            attached = await self._connect(row.id, where, policy, None, None)
        else:
            await self._enforce(attached, policy)
            if policy.segments:
                await self._move(lambda: links.open_devices([item.network for item in policy.segments]))
        container.address = str(attached.address)
        attached.resolver.sharer = row.owner or row.id
        if not attached.resolver.listening:
            retained = await container.outside.retained(RETAINED)
            await container.outside.keep(RETAINED, await attached.resolver.listen(where, retained))

    async def _connect(
        self, sandbox: str, where: Path, policy: Policy, wish: IPv4Address | None, former: AttachedNetwork | None
    ) -> AttachedNetwork:
        """An address, its rules, then its link. Tries the next address while one is taken."""
        route = [item.network for item in policy.segments]
        for address in chain(filter(None, [wish]), _addresses(sandbox)):
            if address in self._by_address:
                continue
            link = SandboxLink(links.name(self.prefix, address), 0, address, sandbox)
            attached = self._new(link, former)
            try:
                await self._enforce(attached, policy)
                made = await self._move(partial(links.connect, self.prefix, sandbox, where, address, route=route))
            except BaseException:  # also when cancelled: rules without a link, or half a link, must not stay
                await asyncio.shield(self._take_away(sandbox))
                raise
            if made is not None:
                attached.link = made
                return attached
            await self._take_away(sandbox, forget=former is None)
        raise Conflict(f"all addresses of {POOL} are in use", hint="remove some sandboxes")

    async def _enforce(self, attached: AttachedNetwork, policy: Policy) -> None:
        """The table says what the policy says. Unchanged, its connections continue; changed, they are judged again."""
        address = attached.address
        attached.resolver.policy = attached.policy = policy
        target = {*addressed(address, attached.link.name), *permitted(address, policy)}
        lasting = {item for item in attached.elements if item.set not in GENERATION}
        if lasting == target and attached.elements != lasting:
            return
        target.update(generation(address, 1 + secrets.randbelow(0x7FFFFFFE)))
        closed = [item for item, (name, _) in attached.named.items() if not _still_named(policy, name, item)]
        changes = [ElementChange(item, add=False) for item in (*(attached.elements - target), *closed)]
        changes += [ElementChange(item) for item in target - attached.elements]
        await self._write(lambda: self.table.apply(changes))
        attached.elements = target
        for item in closed:
            del attached.named[item]

    async def _take_away(self, sandbox: str, *, forget: bool = True) -> None:
        attached = self._attached.get(sandbox)
        if attached is None:
            return
        await attached.resolver.close()
        await self._move(lambda: links.disconnect(attached.link.name))
        elements = [*attached.elements, *attached.named]
        await self._write(lambda: self.table.apply([ElementChange(item, add=False) for item in elements]))
        attached.elements.clear()
        attached.named.clear()
        self._by_address.pop(attached.address, None)
        if forget:
            del self._attached[sandbox]
            self._requested = (
                self._requested[0] + attached.resolver.allowed,
                self._requested[1] + attached.resolver.refused,
            )

    def _new(self, link: SandboxLink, former: AttachedNetwork | None = None) -> AttachedNetwork:
        if self._upstream is None:
            self._upstream = UpstreamResolver()
        memory = former.memory if former is not None else RefusalLog()
        resolver = Resolver(
            self._upstream,
            lambda name, addresses, ports, seconds: self._opened(attached, name, addresses, ports, seconds),
            lambda name, why: memory.add(f"name {name}", why),
            lambda name: self.redirect(link.owner, name),
        )
        if former is not None:
            resolver.allowed, resolver.refused = former.resolver.allowed, former.resolver.refused
        attached = AttachedNetwork(link.owner, link, resolver, memory)
        self._attached[link.owner] = self._by_address[link.address] = attached
        return attached

    # ------------------------------------------------------------------ names

    async def _opened(
        self,
        attached: AttachedNetwork,
        name: str,
        addresses: Sequence[IPv4Address],
        ports: Sequence[tuple[int, int]],
        seconds: int,
    ) -> None:
        """An answer names these addresses: let the sandbox reach them for some seconds."""
        now = asyncio.get_running_loop().time()
        attached.named = {element: retained for element, retained in attached.named.items() if retained[1] > now}
        new = [element for address in addresses for element in named(attached.address, address, ports, seconds)]
        if len(attached.named) + len(new) > MAX_NAMED:
            attached.memory.add(f"name {name}", f"{MAX_NAMED} addresses are open already")
            raise Unsupported("too many addresses", hint="wait until some have expired, or allow fewer names")
        renewed = [ElementChange(item, add=False) for item in new if item in attached.named]
        await self._write(lambda: self.table.apply([*renewed, *(ElementChange(item) for item in new)]))
        attached.named.update({element: (name, now + seconds) for element in new})

    # ------------------------------------------------------------------ telling

    def _refused_packet(self, packet: Packet) -> None:
        attached = self._by_address.get(packet.source)
        if attached is not None:
            attached.memory.add(packet.what, why_refused(attached.policy, packet.destination))

    async def status(self, row: SandboxRow) -> NetworkStatus:
        """What a sandbox may reach, what it did, what it was refused."""
        attached = self._attached.get(row.id)
        if attached is None:
            return NetworkStatus(network=row.network)
        refused = await self._write(self.table.refusals)
        return NetworkStatus(
            network=row.network,
            address=str(attached.address),
            counters=self._counters(attached, refused),
            refusals=attached.memory.list(),
        )

    def names(self) -> tuple[int, int]:
        """Questions allowed and refused since the daemon's start."""
        resolvers = [attached.resolver for attached in self._attached.values()]
        return (
            self._requested[0] + sum(item.allowed for item in resolvers),
            self._requested[1] + sum(item.refused for item in resolvers),
        )

    @property
    def count(self) -> int:
        """Sandboxes with a network."""
        return len(self._attached)

    async def statistics(self) -> NetworkStatistics:
        """All sandboxes together."""
        if not self._attached:
            return NetworkStatistics()
        refused = await self._write(self.table.refusals)
        counters = [self._counters(attached, refused) for attached in self._attached.values()]
        total = {name: sum(getattr(item, name) for item in counters) for name in NetworkCounters.__struct_fields__}
        return NetworkStatistics(attached=len(counters), **total)

    def _counters(self, attached: AttachedNetwork, refused: dict[IPv4Address, int]) -> NetworkCounters:
        packets_out, packets_in, bytes_out, bytes_in = links.traffic(attached.link.name)
        return NetworkCounters(
            packets_out=packets_out,
            packets_in=packets_in,
            bytes_out=bytes_out,
            bytes_in=bytes_in,
            packets_refused=refused.get(attached.address, 0),
            names_allowed=attached.resolver.allowed,
            names_refused=attached.resolver.refused,
        )

    # ------------------------------------------------------------------ threads

    async def _write(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, work)

    async def _move(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._movers, work)

    def _lock(self, sandbox: str) -> asyncio.Lock:
        return self._locks.setdefault(sandbox, asyncio.Lock())


def _still_named(policy: Policy, name: str, element: Element) -> bool:
    """Whether what a name has opened stays open under another policy. "": a former daemon opened it, the name is
    unknown."""
    if policy.mode != "allow" or not name:
        return False
    verdict = judge_name(policy, name)
    address = IPv4Address(element.key[4:8])
    if not verdict.allowed or is_private(address) or judge_answer(policy, address):
        return False
    if element.set == "names":
        return not verdict.ports
    protocol, port = service(element.key[8:])
    return (protocol, port) in verdict.ports


def _addresses(sandbox: str) -> Iterator[IPv4Address]:
    """Which addresses to try for a sandbox: begins at one that follows from its id, so that it gets it back after a
    crash of everything; goes round the whole pool once."""
    span = links.LAST - links.FIRST
    start = int.from_bytes(hashlib.sha256(sandbox.encode()).digest()[:8], "big")
    return (POOL[links.FIRST + (start + step) % span] for step in range(span))


def _address_of(element: Element) -> IPv4Address:
    """Of the sandbox that an element is about."""
    return IPv4Address(element.key[16:20] if element.set == "bound" else element.key[:4])
