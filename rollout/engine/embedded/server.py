"""The embedded engine as a server: vLLM's routes in front of `Core`, in a process of its own.

    python -m rollout.engine.embedded.server --model DIR --port N

Guarantee: an error inside a step ends the process: a supervisor sees it at once.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import ssl
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from aiohttp import web

from rollout.decide.engines.colocation import Colocation
from rollout.decide.engines.headroom import Budget
from rollout.engine import protocol as wire
from rollout.engine import standby
from rollout.engine.embedded.core import Core, SamplingSequence
from rollout.engine.embedded.pretrained import DTYPES
from rollout.engine.embedded.thread import EngineThread, Progress, fail
from rollout.engine.embedded.weights import PulledWeights
from rollout.engine.tls import listening
from rollout.step_log import StepLog
from rollout.weights.process import PullerProcess
from sandbox import structs
from sandbox.errors import EngineFailed, Invalid, PagurusError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
log = logging.getLogger("pagurus.engine")


class EngineServer:
    """The routes. Every handler parses, calls one method, encodes."""

    def __init__(self, thread: EngineThread, weights: PulledWeights | None = None):
        self.thread, self.weights = thread, weights
        self._calls = 0  # under way
        self._last_seen = time.monotonic()

    async def idle(self, seconds: float) -> None:
        """Returns when there was no call for so long: the process that started this server is gone, and no other took
        it over."""
        while self._calls or time.monotonic() - self._last_seen < seconds:  # noqa: ASYNC110 - the event is that none came
            await asyncio.sleep(min(seconds, 5.0))
        log.info("no call for %g s", seconds)

    @web.middleware
    async def _count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._calls += 1
        try:
            return await handler(request)
        finally:
            self._calls -= 1
            self._last_seen = time.monotonic()

    def application(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20, middlewares=[self._count, errors])
        app.add_routes(
            [
                web.post(wire.GENERATE, self.generate),
                web.get(wire.HEALTH, self.health),
                web.post(wire.PAUSE, self.pause),
                web.post(wire.RESUME, self.resume),
                web.get(wire.IS_PAUSED, self.is_paused),
                web.post(wire.ABORT, self.abort),
                web.post(wire.SET_VERSION, self.set_version),
                web.get(wire.WEIGHT_INFO, self.weight_info),
                web.post(wire.WEIGHT_CHECKER, self.weight_checker),
                web.post(wire.PULL_WEIGHTS, self.pull_weights),
                web.post(wire.APPLY_WEIGHTS, self.apply_weights),
                web.post(wire.RESET_CACHE, self.reset_cache),
                web.get(wire.STATISTICS, self.statistics),
            ]
        )
        return app

    async def generate(self, http: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await http.read(), type=wire.GenerateRequest)
        sampling = body.sampling_params
        if sampling.n != 1 or (sampling.logprobs or 0) > 0:
            raise ValueError("the embedded engine has neither n > 1 nor top logprobs")
        if sampling.max_tokens < 1 or not 0 <= sampling.temperature < float("inf"):
            raise ValueError("max_tokens must be at least 1, temperature at least 0")
        if not 0 < sampling.top_p <= 1 or sampling.top_k < -1:
            raise ValueError("top_p must be above 0 and at most 1, top_k a number of tokens, or 0 for all")
        if not 0 <= sampling.routed_experts_prompt_start <= len(body.token_ids):
            raise ValueError(f"routed_experts_prompt_start must be within the prompt of {len(body.token_ids)} tokens")
        core = self.thread.core
        ends = core.facts.ends
        stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else ends)
        request = SamplingSequence(
            id=body.request_id or uuid.uuid4().hex,
            tokens=list(body.token_ids),
            max_tokens=sampling.max_tokens,
            stops=stops,
            priority=body.priority,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=max(sampling.top_k, 0),
            seed=sampling.seed,
            routed=sampling.routed_experts_prompt_start,
            since=time.monotonic(),
        )
        if body.stream:
            return await self._stream(http, request)
        request = await self.thread.run(request)
        if request.finish == "error":
            raise EngineFailed(
                f"weights of version {core.version} gave logits that are not finite",
                hint="go back to an earlier version: `pagurus weights rollback`",
            )
        return answer(response(request, with_logprobs=sampling.logprobs is not None, ends=ends))

    async def _stream(self, http: web.Request, request: SamplingSequence) -> web.StreamResponse:
        """``data:`` lines. A refused request is refused before the first of them."""
        grown = self.thread.stream(request)
        first = await anext(grown)
        out = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await out.prepare(http)
        try:
            await out.write(chunk(request, first))
            async for item in grown:
                await out.write(chunk(request, item))
            await out.write(b"data: [DONE]\n\n")
            await out.write_eof()
        finally:
            await grown.aclose()
        return out

    async def health(self, _: web.Request) -> web.Response:
        if self.thread.core.broken is not None:
            return web.Response(status=503, text=self.thread.core.broken)
        return web.Response()

    async def pause(self, http: web.Request) -> web.Response:
        mode = msgspec.convert(http.query.get("mode", "abort"), wire.PauseMode)
        await self.thread.pause(mode)
        return web.json_response({"status": "paused"})

    async def resume(self, _: web.Request) -> web.Response:
        await self.thread.resume()
        return web.json_response({"status": "resumed"})

    async def is_paused(self, _: web.Request) -> web.Response:
        return answer(wire.PauseInfo(self.thread.paused))

    async def abort(self, http: web.Request) -> web.Response:
        body = msgspec.json.decode(await http.read() or b"{}", type=wire.AbortRequest)
        return web.json_response({"status": "aborted", "aborted": await self.thread.abort(body.request_ids)})

    async def set_version(self, http: web.Request) -> web.Response:
        body = msgspec.json.decode(await http.read(), type=wire.VersionRequest)
        await self.thread.call(lambda core: core.label(body.new_version))
        return web.json_response({"success": True, "new_version": body.new_version})

    async def weight_info(self, _: web.Request) -> web.Response:
        return answer(wire.WeightInfo(self.thread.core.version))

    async def weight_checker(self, http: web.Request) -> web.Response:
        msgspec.json.decode(await http.read(), type=wire.CheckerRequest)
        return answer(wire.Checksums(await self.thread.call(lambda core: core.checksums())))

    async def pull_weights(self, http: web.Request) -> web.Response:
        body = msgspec.json.decode(await http.read() or b"{}", type=wire.WeightPull)
        return answer(await self._weights().pull(self.thread.core, body.version))

    async def apply_weights(self, http: web.Request) -> web.Response:
        body = msgspec.json.decode(await http.read(), type=wire.ApplyRequest)
        weights = self._weights()
        paused = await self.thread.call(lambda core: weights.apply(core, body.version, recompute=body.recompute))
        return answer(wire.ApplyResult(body.version, paused))

    def _weights(self) -> PulledWeights:
        if self.weights is None:
            raise ValueError("this engine was started without --weights: its weights never change")
        return self.weights

    async def reset_cache(self, _: web.Request) -> web.Response:
        await self.thread.call(lambda core: core.forget())
        return web.Response()

    async def statistics(self, _: web.Request) -> web.Response:
        counts = self.thread.core.statistics
        scheduler = self.thread.core.scheduler
        counts.paused, counts.sequences = self.thread.paused, scheduler.sequences
        colocation = self.thread.core.colocation
        counts.colocates = 0 if colocation is None or colocation.frozen else scheduler.colocated_slots
        counts.running, counts.waiting = len(scheduler.running), len(scheduler.waiting)
        return answer(counts)


def response(request: SamplingSequence, *, with_logprobs: bool, ends: frozenset[int]) -> wire.GenerateResponse:
    last = request.tokens[-1]
    by_token = request.finish == "stop" and last not in ends
    pairs = zip(request.output, request.logprobs, strict=True)
    choice = wire.Choice(
        finish_reason=request.finish,
        stop_reason=last if by_token else None,
        token_ids=request.output,
        logprobs=wire.Logprobs([wire.TokenLogprob(*pair) for pair in pairs]) if with_logprobs else None,
        routed_experts=experts_of(request),
        weight_versions=request.spans,
    )
    generated = len(request.output)
    usage = wire.Usage(
        prompt_tokens=request.prompt, completion_tokens=generated, total_tokens=request.prompt + generated
    )
    return wire.GenerateResponse(
        request_id=request.id, choices=[choice], created=int(time.time()), model="embedded", usage=usage
    )


def experts_of(request: SamplingSequence) -> str | None:
    """Of its prompt, where they are requested, and of its answer."""
    return None if request.experts is None else request.experts.within(request.routed, request.experts.end).written()


def chunk(request: SamplingSequence, grown: Progress) -> bytes:
    """One line of a streamed answer."""
    body = wire.StreamChunk(request_id=request.id)
    if grown.finish == "error":
        body.error = wire.EngineErrorBody("the weights gave logits that are not finite", "InternalServerError", 503)
    else:
        pairs = zip(grown.token_ids, grown.logprobs, strict=True)
        body.choices = [
            wire.Choice(
                finish_reason=grown.finish,
                token_ids=grown.token_ids,
                logprobs=wire.Logprobs([wire.TokenLogprob(*pair) for pair in pairs]),
                routed_experts=None if grown.finish is None else experts_of(request),
                weight_versions=grown.spans,
            )
        ]
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def answer(body: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The one place where an error becomes a response."""
    try:
        return await handler(request)
    except (ValueError, Invalid, msgspec.MsgspecError) as error:
        failure = wire.EngineErrorBody(str(error), "BadRequestError", 400)
    except (PagurusError, OSError) as error:
        failure = wire.EngineErrorBody(str(error), "InternalServerError", 503)
    return web.Response(
        status=failure.code, body=msgspec.json.encode(wire.ErrorResponse(failure)), content_type="application/json"
    )


async def serve(
    core: Core,
    *,
    host: str,
    port: int,
    stop: asyncio.Event | None = None,
    idle_exit: float | None = None,
    weights: PulledWeights | None = None,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Serve until `stop`, `idle_exit` seconds without a call, or a fatal error of the engine thread (raised)."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    thread = EngineThread(core, loop, lambda error: fail(ended, error))  # type: ignore[arg-type]
    server = EngineServer(thread, weights)
    runner = web.AppRunner(server.application(), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port, ssl_context=tls).start()
    log.info("serving %s as version %s on %s:%d", core.directory, core.version, host, port)
    gc.collect()
    gc.freeze()  # what is there now stays: looking through it again and again would hold up a step
    waiters: list[asyncio.Future[Any]] = [ended] if stop is None else [ended, asyncio.ensure_future(stop.wait())]
    if idle_exit is not None:
        waiters.append(asyncio.ensure_future(server.idle(idle_exit)))
    try:
        done, _ = await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
        if ended in done:
            ended.result()
    finally:
        await runner.cleanup()
        thread.close()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m rollout.engine.embedded.server", description="Serve a model.")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--tls", type=Path, help="answer only peers with the key in this directory (engine.tls)")
    parser.add_argument("--version", default="0", help="what to call the weights, without --weights")
    parser.add_argument("--slots", type=int, default=64, help="sequences computed together")
    parser.add_argument("--cache", type=int, help="tokens of all sequences together; else slots times length")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="what is computed in")
    parser.add_argument("--paged", action="store_true", help="our own Qwen3 by transformers, too: slower on a CPU")
    parser.add_argument("--experts", action="store_true", help="answers name the experts of each token of a mixture")
    parser.add_argument("--threads", type=int, default=1, help="of the processor; a small model is slower with two")
    parser.add_argument("--length", type=int, default=1024, help="tokens of the longest sequence")
    parser.add_argument(
        "--weights", help="pull versions from this directory or URL, into --model, which is their mirror"
    )
    parser.add_argument("--at", type=int, help="with --weights: the version to begin with; else the newest")
    parser.add_argument("--reader", default="engine", help="with --weights: this engine's name in its lease")
    parser.add_argument("--base", type=Path, help="of an adapter: its base model, where it is not where it says")
    parser.add_argument(
        "--ttft", type=float, help="serve users, who were promised the first token after so many seconds"
    )
    parser.add_argument("--tpot", type=float, default=0.05, help="with --ttft: seconds from one token to the next")
    parser.add_argument("--margin", type=float, default=0.5, help="share of what was promised that is left unused")
    parser.add_argument(
        "--steps", type=Path, help="with --ttft: a directory for a log of all steps and why they were so"
    )
    parser.add_argument("--idle-exit", type=float, help="end after so many seconds without a call")
    if (reported := standby.reported(sys.argv[1:] if arguments is None else arguments)) is None:
        return
    options = parser.parse_args(reported)
    if options.tls is None and options.host not in ("127.0.0.1", "::1", "localhost"):
        parser.error("an engine that others reach answers only peers with the run's key: give --tls")
    torch.set_num_threads(options.threads)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    structs.learn()
    asyncio.run(run(options))


async def run(options: argparse.Namespace) -> None:
    weights = None
    if options.weights is not None:
        weights = PulledWeights(PullerProcess(options.weights, options.model, name=options.reader))
    try:
        if weights is not None:
            options.version = str(await weights.first(options.at))
        colocation = None
        if options.ttft is not None:
            budget = Budget(ttft=options.ttft, tpot=options.tpot, margin=options.margin)
            colocation = Colocation(budget, log=options.steps and StepLog(options.steps, budget).append)
        core = Core(
            options.model,
            version=options.version,
            slots=options.slots,
            length=options.length,
            base=options.base,
            colocation=colocation,
            cache=options.cache,
            device=options.device,
            dtype=options.dtype,
            paged=options.paged,
            experts=options.experts,
        )
        log.info("pid %d, %d slots of %d tokens", os.getpid(), options.slots, core.scheduler.length)
        tls = None if options.tls is None else listening(options.tls)
        at = {"host": options.host, "port": options.port, "tls": tls}
        await serve(core, **at, idle_exit=options.idle_exit, weights=weights)
    finally:
        if weights is not None:
            await weights.close()


if __name__ == "__main__":
    main()
