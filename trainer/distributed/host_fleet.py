"""`HostFleet`: the ranks of one trainer on several hosts, of which this one has rank 0, the batches and the saves.

Guarantee: as :class:`Fleet`, of which this is one. A host without a sign for `HOST_SILENT` seconds, or whose ranks have
ended, is lost: all others end their ranks, and `start` continues with a standby host or fewer of them from the last
save; a host that returns takes part from the next batch on. When `wait` returns, the version of the step is complete
here, whatever host its shards come from.

::

    start ─▶ enough hosts? ─▶ order: who is which node, what to fetch ─▶ torchrun here ┐
                                                        agents: fetch ─▶ torchrun ─────┴▶ rendezvous ─▶ steps ─▶ gather
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollout.engine import tls
from rollout.weights.relay import MAX_CHUNK
from rollout.weights.source import HttpSource, Spread
from rollout.weights.store import VersionStore, needed_of
from rollout.weights.versions import Ref, VersionRef
from sandbox import durable, private
from sandbox.errors import Invalid, NotFound, PagurusError
from trainer.batches.sample import Sample
from trainer.distributed.head import TOKEN, HeadAddress, entries
from trainer.distributed.hosts import HOST_SILENT, HostServer, Order, TrainerHost
from trainer.distributed.launch import SILENT, STUCK, Fleet
from trainer.distributed.mesh import fitting_hosts
from trainer.distributed.torchrun import NodePlace
from trainer.distributed.watch import Beat
from trainer.distributed.worker import Result, WorkPlan
from trainer.errors import RankLost
from trainer.resume import ResumeState, Saves
from trainer.settings import HostSettings

JOIN_TIMEOUT = 120.0  # seconds for hosts to come, before fewer are taken
PORT = 7010  # of the server for agents
POLL_INTERVAL = 0.1
CONTINUE = "start again to continue from the last save"
AT_ONCE = 4  # chunks of a version under way
ADDRESS = "hosts.json"  # in a run's directory of roles
OUTSIDE = ("192.0.2.1", 9)  # of no machine: which interface packets to other networks would leave by


@dataclass(frozen=True, kw_only=True)
class HostPlan:
    """The machines of a run's trainer. `address`: of this one, where its settings have none."""

    settings: HostSettings
    roles: Path  # directory in which the address for agents is written down
    address: str = ""
    report: Callable[[str], None] = lambda _: None

    def open(self, plan: WorkPlan, *, ranks: int, **watch: float) -> HostFleet:
        """`ranks` of all machines. Raises Invalid where the address cannot be listened on."""
        chosen, existing = self.settings, read_address(self.roles)
        own = self.roles / "tls"  # of a job, whose parts know one another by it
        certificate = chosen.tls or (str(own) if own.is_dir() else "")
        port = chosen.port if chosen.port is not None else 0 if self.address else PORT
        token = os.environ.get(TOKEN) or (existing.token if existing else secrets.token_urlsafe(32))
        fleet = HostFleet(
            plan,
            ranks=ranks // chosen.count,
            hosts=chosen.count,
            address=chosen.address or self.address or default_address(),
            token=token,
            port=port,
            certificate=certificate,
            agents=chosen.agents,
            join_timeout=chosen.wait,
            report=self.report,
            **watch,
        )
        self.write(HeadAddress(url=fleet.url, token=token, **_certificate(certificate)))
        self.report(f"agents of other hosts find this trainer at {fleet.url}; {TOKEN} is in {self.roles / ADDRESS}")
        return fleet

    def write(self, address: HeadAddress) -> None:
        self.roles.mkdir(parents=True, exist_ok=True)
        aside = self.roles / f".{ADDRESS}.new"
        private.file(aside)
        aside.write_bytes(msgspec.json.encode(address))
        aside.rename(self.roles / ADDRESS)


def read_address(roles: Path) -> HeadAddress | None:
    """Where agents find the trainer; None before it listens for the first time."""
    try:
        return msgspec.json.decode((roles / ADDRESS).read_bytes(), type=HeadAddress)
    except FileNotFoundError:
        return None


def default_address() -> str:
    """Of the interface by which this machine reaches others. Raises Invalid."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(OUTSIDE)
        except OSError as error:
            raise Invalid(f"this machine has no route to others: {error}", hint="set hosts.address") from None
        return str(probe.getsockname()[0])


def _certificate(directory: str) -> dict[str, str]:
    if not directory:
        return {}
    files = {"certificate": tls.CERTIFICATE, "key": tls.KEY}
    return {name: Path(directory, file).read_text() for name, file in files.items()}


class HostFleet(Fleet):
    """``with HostFleet(plan, ranks=2, hosts=3, address="10.0.0.1", token=token) as fleet: ...``"""

    def __init__(
        self,
        plan: WorkPlan,
        *,
        ranks: int,
        hosts: int,
        address: str,
        token: str,
        port: int = 0,
        certificate: str = "",
        agents: Sequence[str] = (),
        silent: float = SILENT,
        stuck: float = STUCK,
        join_timeout: float = JOIN_TIMEOUT,
        report: Callable[[str], None] = lambda _: None,
    ):
        """`ranks` of each host, `hosts` with this one, whose `address` the others reach; `port` of the server, 0: a
        free one; `certificate`: directory of the one that all show, and its key; `agents` that may take part, preferred
        ones first, none: all. `report` hears of each start."""
        super().__init__(plan, ranks=ranks, silent=silent, stuck=stuck)
        self.hosts, self.address, self.join_timeout = hosts, address, join_timeout
        self.agents, self.report, self._certificate = agents, report, certificate
        self._start = time.time_ns() // 1_000_000  # above those of a process before this one, whose ranks may live
        listening = tls.listening(Path(certificate)) if certificate else None
        self.server = HostServer(plan, address, token=token, port=port, start=self._start, tls=listening)
        self._model = entries(Path(plan.model))
        self.store = VersionStore(plan.published)
        self.server.__enter__()

    @property
    def url(self) -> str:
        """For agents."""
        return f"{'https' if self._certificate else 'http'}://{self.address}:{self.server.port}"

    @property
    def total(self) -> int:
        return self.ranks * (1 + len(self.server.state.members))

    def close(self) -> None:
        self.stop()
        self.server.__exit__()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def sources(self) -> str:
        """Where published versions are, for readers: this host's directory and the servers of the others."""
        members = [self.server.state.hosts[name] for name in self.server.state.members]
        return ",".join([str(self.plan.published), *(host.signs.weights for host in members)])

    def start(self) -> None:
        self.stop()
        self._begin(self._members())

    def give(self, samples: list[Sample], state: ResumeState) -> None:
        """Before that, hosts that have come since the start take part, where no step is lost by it."""
        members = self._fitting(self._candidates()) or []
        newest = Saves(self.plan.resume).newest() if len(members) > len(self.server.state.members) else None
        if newest is not None and newest.step == state.step - 1:
            self.stop()
            self._begin(members)
        super().give(samples, state)

    def wait(self, step: int) -> Result:
        result = super().wait(step)
        if result.weights is not None:
            self._gather(result.weights)
        return result

    def _begin(self, members: list[str]) -> None:
        nodes, port = 1 + len(members), _free_port(self.address)
        saves = Saves(self.plan.resume)
        state = saves.newest()
        save = "" if state is None else f"step-{state.step:06d}"
        self._start += 1
        self.server.state.order = Order(
            start=self._start,
            plan=self.plan,
            nodes=nodes,
            ranks=self.ranks,
            address=self.address,
            port=port,
            model=self._model,
            save=save,
            save_files=entries(self.plan.resume / save) if save else [],
        )
        self.server.state.members = members
        others = f"{', '.join(members)} and this one" if members else "this one alone"
        self.report(f"{nodes} of {self.hosts} hosts, {self.ranks} ranks each: {others}")
        self.torchrun.start(NodePlace(node=0, nodes=nodes, address=self.address, port=port, own=self.address))

    def stop(self) -> None:
        """Here at once; elsewhere with the next sign of each host."""
        if self.server.state.members:
            self._start += 1
            self.server.state.members = []
            self.server.state.order = Order(start=self._start, plan=self.plan)
        super().stop()

    def check(self) -> None:
        self._check_silence()
        if self.torchrun.poll() or any(host.signs.ended for host in self._current()):
            deadline = time.monotonic() + HOST_SILENT + 1.0  # ranks fail when a host is gone: first see whether one is
            while time.monotonic() < deadline and not self._killed():
                self._check_silence()
                time.sleep(POLL_INTERVAL)
            for host in self._current():
                if host.signs.ended:
                    self._adopt_reasons(host)
            self._raise_ended()
        super().check()

    def beats(self) -> list[Beat]:
        """Of all hosts, by this one's clock."""
        result = super().beats()
        for host in self._current():
            at = time.time() - (time.monotonic() - host.last_seen)
            shifted = [
                msgspec.structs.replace(beat, at=at, since=at - (beat.at - beat.since)) for beat in host.signs.beats
            ]
            result += shifted
        return result

    def place_of(self, rank: int) -> str:
        node = rank // self.ranks
        return f" on host {self.server.state.members[node - 1]}" if node else " on the trainer's host"

    def _check_silence(self) -> None:
        """What fails on other hosts when one is gone is no news."""
        for name in self.server.state.members:
            silent = time.monotonic() - self.server.state.hosts[name].last_seen
            if silent > HOST_SILENT:
                self.stop()
                raise RankLost(f"host {name} gave no sign for {silent:.1f} s", hint=CONTINUE)

    def _killed(self) -> list[str]:
        """How ranks of other hosts were killed."""
        ended = [f"host {host.name}: {host.signs.ended}" for host in self._current() if host.signs.ended]
        return [reason for reason in ended if "killed by signal" in reason]

    def _raise_ended(self) -> None:
        """Of other hosts, unless a rank here was killed, which the fleet itself says."""
        killed = self._killed()
        ended = [f"host {host.name}: {host.signs.ended}" for host in self._current() if host.signs.ended]
        if not ended or (self.torchrun.poll() and "killed by signal" in self.torchrun.cause()):
            return
        self.stop()
        self._raise_said(killed=bool(killed))
        raise RankLost((killed or ended)[0], hint=CONTINUE)

    def _adopt_reasons(self, host: TrainerHost) -> None:
        """What its ranks knew of why they cannot continue, next to what those here have said."""
        results = self.directory / "results"
        results.mkdir(exist_ok=True)
        for number, said in enumerate(host.signs.said):
            durable.publish(results / f"said-{host.name}-{number}.json", msgspec.json.encode(said), durable=False)

    def _current(self) -> list[TrainerHost]:
        """Whose ranks are of this start."""
        hosts = [self.server.state.hosts[name] for name in self.server.state.members]
        return [host for host in hosts if host.signs.start == self._start]

    def _gather(self, ref: VersionRef) -> None:
        """What other hosts' ranks published of the listed versions: engines, exports and a resumed run read it here.
        Raises RankLost where no host has a part of `ref` any more."""
        listed = [item for item in self.store.versions() if item.version <= ref.version]
        named = set().union(*(needed_of(self.store.manifest(item), item.ways) for item in listed))
        missing = sorted(name for name in named if not self.store.has(name))
        if not missing:
            return
        try:
            hosts = [self.server.state.hosts[name].signs.weights for name in self.server.state.members]
            asyncio.run(self._fetch(missing, hosts, needed_of(self.store.manifest(ref), ref.ways)))
        except PagurusError as error:
            self.check()  # names the host, if it is lost
            self.stop()
            raise RankLost(f"version {ref.version} is not complete: {error.message}", hint=CONTINUE) from error

    async def _fetch(self, names: list[str], urls: list[str], required: set[str]) -> None:
        trusted = tls.calling(Path(self._certificate)) if self._certificate else None
        source = Spread([HttpSource(url, token=self.server.token, tls=trusted) for url in urls])
        slots = asyncio.Semaphore(AT_ONCE)

        async def bring(name: str) -> None:
            async with slots:
                try:
                    content = await source.chunk(Ref(name, MAX_CHUNK))
                except NotFound:  # of an older version, on a host that was lost before: readers take a newer image
                    if name in required:
                        raise
                    return
                await asyncio.to_thread(self.store.put, content, existing=Ref(name, len(content)))

        try:
            await asyncio.gather(*map(bring, names))
        finally:
            await source.close()

    def _members(self) -> list[str]:
        """Other hosts to take part: as many as wanted, or after a while as many as make up the mesh."""
        deadline = time.monotonic() + self.join_timeout
        while len(living := self._candidates()) < self.hosts - 1 and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL)
        members = self._fitting(living)
        if members is None:
            raise RankLost(
                f"{len(living)} of {self.hosts - 1} other hosts are there, which do not make up the mesh",
                hint="start trainer.distributed.agent on more hosts",
            )
        return members

    def _candidates(self) -> list[str]:
        existing = {host.name for host in self.server.state.living()}
        return [name for name in self.agents or sorted(existing) if name in existing][: self.hosts - 1]

    def _fitting(self, living: list[str]) -> list[str] | None:
        """Those of them that make up the mesh with this host, if any number does."""
        count = fitting_hosts(1 + len(living), self.ranks, **msgspec.structs.asdict(self.plan.mesh))
        return living[: count - 1] if count else None


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as taken:
        return int(taken.getsockname()[1])
