"""Which server of a pool gets which request, and which server is to be given up. Pure.

Guarantee: the same view gives the same actions, in the live pool and in a replay of its log; a server is never given
more requests than its slots; of two requests the one of lower priority number, then the older one, goes first.

================  ====================================================================================
a request goes    to the server that holds its prefix (`homes`), unless that is overloaded: it has more
                  than `overload` times the load of the least loaded one, and `headroom` requests more;
                  else to one that is co-located, else to the least loaded one; it waits when every server is
                  full or none serves. A co-located one serves users, and takes what they leave room for
of servers of     to the one where it adds least to the time of all (rollout.decide.engines.affinity); one that holds
several classes   its prefix keeps it unless another is cheaper by `hysteresis`; a class that was not
                  measured for `again` answers is tried by `trials` new trajectories at a time
a server is       `lost` when its process ended; `hung` when it answers neither probes nor requests for
                  `silence` seconds, `stall` of one that is co-located. A server that takes weights is judged by
                  `update` seconds instead
================  ====================================================================================
"""

from __future__ import annotations

from typing import Literal

import msgspec

from rollout.decide.engines.affinity import Crowd, ServerRates, TokenDemand, cost

State = Literal["starting", "serving", "updating", "draining", "down", "resting"]


class RoutingRules(msgspec.Struct, frozen=True, kw_only=True):
    overload: float = 1.5  # times the least load
    headroom: int = 4  # requests
    silence: float = 60.0  # seconds without a sign of life, with a request in flight
    stall: float = 2.0  # the same, of a server that is co-located
    update: float = 180.0  # seconds for taking weights
    batch: int = 64  # requests that one decision looks at
    hysteresis: float = 0.25  # of the cost where a trajectory is
    again: int = 400  # answers
    trials: int = 2  # requests


class ServerView(msgspec.Struct, frozen=True, array_like=True):
    """One server. `load` is in requests; `tokens` breaks ties. `hardware`: its class."""

    name: str
    state: State
    slots: int
    load: int
    tokens: int = 0
    hardware: str = ""
    readers: int = 0  # requests that have not got a token yet
    reading: int = 0  # tokens of their prompts
    colocated: bool = False  # its slots are what its users leave


class RoutedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that waits. `homes` are the servers that hold most of its prefix: `held` tokens of it. `need`: what
    turns of its environment need."""

    key: int
    priority: int = 0
    homes: list[str] = []
    held: int = 0
    tokens: int = 0
    need: TokenDemand | None = None


class RouteView(msgspec.Struct, frozen=True, kw_only=True):
    servers: list[ServerView]
    waiting: list[RoutedRequest]  # the first ones, in the order in which they are served
    rates: list[ServerRates] = []  # of classes of servers, as measured


class Send(msgspec.Struct, frozen=True, tag="send"):
    key: int
    server: str
    why: Literal["prefix", "colocated", "least", "overloaded", "moved", "cheapest", "dearer", "trial"]


def order(request: RoutedRequest) -> tuple[int, int]:
    """Who goes first."""
    return request.priority, request.key


def route(view: RouteView, rules: RoutingRules) -> list[Send]:
    """As many of the waiting requests as the servers have slots for. The others wait: back-pressure."""
    serving = {server.name: server for server in view.servers if server.state == "serving"}
    several = len({server.hardware for server in serving.values()}) > 1
    sent: list[Send] = []
    for request in sorted(view.waiting, key=order):
        free = [server for server in serving.values() if server.load < server.slots]
        if not free:
            break
        send = _by_cost(request, free, list(serving.values()), view.rates, rules) if several else None
        send = send or _by_load(request, free, serving, rules)
        serving[send.server] = _with(serving[send.server], request)
        sent.append(send)
    return sent


def _by_load(
    request: RoutedRequest, free: list[ServerView], serving: dict[str, ServerView], rules: RoutingRules
) -> Send:
    by_load = sorted(free, key=lambda server: (server.load, server.tokens, server.name))
    minimum, home = by_load[0], next((server for server in by_load if server.name in request.homes), None)
    if home is not None and home.load <= max(rules.overload * minimum.load, minimum.load + rules.headroom):
        return Send(request.key, home.name, "prefix")
    if (colocated := next((server for server in by_load if server.colocated), None)) is not None:
        return Send(request.key, colocated.name, "colocated")
    if not request.homes:
        return Send(request.key, minimum.name, "least")
    return Send(request.key, minimum.name, "overloaded" if any(name in serving for name in request.homes) else "moved")


def _by_cost(
    request: RoutedRequest,
    free: list[ServerView],
    serving: list[ServerView],
    existing: list[ServerRates],
    rules: RoutingRules,
) -> Send | None:
    """None: too little is known to say."""
    rates = {item.hardware: item for item in existing}
    home = next((server for server in free if server.name in request.homes), None)
    tried = [
        server
        for server in free
        if (server.hardware not in rates or rates[server.hardware].age > rules.again)
        and sum(other.load for other in serving if other.hardware == server.hardware) < rules.trials
    ]
    if tried and home is None:
        return Send(request.key, min(tried, key=lambda server: (server.load, server.name)).name, "trial")
    measured = [server for server in free if server.hardware in rates]
    if request.need is None or not measured:
        return None
    need = request.need

    def added(server: ServerView) -> float:
        crowd = Crowd(server.load, server.readers, server.reading)
        return cost(rates[server.hardware], crowd, need, redo=0 if server is home else request.held)

    best = min(measured, key=lambda server: (added(server), server.load, server.name))
    if home is None or home.hardware not in rates:
        return Send(request.key, best.name, "moved" if request.homes else "cheapest")
    stays = added(home) <= (1 + rules.hysteresis) * added(best)
    return Send(request.key, home.name, "prefix") if stays else Send(request.key, best.name, "dearer")


def _with(server: ServerView, request: RoutedRequest) -> ServerView:
    new = request.tokens - (request.held if server.name in request.homes else 0)
    return msgspec.structs.replace(
        server,
        load=server.load + 1,
        tokens=server.tokens + request.tokens,
        readers=server.readers + 1,
        reading=server.reading + new,
    )


class Signs(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a server's health. Times are of one clock, in seconds."""

    name: str
    state: State
    ended: bool = False  # its process, or its connection: it refused
    requested_since: float | None = None  # the oldest request or probe that waits for a sign of life
    last_seen: float = 0.0  # the last sign of life: a token, an answered probe
    updating_since: float | None = None
    colocated: bool = False


def judge(signs: Signs, rules: RoutingRules, now: float) -> Literal["well", "lost", "hung"]:
    """What a server is. Example: one that was stopped is `hung` after `silence` seconds with a request in flight."""
    if signs.ended:
        return "lost"
    if signs.updating_since is not None:
        return "hung" if now - signs.updating_since > rules.update else "well"
    if signs.requested_since is None:
        return "well"
    timeout = rules.stall if signs.colocated else rules.silence
    return "hung" if now - max(signs.requested_since, signs.last_seen) > timeout else "well"


class Taking(msgspec.Struct, frozen=True, array_like=True):
    """How far a server is with a version."""

    name: str
    state: State
    version: int


def next_to_update(servers: list[Taking], version: int, *, at_once: int) -> list[str]:
    """Who takes the version now, so that the others keep serving: at most `at_once`, and never all that serve, but for
    a pool of one. Those that are down take it when they start."""
    busy = [server for server in servers if server.state == "updating"]
    behind = sorted(server.name for server in servers if server.state == "serving" and server.version != version)
    serving = sum(server.state == "serving" for server in servers)
    capacity = min(at_once - len(busy), max(serving - 1, 1 if not busy else 0))
    return behind[: max(0, capacity)]
