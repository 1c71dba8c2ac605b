"""Routes of image builds: the steps that are kept, and what builds say."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from aiohttp import web

from daemon.api.route import Area
from daemon.host.host import Host
from daemon.store.build_cache import BuildCache
from daemon.store.build_logs import BuildLogs
from sandbox.messages import KeepStep, StepInfo, StepsRemoved, StepsTarget
from sandbox.messages.images import BuildInfo, BuildLines, BuildReport, BuildRequest

AREA = Area()
BUILDS: web.AppKey[BuildLogs] = web.AppKey("builds", BuildLogs)


@AREA("GET", "/v1/steps")
async def _list(host: Host) -> list[StepInfo]:
    """The steps that are kept, the one used last first; with a token that has an owner, none."""
    return BuildCache(host).all()


@AREA("POST", "/v1/steps/find", scope="admin")
async def _find(host: Host, body: StepsTarget) -> list[StepInfo]:
    """The kept steps with one of these keys. They count as used."""
    return BuildCache(host).find(body.keys)


@AREA("PUT", "/v1/steps", scope="admin")
async def _keep(host: Host, body: KeepStep) -> StepInfo:
    """Keep a checkpoint as the outcome of a step, once it is durable."""
    return await BuildCache(host).keep(body.key, body.checkpoint, body.title)


@AREA("DELETE", "/v1/steps", scope="admin")
async def _prune(host: Host) -> StepsRemoved:
    """Give all kept steps up."""
    return await BuildCache(host).prune()


# --------------------------------------------------------------------------- builds


class LinesQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    begin: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 0  # number of the first line


@AREA("POST", "/v1/builds", status=201, scope="admin")
async def _begin(request: web.Request, body: BuildRequest) -> BuildInfo:
    """Report that a build begins; its client carries it out."""
    return await asyncio.to_thread(request.app[BUILDS].begin, body.name)


@AREA("POST", "/v1/builds/{build}", scope="admin")
async def _report(request: web.Request, build: str, body: BuildReport) -> BuildInfo:
    """Report what a build says, and how it ended."""
    return await asyncio.to_thread(request.app[BUILDS].report, build, body)


@AREA("GET", "/v1/builds", scope="admin")
async def _builds(request: web.Request) -> list[BuildInfo]:
    """The newest builds, and those under way."""
    return await asyncio.to_thread(request.app[BUILDS].all)


@AREA("GET", "/v1/builds/{build}/log", scope="admin")
async def _log(request: web.Request, build: str, query: LinesQuery) -> BuildLines:
    """A part of what a build said, or says."""
    return await asyncio.to_thread(request.app[BUILDS].lines, build, query.begin)
