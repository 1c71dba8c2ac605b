"""What happens to the containers of a sandbox, as the Engine API reports it.

They are compared every now and then: of one that starts and ends in between, both are reported, without what came
before.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from daemon.docker import shown
from daemon.docker.engine import Engine
from daemon.docker.paths import ROUTES, Call
from sandbox.container.process import exit_code
from sandbox.messages import Service
from sandbox.messages.services import ServiceHealth

POLL_INTERVAL = 0.2  # seconds; what changes a service ends it before


@dataclass(frozen=True)
class ContainerView:
    """What is compared of a container."""

    name: str
    service: Service
    program: str = ""
    exit_code: int | None = None
    health: ServiceHealth = ServiceHealth.NONE

    def event(self, action: str, now: float, **attributes: str) -> dict[str, Any]:
        number = shown.identity(self.name, self.service)
        return {
            "Type": "container",
            "Action": action,
            "Actor": {
                "ID": number,
                "Attributes": {**self.service.labels, "image": self.service.image, "name": self.name, **attributes},
            },
            "scope": "local",
            "time": int(now),
            "timeNano": int(now * 1e9),
            "status": action,
            "id": number,
            "from": self.service.image,
        }


def between(before: dict[str, ContainerView], after: dict[str, ContainerView], now: float) -> list[dict[str, Any]]:
    """The events that lead from one view to the next; containers by their ids. Pure."""
    result = []
    for number, view in after.items():
        former = before.get(number)
        if former is None:
            result.append(view.event("create", now))
            former = ContainerView(view.name, view.service)
        if view.name != former.name:
            result.append(view.event("rename", now, oldName=f"/{former.name}"))
        if former.program and former.exit_code is None and former.program != view.program:
            result.append(former.event("die", now, exitCode="0"))
        if view.program != former.program:
            result.append(view.event("start", now))
            former = ContainerView(view.name, view.service, view.program)
        if view.exit_code is not None and former.exit_code is None:
            result.append(view.event("die", now, exitCode=str(view.exit_code)))
        if view.health is not former.health and view.health is not ServiceHealth.STARTING:
            result.append(view.event(f"health_status: {view.health}", now))
    for number, view in before.items():
        if number not in after:
            if view.program and view.exit_code is None:
                result.append(view.event("die", now, exitCode="0"))
            result.append(view.event("destroy", now))
    return result


def fits(event: dict[str, Any], filters: dict[str, list[str]]) -> bool:
    """Whether an event passes the filters of a client. Pure."""
    attributes = event["Actor"]["Attributes"]
    labels = {*attributes, *(f"{key}={value}" for key, value in attributes.items())}
    tests = {
        "type": lambda said: said == event["Type"],
        "event": lambda said: event["Action"].startswith(said),
        "container": lambda said: said == attributes["name"] or event["id"].startswith(said),
        "image": lambda said: said == event["from"],
    }
    if not all(said in labels for said in filters.get("label", [])):
        return False
    return all(any(tests[key](said) for said in values) for key, values in filters.items() if key in tests and values)


def _view(engine: Engine) -> dict[str, ContainerView]:
    result = {}
    for name, service in engine.composition.services.items():
        row = engine.live.composed.row(name)
        view = ContainerView(name, service)
        if row is not None and row.pid:
            code = None if row.exit_status is None else exit_code(row.exit_status)
            view = ContainerView(name, service, row.id, code, row.health)
        result[shown.identity(name, service)] = view
    return result


@ROUTES("GET", "/events")
async def _events(engine: Engine, call: Call) -> web.StreamResponse:
    """Those from now on, until `until` or until the client leaves."""
    until, filters = call.seconds("until"), call.filters
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    before = _view(engine)
    await response.prepare(call.request)
    while until is None or time.time() < until:
        await engine.live.composed.changed(POLL_INTERVAL)
        after = _view(engine)
        for event in between(before, after, time.time()):
            if fits(event, filters):
                await response.write(json.dumps(event).encode() + b"\n")
        before = after
        if call.request.transport is None or call.request.transport.is_closing():
            break
    await response.write_eof()
    return response
