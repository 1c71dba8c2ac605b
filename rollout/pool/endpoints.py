"""The doors for agents: OpenAI's chat completions, responses and completions, Anthropic's messages, over whatever
generates tokens.

Guarantee: an engine that queues, restarts or refuses is an error whose code clients repeat (503), never an answer; a
stream begins with the engine's first token, and its events are sent as tokens come. Who goes away ends his request.

An agent's base URL names its session: ``http://HOST:PORT/session/NAME`` (what comes before ``/v1``). Without that, its
session is `default`.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from rollout.engine.client import Sampling
from rollout.episode.renderer import Message
from rollout.pool.anthropic import MESSAGES
from rollout.pool.completions import CHAT, TEXT
from rollout.pool.dialects import ChatRequest, Dialect, Event, ReplyHeader, Speech, sampling_of, stop_of
from rollout.pool.recorder import AgentReply, SampleRecorder
from rollout.pool.responses import RESPONSES
from sandbox.errors import EngineFailed, Invalid, PagurusError

MAX_BODY = 32 << 20
RESPONSES_RETAINED = 4096  # the latest ones
ROUTES = {"chat/completions": CHAT, "completions": TEXT, "responses": RESPONSES, "messages": MESSAGES}  # after /v1
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Endpoints:
    """``async with Doors(recorder) as doors: doors.url("episode 7")``"""

    def __init__(
        self,
        recorder: SampleRecorder,
        *,
        model: str = "policy",
        sampling: Sampling | None = None,
        host: str = "127.0.0.1",
    ):
        """`sampling`: what requests do not say, and the most tokens of an answer."""
        self.recorder, self.model, self.host = recorder, model, host
        self.sampling = sampling or Sampling(max_tokens=1024)
        self.port = 0
        self._responses: OrderedDict[tuple[str, str], list[Message]] = OrderedDict()  # by session and name
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Endpoints:
        self._runner = web.AppRunner(self.application(), access_log=None, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def url(self, session: str) -> str:
        """What comes before ``/v1`` for this session."""
        return f"http://{self.host}:{self.port}/session/{session}"

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[errors])
        for prefix in ("/v1", "/session/{session}/v1"):
            app.add_routes([web.post(f"{prefix}/{route}", self._route(item)) for route, item in ROUTES.items()])
            app.add_routes(
                [web.post(f"{prefix}/messages/count_tokens", self.count), web.get(f"{prefix}/models", self.models)]
            )
        return app

    def _route(self, dialect: Dialect) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            return await self.answer(dialect, request)

        return handler

    async def answer(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        body, session = await _body(request), _session(request)
        before = self._before(session, body.get("previous_response_id")) if dialect is RESPONSES else []
        query = dialect.request(body, before)
        frame = ReplyHeader(f"{dialect.prefix}{uuid.uuid4().hex}", self.model, body)
        stream = EventStream(request, Speech(dialect, frame)) if body.get("stream") else None
        try:
            answered = await self._requested(session, query, frame, stream)
        except PagurusError as error:
            if stream is None or not stream.begun:
                raise
            return await stream.fail(error)
        if dialect is RESPONSES and body.get("store") is not False:
            self._responses[session, frame.name] = [*query.messages, answered.message]
            while len(self._responses) > RESPONSES_RETAINED:
                self._responses.popitem(last=False)
        return _json(dialect.complete(frame, answered)) if stream is None else await stream.end(answered)

    async def _requested(
        self, session: str, request: ChatRequest, frame: ReplyHeader, stream: EventStream | None
    ) -> AgentReply:
        sampling, stop = sampling_of(frame.body, self.sampling), stop_of(frame.body)
        if request.prompt is not None:
            return await self.recorder.complete(
                session, request.prompt, sampling, stop=stop, request_id=frame.name, listener=stream
            )
        return await self.recorder.answer(
            session, request.instructed, request.tools, sampling, stop=stop, request_id=frame.name, listener=stream
        )

    def _before(self, session: str, name: str | None) -> list[Message]:
        """The conversation up to a response of this session."""
        if name is None:
            return []
        try:
            return self._responses[session, name]
        except KeyError:
            raise Invalid(f"no response {name!r} is kept", hint="send the whole conversation as input") from None

    async def count(self, request: web.Request) -> web.Response:
        query = MESSAGES.request(await _body(request), [])
        ids = await asyncio.to_thread(self.recorder.renderer.open, query.messages, query.tools)
        return _json({"input_tokens": len(ids)})

    async def models(self, _: web.Request) -> web.Response:
        return _json(
            {"object": "list", "data": [{"id": self.model, "object": "model", "created": 0, "owned_by": "us"}]}
        )


class EventStream:
    """An answer's events, sent as they come. Before the first of them an error has a status of its own."""

    def __init__(self, request: web.Request, speech: Speech):
        self._request, self._speech = request, speech
        self._out: web.StreamResponse | None = None

    @property
    def begun(self) -> bool:
        return self._out is not None

    async def begin(self, prompt_tokens: int) -> None:
        self._out = web.StreamResponse(headers={"content-type": "text/event-stream", "cache-control": "no-cache"})
        await self._out.prepare(self._request)
        await self._send(self._speech.begin(prompt_tokens))

    async def more(self, kind: str, text: str) -> None:
        await self._send(self._speech.more(kind, text))

    async def end(self, answered: AgentReply) -> web.StreamResponse:
        if not self.begun:
            await self.begin(answered.prompt_tokens)
        return await self._closed(self._speech.end(answered), self._speech.dialect.done)

    async def fail(self, error: PagurusError) -> web.StreamResponse:
        return await self._closed(self._speech.fail(described(error)[1]), "")

    async def _closed(self, events: list[Event], done: str) -> web.StreamResponse:
        assert self._out is not None, "it has begun"
        await self._send(events)
        if done:
            await self._out.write(f"data: {done}\n\n".encode())
        await self._out.write_eof()
        return self._out

    async def _send(self, events: list[Event]) -> None:
        """Dialects that name their events repeat the name in the data."""
        named = [(f"event: {kind}\n", {"type": kind, **event}) if kind else ("", event) for kind, event in events]
        lines = [f"{name}data: {json.dumps(event)}\n\n" for name, event in named]
        if lines and self._out is not None:
            await self._out.write("".join(lines).encode())


def _session(request: web.Request) -> str:
    return request.match_info.get("session", "default")


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(await request.read())
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Invalid(f"the request is no JSON: {error}", hint="send a JSON object") from None
    if not isinstance(body, dict):
        raise Invalid("the request must be a JSON object", hint="send a JSON object")
    return body


def _json(body: dict[str, Any]) -> web.Response:
    return web.Response(body=json.dumps(body).encode(), content_type="application/json")


def described(error: PagurusError) -> tuple[int, dict[str, Any]]:
    """An error's status, and the error in a shape that all dialects' clients read."""
    status, kind = 500, "api_error"
    if isinstance(error, Invalid):
        status, kind = 400, "invalid_request_error"
    elif isinstance(error, EngineFailed):
        status, kind = 503, "overloaded_error"
    return status, {"type": kind, "message": str(error), "code": status}


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The one place where an error becomes a response."""
    try:
        return await handler(request)
    except PagurusError as error:
        status, reported = described(error)
    body = json.dumps({"type": "error", "error": reported}).encode()
    headers = {"retry-after": "1"} if status == 503 else None
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)
