"""Which server of a pool gets which request, and which server is to be given up. Pure.

Owns: the views, the answers, the rules below. Does not own: requests, servers, clocks (rollout.pool).
Guarantee: the same view gives the same actions, in the live pool and in a replay of its log; a server is never given
more requests than its slots; of two requests the one of lower priority number, then the older one, goes first.

================  ====================================================================================
a request goes    to the server that holds its prefix (`homes`), unless that is overloaded: it has more
                  than `overload` times the load of the least loaded one, and `slack` requests more;
                  else to the least loaded one; it waits when every server is full or none serves
a server is       `lost` when its process ended; `hung` when it answers neither probes nor requests for
                  `silence` seconds. A server that takes weights is judged by `update` seconds instead
================  ====================================================================================
"""

from __future__ import annotations

from typing import Literal

import msgspec

State = Literal["starting", "serving", "updating", "draining", "down"]


class RoutingRules(msgspec.Struct, frozen=True, kw_only=True):
    overload: float = 1.5  # times the least load
    slack: int = 4  # requests
    silence: float = 60.0  # seconds without a sign of life, while something was asked
    update: float = 180.0  # seconds for taking weights
    batch: int = 64  # requests that one decision looks at


class ServerView(msgspec.Struct, frozen=True, array_like=True):
    """One server. `load` is in requests; `tokens` breaks ties."""

    name: str
    state: State
    slots: int
    load: int
    tokens: int = 0


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """A request that waits. `homes` are the servers that hold most of its prefix."""

    key: int
    priority: int = 0
    homes: list[str] = []
    tokens: int = 0


class RouteView(msgspec.Struct, frozen=True, kw_only=True):
    servers: list[ServerView]
    waiting: list[Ask]  # the first ones, in the order in which they are served


class Send(msgspec.Struct, frozen=True, tag="send"):
    key: int
    server: str
    why: Literal["prefix", "least", "overloaded", "moved"]


def order(ask: Ask) -> tuple[int, int]:
    """Who goes first."""
    return ask.priority, ask.key


def route(view: RouteView, rules: RoutingRules) -> list[Send]:
    """As many of the waiting requests as the servers have slots for. The others wait: back-pressure."""
    load = {server.name: server.load for server in view.servers if server.state == "serving"}
    tokens = {server.name: server.tokens for server in view.servers}
    slots = {server.name: server.slots for server in view.servers}
    sent: list[Send] = []
    for ask in sorted(view.waiting, key=order):
        free = [name for name in load if load[name] < slots[name]]
        if not free:
            break
        by_load = sorted(free, key=lambda name: (load[name], tokens[name], name))
        least, home = by_load[0], next((name for name in by_load if name in ask.homes), None)
        if home is not None and load[home] <= max(rules.overload * load[least], load[least] + rules.slack):
            chosen, why = home, "prefix"
        elif not ask.homes:
            chosen, why = least, "least"
        else:
            chosen, why = least, "overloaded" if any(name in load for name in ask.homes) else "moved"
        load[chosen] += 1
        tokens[chosen] += ask.tokens
        sent.append(Send(ask.key, chosen, why))  # type: ignore[arg-type]
    return sent


class Signs(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a server's health. Times are of one clock, in seconds."""

    name: str
    state: State
    ended: bool = False  # its process, or its connection: it refused
    asked_since: float | None = None  # the oldest request or probe that waits for a sign of life
    heard: float = 0.0  # the last sign of life: a token, an answered probe
    updating_since: float | None = None


def judge(signs: Signs, rules: RoutingRules, now: float) -> Literal["well", "lost", "hung"]:
    """What a server is. Example: one that was stopped is `hung` after `silence` seconds with a request in flight."""
    if signs.ended:
        return "lost"
    if signs.updating_since is not None:
        return "hung" if now - signs.updating_since > rules.update else "well"
    if signs.asked_since is None:
        return "well"
    return "hung" if now - max(signs.asked_since, signs.heard) > rules.silence else "well"


class Taking(msgspec.Struct, frozen=True, array_like=True):
    """How far a server is with a version."""

    name: str
    state: State
    version: int


def next_to_update(servers: list[Taking], version: int, *, at_once: int) -> list[str]:
    """Who takes the version now, so that the others go on: at most `at_once`, and never all that serve, but for a pool
    of one. Those that are down take it when they start."""
    busy = [server for server in servers if server.state == "updating"]
    behind = sorted(server.name for server in servers if server.state == "serving" and server.version != version)
    serving = sum(server.state == "serving" for server in servers)
    room = min(at_once - len(busy), max(serving - 1, 1 if not busy else 0))
    return behind[: max(0, room)]
