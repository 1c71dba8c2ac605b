"""The doors for agents: OpenAI's chat completions, responses and completions, Anthropic's messages, over whatever
generates tokens.

Owns: the routes, their errors, the last responses, which requests may name. Does not own: the forms (dialects,
responses), recording (recorder), engines.
Guarantee: an engine that queues, restarts or refuses is an error whose code clients repeat (503), never an answer.

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
from rollout.pool import dialects, responses
from rollout.pool.recorder import Answered, Recorder
from sandbox.errors import EngineFailed, Invalid, PagurusError

BODY_MOST = 32 << 20
RESPONSES_KEPT = 4096  # the latest ones
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Doors:
    """``async with Doors(recorder) as doors: doors.url("episode 7")``"""

    def __init__(
        self, recorder: Recorder, *, model: str = "policy", sampling: Sampling | None = None, host: str = "127.0.0.1"
    ):
        """`sampling`: what requests do not say, and the most tokens of an answer."""
        self.recorder, self.model, self.host = recorder, model, host
        self.sampling = sampling or Sampling(max_tokens=1024)
        self.port = 0
        self._responses: OrderedDict[tuple[str, str], list[Message]] = OrderedDict()  # by session and name
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Doors:
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
        app = web.Application(client_max_size=BODY_MOST, middlewares=[errors])
        for prefix in ("", "/session/{session}"):
            app.add_routes(
                [
                    web.post(prefix + "/v1/chat/completions", self.chat),
                    web.post(prefix + "/v1/responses", self.responses),
                    web.post(prefix + "/v1/completions", self.completions),
                    web.post(prefix + "/v1/messages", self.messages),
                    web.post(prefix + "/v1/messages/count_tokens", self.count),
                    web.get(prefix + "/v1/models", self.models),
                ]
            )
        return app

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        messages, tools = dialects.openai_request(body)
        name = f"chatcmpl-{uuid.uuid4().hex}"
        answered = await self._answer(request, messages, tools, body, name)
        if not body.get("stream"):
            return _json(dialects.openai_answer(answered, name=name, model=self.model))
        return await _pieces(
            request, dialects.openai_stream(answered, name=name, model=self.model, usage=_wants_usage(body))
        )

    async def responses(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        session, name = _session(request), f"resp_{uuid.uuid4().hex}"
        before = self._before(session, body.get("previous_response_id"))
        new, tools = responses.request(body, before)
        messages = [*before, *new]
        answered = await self._answer(request, responses.instructed(body, messages), tools, body, name)
        if body.get("store") is not False:
            self._responses[session, name] = [*messages, answered.message]
            while len(self._responses) > RESPONSES_KEPT:
                self._responses.popitem(last=False)
        if not body.get("stream"):
            return _json(responses.answer(answered, body, name=name, model=self.model))
        return await _named_events(request, responses.stream(answered, body, name=name, model=self.model))

    def _before(self, session: str, name: str | None) -> list[Message]:
        """The conversation up to a response of this session."""
        if name is None:
            return []
        try:
            return self._responses[session, name]
        except KeyError:
            raise Invalid(f"no response {name!r} is kept", remedy="send the whole conversation as input") from None

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        prompt, name = dialects.completion_request(body), f"cmpl-{uuid.uuid4().hex}"
        sampling = dialects.sampling_of(body, self.sampling)
        completed = await self.recorder.complete(_session(request), prompt, sampling, request_id=name)
        if not body.get("stream"):
            return _json(dialects.completion_answer(completed, name=name, model=self.model))
        return await _pieces(
            request, dialects.completion_stream(completed, name=name, model=self.model, usage=_wants_usage(body))
        )

    async def messages(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        messages, tools = dialects.anthropic_request(body)
        name = f"msg_{uuid.uuid4().hex}"
        answered = await self._answer(request, messages, tools, body, name)
        if not body.get("stream"):
            return _json(dialects.anthropic_answer(answered, name=name, model=self.model))
        return await _named_events(request, dialects.anthropic_stream(answered, name=name, model=self.model))

    async def count(self, request: web.Request) -> web.Response:
        messages, tools = dialects.anthropic_request(await _body(request))
        ids = await asyncio.to_thread(self.recorder.renderer.open, messages, tools)
        return _json({"input_tokens": len(ids)})

    async def models(self, _: web.Request) -> web.Response:
        return _json(
            {"object": "list", "data": [{"id": self.model, "object": "model", "created": 0, "owned_by": "us"}]}
        )

    async def _answer(
        self, request: web.Request, messages: list[Any], tools: list[Any], body: dict[str, Any], name: str
    ) -> Answered:
        sampling = dialects.sampling_of(body, self.sampling)
        return await self.recorder.answer(_session(request), messages, tools, sampling, request_id=name)


def _session(request: web.Request) -> str:
    return request.match_info.get("session", "default")


def _wants_usage(body: dict[str, Any]) -> bool:
    return bool((body.get("stream_options") or {}).get("include_usage"))


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(await request.read())
    except msgspec.MsgspecError as error:
        raise Invalid(f"the request is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise Invalid("the request must be a JSON object")
    return body


def _json(body: dict[str, Any]) -> web.Response:
    return web.Response(body=json.dumps(body).encode(), content_type="application/json")


async def _pieces(request: web.Request, pieces: list[dict[str, Any]]) -> web.StreamResponse:
    """As OpenAI's completions send them."""
    return await _events(request, [f"data: {json.dumps(piece)}\n\n" for piece in pieces] + ["data: [DONE]\n\n"])


async def _named_events(request: web.Request, events: list[tuple[str, dict[str, Any]]]) -> web.StreamResponse:
    """As OpenAI's responses and Anthropic send them."""
    return await _events(
        request, [f"event: {kind}\ndata: {json.dumps({'type': kind, **event})}\n\n" for kind, event in events]
    )


async def _events(request: web.Request, pieces: list[str]) -> web.StreamResponse:
    out = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await out.prepare(request)
    for piece in pieces:
        await out.write(piece.encode())
    await out.write_eof()
    return out


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The one place where an error becomes a response, in a shape that both dialects' clients read."""
    try:
        return await handler(request)
    except Invalid as error:
        status, kind, text = 400, "invalid_request_error", str(error)
    except EngineFailed as error:
        status, kind, text = 503, "overloaded_error", str(error)
    except PagurusError as error:
        status, kind, text = 500, "api_error", str(error)
    body = {"type": "error", "error": {"type": kind, "message": text, "code": status}}
    headers = {"retry-after": "1"} if status == 503 else None
    return web.Response(status=status, body=json.dumps(body).encode(), content_type="application/json", headers=headers)
