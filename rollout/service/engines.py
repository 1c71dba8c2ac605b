"""The engines of a run, as its plan names them: one server, a pool of several on this machine or on others, or servers
that others run.

Guarantee: what is yielded serves the version that was requested; servers of ours outlive a killed rollout, and the next
one adopts them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Protocol

from rollout.engine import gpus
from rollout.engine.client import Generation, PublishResult, Sampling
from rollout.engine.launch import Launch, embedded, on_gpus, vllm
from rollout.engine.supervisor import EngineSupervisor
from rollout.engine.weights import AdapterWeights
from rollout.episode.parts import Generator
from rollout.plan import RolloutPlan
from rollout.pool.member import Note, PoolMember, Remote
from rollout.pool.pool import EnginePool
from rollout.pool.started import started
from rollout.service.placed import PlacedServer, name_of
from rollout.service.protocol import PublishedVersion
from rollout.store.servers import ServerLog
from sandbox.errors import Invalid, PagurusError

log = logging.getLogger("pagurus.rollout.engines")


class Engines(Generator, Protocol):
    """All that generates for this rollout: one supervised server, or a pool of them."""

    async def publish(self, weights: Path | str, version: int) -> PublishResult: ...


class SingleServerEngine:
    """One server without a pool, noted as a pool notes its servers: ``SingleServerEngine("engine", server, log.note)``,
    of a server that serves."""

    def __init__(self, name: str, server: EngineSupervisor, note: Note):
        self.server, self._member = server, PoolMember(name, server, note=note)
        self._member.state = "serving"
        server.on_serving = self._serves

    def _serves(self, serves: bool) -> None:
        self._member.state = "serving" if serves else "starting"

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "") -> Generation:
        self._member.load += 1
        try:
            return await self.server.generate(prompt_ids, sampling, request_id=request_id)
        finally:
            self._member.load -= 1

    async def publish(self, weights: Path | str, version: int) -> PublishResult:
        self._member.state = "updating"
        try:
            return await self.server.publish(weights, version)
        finally:
            if self._member.state == "updating":  # else it died since
                self._member.state = "serving"


Serve = Callable[[PublishedVersion], AbstractAsyncContextManager[Engines]]


def serving(plan: RolloutPlan, run: Path, *, placed: bool = False) -> Serve:
    """What serves a version for this plan. ``async with serving(plan, run)(ref) as engines``. `placed`: its servers are
    kept on machines of their own (rollout.service.placed)."""

    @asynccontextmanager
    async def serve(ref: PublishedVersion) -> AsyncIterator[Engines]:
        with closing(ServerLog(run / "rollout")) as observed:
            chosen = [] if placed else await asyncio.to_thread(launches, plan)
            of = _engines(plan, chosen, ref, run, observed.note) if chosen else _placed(plan, ref, run, observed.note)
            async with of as engines:
                yield engines

    return serve


def _engines(
    plan: RolloutPlan, chosen: list[Launch], ref: PublishedVersion, run: Path, note: Note
) -> AbstractAsyncContextManager[Engines]:
    if plan.pool.urls:
        return _remote(plan, ref, run, note)
    if plan.pool.engines > 1:
        return started(chosen, ref.directory, ref.version, run=run, rules=plan.pool.rules, note=note)
    return _one(chosen[0], ref, run, note)


@asynccontextmanager
async def _one(launch: Launch, ref: PublishedVersion, run: Path, note: Note) -> AsyncIterator[SingleServerEngine]:
    log, roles = run / "engine.log", run / "roles"
    async with EngineSupervisor(launch, ref.directory, ref.version, log=log, roles=roles) as server:
        yield SingleServerEngine("engine", server, note)


def launches(plan: RolloutPlan) -> list[Launch]:
    """How each of the plan's servers is started on this machine, on GPUs of its own where the plan names them. Blocks
    while nvidia-smi lists them."""
    if not plan.devices.engines:
        return [launch(plan)] * plan.pool.engines
    here = gpus.visible()
    chosen = [gpus.environment(group, here) for group in plan.devices.engines]
    return [on_gpus(launch(plan, gpu=bool(environment)), environment) for environment in chosen]


def launch(plan: RolloutPlan, *, gpu: bool = False) -> Launch:
    """How the plan's servers are started: room for its longest trajectory."""
    pool, length = plan.pool, plan.config.limits.max_length
    slots = pool.slots
    if plan.engine == "vllm":
        return vllm(
            slots=slots,
            length=length,
            threads=pool.threads,
            lora=plan.lora,
            transfer=pool.transfer,
            parallel=pool.parallel,
            gpu=gpu,
            dtype=pool.dtype,
            experts=plan.router_replay,
            options=pool.options,
        )
    if plan.engine == "embedded":
        device, dtype = "cuda" if gpu else "cpu", "float32" if pool.dtype == "auto" else pool.dtype
        return embedded(
            slots=slots,
            length=length,
            threads=pool.threads,
            device=device,
            dtype=dtype,
            experts=plan.router_replay,
        )
    raise Invalid(f"no engine {plan.engine!r}", hint="embedded or vllm")


@asynccontextmanager
async def _placed(plan: RolloutPlan, ref: PublishedVersion, run: Path, note: Note) -> AsyncIterator[EnginePool]:
    """As soon as one of them serves: the others may wait for a machine."""
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(EnginePool(rules=plan.pool.rules, note=note))
        joining = []
        for number in range(plan.pool.engines):
            server = PlacedServer(run, number, slots=plan.pool.slots)
            stack.push_async_callback(server.close)
            joining.append(asyncio.create_task(_join(pool, name_of(number), server)))
        try:
            await asyncio.wait(joining, return_when=asyncio.FIRST_COMPLETED)
            await pool.publish(ref.directory, ref.version)
            yield pool
        finally:
            for task in joining:
                task.cancel()
            await asyncio.gather(*joining, return_exceptions=True)


async def _join(pool: EnginePool, name: str, server: PlacedServer) -> None:
    try:
        await pool.join(name, server)
    except PagurusError as error:
        log.error("%s does not join: %s", name, error)


@asynccontextmanager
async def _remote(plan: RolloutPlan, ref: PublishedVersion, run: Path, note: Note) -> AsyncIterator[EnginePool]:
    pulls = launch(plan).pulls
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(EnginePool(rules=plan.pool.rules, note=note))
        hardware = plan.pool.hardware or [""] * len(plan.pool.urls)
        for number, (url, of) in enumerate(zip(plan.pool.urls, hardware, strict=True)):
            mirror = None if pulls else AdapterWeights(ref.directory, run / f"remote-{number}.weights")
            server = Remote(url, slots=plan.pool.slots, mirror=mirror)
            stack.push_async_callback(server.close)
            await pool.join(url, server, hardware=of)
        await pool.publish(ref.directory, ref.version)
        yield pool
