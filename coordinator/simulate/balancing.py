"""Hosts that are lost and return, and whether sandboxes move to them: how many a lost host held, and what moved."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coordinator.decide import balance, place
from coordinator.decide.balance import MovableSandbox, Move
from coordinator.decide.place import HostView, PlacementRequest
from coordinator.simulate.clock import VirtualClock
from coordinator.simulate.plot import Plot

CPUS = 16
IMAGES = frozenset({"image"})


@dataclass
class SimulatedCluster:
    """Sandboxes by the host that has them. `moves`: whether any move unasked."""

    hosts: int
    sandboxes: int
    moves: bool
    seed: int
    lost_every: float  # seconds; 0: none is lost
    away: float = 20.0
    takes: float = 1.0  # seconds of a move
    used: float = 0.3  # part of the sandboxes that are in use when they are looked at
    clock: VirtualClock = field(default_factory=VirtualClock)
    where: dict[str, str] = field(default_factory=dict)
    came: dict[str, float] = field(default_factory=dict)
    alive: dict[str, float] = field(default_factory=dict)
    under_way: list[Move] = field(default_factory=list)
    held: list[int] = field(default_factory=list)  # sandboxes of each host that was lost
    moved: Counter[str] = field(default_factory=Counter)

    def run(self, seconds: float) -> SimulatedCluster:
        self._chance = np.random.default_rng(self.seed)
        self.alive = {f"h{number:03}": -balance.STEADY for number in range(self.hosts)}
        shares = place.spread(self._views(), PlacementRequest(), self.sandboxes)
        names = [name for name, count in sorted(shares.items()) for _ in range(count)]
        self.where = {f"s{number:05}": name for number, name in enumerate(names)}
        self.came = dict.fromkeys(self.where, -balance.FINALIZED)
        if self.lost_every:
            self.clock.after(self.lost_every, self._lose)
        if self.moves:
            self.clock.after(1.0, self._poll)
        self.clock.after(seconds, lambda: None)
        self.clock.run(until=lambda: self.clock.now >= seconds)
        return self

    def _views(self) -> list[HostView]:
        counts = Counter(self.where.values())
        names = [f"h{number:03}" for number in range(self.hosts)]
        return [
            HostView(name, CPUS, 1.0, 0.5, sandboxes=counts[name], images=IMAGES, alive=name in self.alive)
            for name in names
        ]

    def _lose(self) -> None:
        """One host, whose sandboxes continue elsewhere at once; it returns empty."""
        name = str(self._chance.choice(sorted(self.alive)))
        del self.alive[name]
        theirs = sorted(sandbox for sandbox, host in self.where.items() if host == name)
        self.held.append(len(theirs))
        shares = place.spread(self._views(), PlacementRequest(), len(theirs))
        targets = [host for host, count in sorted(shares.items()) for _ in range(count)]
        for sandbox, host in zip(theirs, targets, strict=True):
            self.where[sandbox], self.came[sandbox] = host, self.clock.now
        self.clock.after(self.away, lambda: self.alive.__setitem__(name, self.clock.now))
        self.clock.after(float(self._chance.exponential(self.lost_every)), self._lose)

    def _poll(self) -> None:
        now, views = self.clock.now, self._views()
        steady = {name: now - since for name, since in self.alive.items()}
        givers = balance.givers(views, self.under_way, steady)
        moving = {move.sandbox for move in self.under_way}
        residents = [
            MovableSandbox(sandbox, host, IMAGES, idle=now - self.came[sandbox])
            for sandbox, host in self.where.items()
            if host in givers and sandbox not in moving and now - self.came[sandbox] >= balance.FINALIZED
        ]
        residents = [item for item in residents if self._chance.random() >= self.used]
        for move in balance.decide(views, balance.offered(residents), self.under_way, steady) if givers else ():
            self.under_way.append(move)
            self.clock.after(self.takes, lambda move=move: self._arrive(move))  # type: ignore[misc]
        self.clock.after(1.0, self._poll)

    def _arrive(self, move: Move) -> None:
        self.under_way.remove(move)
        if move.target in self.alive and self.where[move.sandbox] == move.source:
            self.where[move.sandbox], self.came[move.sandbox] = move.target, self.clock.now
            self.moved[move.sandbox] += 1


def metrics(seed: int, seconds: float = 1800.0) -> dict[str, Any]:
    """20 hosts with 600 sandboxes, of which one is lost each minute: with moves and without."""

    def run(*, moves: bool, lost_every: float = 60.0) -> SimulatedCluster:
        return SimulatedCluster(20, 600, moves, seed, lost_every).run(seconds)

    still, moved, calm = run(moves=False), run(moves=True), run(moves=True, lost_every=0.0)
    return {
        "lost_hosts": len(moved.held),
        "held_most_of_mean": round(max(moved.held) / 30, 2),
        "held_most_of_mean_without": round(max(still.held) / 30, 2),
        "held_deviation_of_mean": round(float(np.std(moved.held)) / 30, 2),
        "held_deviation_of_mean_without": round(float(np.std(still.held)) / 30, 2),
        "moves_of_revived": round(sum(moved.moved.values()) / sum(moved.held), 2),
        "control": sum(calm.moved.values()),
        "plot": Plot(
            title="A lost host holds about as many sandboxes as any other, where some move to hosts that came back",
            x="hosts lost so far",
            y="sandboxes that the host held",
            lines={
                "without moves": (range(len(still.held)), still.held),
                "with moves": (range(len(moved.held)), moved.held),
                "a host has, in the mean": ([0, len(moved.held) - 1], [30, 30]),
            },
        ),
        "inputs": "20 hosts of 16 processors, 600 sandboxes, a host is lost each minute for 20 s (exponential), three "
        "tenths of the sandboxes are in use at a time, a move takes 1 s; control: moves where no host is lost",
    }
