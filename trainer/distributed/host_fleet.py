"""`HostFleet`: the ranks of one trainer on several hosts, of which this one has rank 0, the batches and the saves.

Guarantee: as :class:`Fleet`, of which this is one. A host without a sign for `HOST_SILENT` seconds, or whose ranks have
ended, is lost: all others end their ranks, and `start` continues with a standby host or fewer of them from the last
save.

::

    start ─▶ enough hosts? ─▶ order: who is which node, what to fetch ─▶ torchrun here ┐
                                                        agents: fetch ─▶ torchrun ─────┴▶ rendezvous ─▶ steps
"""

from __future__ import annotations

import socket
import ssl
import time
from pathlib import Path

import msgspec

from sandbox import durable
from sandbox.errors import Invalid
from trainer.distributed.head import entries
from trainer.distributed.hosts import HOST_SILENT, HostServer, Order, TrainerHost
from trainer.distributed.launch import SILENT, STUCK, Fleet
from trainer.distributed.mesh import MeshLayout
from trainer.distributed.torchrun import NodePlace
from trainer.distributed.watch import Beat
from trainer.distributed.worker import WorkPlan
from trainer.errors import RankLost
from trainer.resume import Saves

JOIN_TIMEOUT = 120.0  # seconds for hosts to come, before fewer are taken
POLL_INTERVAL = 0.1
CONTINUE = "start again to continue from the last save"


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
        tls: ssl.SSLContext | None = None,
        silent: float = SILENT,
        stuck: float = STUCK,
        join_timeout: float = JOIN_TIMEOUT,
    ):
        """`ranks` of each host, `hosts` with this one, whose `address` the others reach; `port` of the server, 0: a
        free one."""
        super().__init__(plan, ranks=ranks, silent=silent, stuck=stuck)
        self.hosts, self.address, self.join_timeout = hosts, address, join_timeout
        self.server = HostServer(plan, address, token=token, port=port, tls=tls)
        self._start = 0
        self._model = entries(Path(plan.model))
        self.server.__enter__()

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
        members = self._members()
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

    def _members(self) -> list[str]:
        """Other hosts to take part: as many as wanted, or after a while as many as make up the mesh."""
        deadline = time.monotonic() + self.join_timeout
        while True:
            living = sorted(host.name for host in self.server.state.living())[: self.hosts - 1]
            late = time.monotonic() > deadline
            if len(living) == self.hosts - 1 or late:
                break
            time.sleep(POLL_INTERVAL)
        for count in range(len(living), -1, -1):
            try:
                MeshLayout(ranks=self.ranks * (1 + count), **msgspec.structs.asdict(self.plan.mesh))
            except Invalid:
                continue
            return living[:count]
        raise RankLost(
            f"{len(living)} of {self.hosts - 1} other hosts are there, which do not make up the mesh",
            hint="start trainer.distributed.agent on more hosts",
        )


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as taken:
        return int(taken.getsockname()[1])
