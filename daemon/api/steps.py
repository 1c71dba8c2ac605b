"""Routes of the steps of image builds that are kept."""

from __future__ import annotations

from aiohttp import web

from daemon.api.wire import HOST, Route, body, reply
from daemon.store.build_cache import Steps
from sandbox.messages import KeepStep, StepInfo, StepsRemoved, StepsWanted


async def _list(request: web.Request) -> web.Response:
    """All kept steps, the one used last first."""
    return reply(request, Steps(request.app[HOST]).all())


async def _find(request: web.Request) -> web.Response:
    """The kept steps with one of these keys. They count as used."""
    return reply(request, Steps(request.app[HOST]).find((await body(request, StepsWanted)).keys))


async def _keep(request: web.Request) -> web.Response:
    """Keep a checkpoint as the outcome of a step, once it is durable."""
    wanted = await body(request, KeepStep)
    return reply(request, await Steps(request.app[HOST]).keep(wanted.key, wanted.checkpoint, wanted.title))


async def _prune(request: web.Request) -> web.Response:
    """Give all kept steps up."""
    return reply(request, await Steps(request.app[HOST]).prune())


ROUTES: list[Route] = [
    Route("GET", "/v1/steps", _list, answer=list[StepInfo]),
    Route("POST", "/v1/steps/find", _find, body=StepsWanted, answer=list[StepInfo], scope="admin"),
    Route("PUT", "/v1/steps", _keep, body=KeepStep, answer=StepInfo, scope="admin"),
    Route("DELETE", "/v1/steps", _prune, answer=StepsRemoved, scope="admin"),
]
