"""Routes of the steps of image builds that are kept."""

from __future__ import annotations

from daemon.api.route import Area
from daemon.host.host import Host
from daemon.store.build_cache import BuildCache
from sandbox.messages import KeepStep, StepInfo, StepsRemoved, StepsTarget

AREA = Area()


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
