"""What agents and models say to each other, as far as a gateway must understand it.

Pure.

Guarantee: two requests have the same key only if they ask a model for the same: the same route, the same model and
the same body but for the fields of VOLATILE, which name the caller and not the question.
"""

from __future__ import annotations

import enum
import fnmatch
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import blake3
import msgspec

from sandbox.errors import Invalid, NotFound, PagurusError
from sandbox.messages import SideRule

MAX_BODY = 16 << 20  # bytes of one request
MAX_ANSWER = 32 << 20  # bytes of one answer
MAX_VALUES = 1_000_000  # in a body, counted before it is taken apart: a value takes many times its text
MAX_PARTS = 10_000  # of a conversation; each is a row of the record
MAX_QUERY = 1000  # characters
PING_TOKENS = 1  # a request for no more than this tests whether the model answers
VOLATILE = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
# How the system text begins of requests that well-known agents make outside their main loop. They name no tools.
SIDE_PROMPTS = (
    # Claude Code: the topic and the title of a conversation, the prefix and the paths of a shell command
    "Analyze if this message indicates a new conversation topic.",
    "Summarize this coding conversation in under 50 characters.",
    "Generate a concise, sentence-case title",
    "Your task is to process Bash commands that an AI coding agent wants to run.",
    "Extract any file paths that this command reads or modifies",
    "You are a title generator. You output ONLY a thread title.",  # OpenCode
    "you will generate a short title based on the first message",  # Crush
    "Reply with only a description in four words or less",  # goose
    "You are an expert software engineer that generates concise, one-line Git commit messages",  # aider
)
REPORTED = re.compile(
    r"content-type|location|retry-after(-ms)?|x-should-retry|(x-)?request-id|openai-[a-z-]+|anthropic-[a-z-]+|x-ratelimit-[a-z-]+"
)
REQUESTED = re.compile(r"accept|anthropic-version|anthropic-beta|openai-beta")
MAX_HEADER = 8000  # characters of a header that travels, in all its lines
MAX_HEADER_LINES = 64  # of headers that travel


class ApiFamily(enum.StrEnum):
    """Whose form a route has; errors and keys follow it."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    GEMINI = "gemini"


@dataclass(frozen=True)
class ModelRoute:
    path: str
    family: ApiFamily
    conversation: str | None  # the field of the body that holds it; None: this route asks no model
    limits: tuple[str, ...] = ()  # fields that bound the answer, in tokens
    method: str = "POST"

    @property
    def has_body(self) -> bool:
        return self.method == "POST"


ROUTES = (
    ModelRoute("/v1/chat/completions", ApiFamily.OPENAI, "messages", ("max_completion_tokens", "max_tokens")),
    ModelRoute("/v1/completions", ApiFamily.OPENAI, "prompt", ("max_tokens",)),
    ModelRoute("/v1/responses", ApiFamily.OPENAI, "input", ("max_output_tokens",)),
    ModelRoute("/v1/messages", ApiFamily.ANTHROPIC, "messages", ("max_tokens",)),
    ModelRoute("/v1/responses/compact", ApiFamily.OPENAI, "input"),
    ModelRoute("/v1/responses/input_tokens", ApiFamily.OPENAI, None),
    ModelRoute("/v1/messages/count_tokens", ApiFamily.ANTHROPIC, None),
    ModelRoute("/v1/models", ApiFamily.OPENAI, None, method="GET"),
    # What Claude Code requests besides its model: is the host there, may it speak to it, what it did.
    ModelRoute("/", ApiFamily.ANTHROPIC, None, method="HEAD"),
    ModelRoute("/api/hello", ApiFamily.ANTHROPIC, None, method="GET"),
    ModelRoute("/api/hello", ApiFamily.ANTHROPIC, None, method="HEAD"),
    ModelRoute("/api/event_logging/batch", ApiFamily.ANTHROPIC, None),
    ModelRoute("/api/event_logging/v2/batch", ApiFamily.ANTHROPIC, None),
)
_BY_PATH = {(route.method, route.path): route for route in ROUTES}
# Pairs and escaped backslashes first, so that what is left as a surrogate stands alone.
_ESCAPES = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<lone>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)
_RAW_SURROGATE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
_MODEL = re.compile(r"/v1/models/[A-Za-z0-9._:@/-]{1,200}")
# Gemini names the model, and whether it streams, in the path.
_GEMINI = re.compile(r"(?P<before>/v1beta/models/)(?P<model>[A-Za-z0-9][A-Za-z0-9._@-]{0,199})(?P<act>:[A-Za-z]{1,40})")


@dataclass(frozen=True)
class AgentRequest:
    """A request that was understood."""

    route: ModelRoute
    path: str  # with its query
    body: dict[str, Any]
    key: bytes  # 32 bytes
    main: bool
    stream: bool
    retry: bool = False  # the client says that it asks again
    headers: tuple[tuple[str, str], ...] = ()  # that travel to the model

    @property
    def kind(self) -> str:
        """Of the main loop, outside it, or one that calls no model."""
        return "main" if self.main else "side" if self.route.conversation is not None else "other"

    @property
    def conversation(self) -> list[Any]:
        """The parts of the conversation, in order. A text alone has no parts, and neither has a list of tokens."""
        said = self.body.get(self.route.conversation or "")
        return said if isinstance(said, list) and self.route.conversation != "prompt" else []

    @property
    def envelope(self) -> dict[str, Any]:
        """The body without the parts of its conversation."""
        excluded = self.route.conversation if self.conversation else None
        return {k: v for k, v in self.body.items() if k != excluded}


def find(method: str, path: str, headers: Mapping[str, str] | None = None) -> ModelRoute:
    """The route of a request, or NotFound that says which there are.

    Both families have the routes of models: whose it is, a header says that only clients of Anthropic send.
    """
    route = _BY_PATH.get((method, path))
    if route is None and method == "GET" and _MODEL.fullmatch(path) and ".." not in path:
        route = ModelRoute(path, ApiFamily.OPENAI, None, method="GET")
    if method == "POST" and (named := _GEMINI.fullmatch(path)) is not None:
        generates = named["act"] in (":generateContent", ":streamGenerateContent")
        if generates or named["act"] == ":countTokens":
            return ModelRoute(path, ApiFamily.GEMINI, "contents" if generates else None, ("maxOutputTokens",))
    if route is not None and path.startswith("/v1/models") and "anthropic-version" in (headers or {}):
        return ModelRoute(path, ApiFamily.ANTHROPIC, None, method="GET")
    if route is None:
        existing = ", ".join(f"{existing.method} {existing.path}" for existing in ROUTES)
        existing += ", POST /v1beta/models/MODEL:generateContent and :streamGenerateContent"
        raise NotFound(f"the gateway has no {method[:10]} {path[:200]}", hint=f"it has {existing}")
    return route


def understand(
    route: ModelRoute,
    raw: bytes,
    *,
    query: str = "",
    model: str | None = None,
    side: Iterable[SideRule] = (),
    recognize_side: bool = True,
    headers: Mapping[str, str] | None = None,
) -> AgentRequest:
    """The request with body `raw`; `model` replaces the one that it names. Raises Invalid if it is no JSON object,
    or has too many values."""
    if len(query) > MAX_QUERY:
        raise Invalid("the query is too long", hint="leave parameters out")
    called = ""  # the model, by its path
    if route.family is ApiFamily.GEMINI and (match := _GEMINI.fullmatch(route.path)) is not None:
        called = match["model"]
        query = "&".join(item for item in query.split("&") if not item.startswith("key="))  # the agent's own
        if model is not None:
            route = replace(route, path=f"{match['before']}{model}{match['act']}")
    path = f"{route.path}?{query}" if query else route.path
    travelling = forwarded(headers or {})
    if not route.has_body:
        return AgentRequest(route, path, {}, _key(path, {}), main=False, stream=False, headers=travelling)
    if len(raw) > MAX_VALUES and raw.count(b",") + raw.count(b"{") + raw.count(b"[") > MAX_VALUES:
        raise Invalid(f"the body has more than {MAX_VALUES} values", hint="shorten the conversation")
    try:
        body = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError) as error:
        if (lone := lone_surrogate(raw)) is not None:
            raise Invalid(
                f"the body has a lone surrogate, {lone}, which is no character: models refuse it",
                hint='replace it before it is sent, as with text.encode("utf-8", "replace")',
            ) from None
        raise Invalid(
            f"the body is not a JSON object: {error}", hint="send the JSON object of the API that the path names"
        ) from None
    named = called or str(body.get("model", ""))
    if model is not None and not called:
        body["model"] = model
    main = is_main_loop(route, body, side, recognize=recognize_side, named=named)
    stream = body.get("stream") is True or ":stream" in route.path
    retry = _is_retry(headers or {})
    requested = AgentRequest(
        route, path, body, _key(path, body), main=main, stream=stream, retry=retry, headers=travelling
    )
    if (parts := len(requested.conversation)) > MAX_PARTS:
        raise Invalid(f"the conversation has {parts} parts", hint=f"at most {MAX_PARTS} are passed on")
    return requested


def lone_surrogate(raw: bytes) -> str | None:
    r"""The first half of a surrogate pair in a body that stands alone, as it is written there.

    >>> lone_surrogate(rb'{"a": "\udc80"}') == r"\udc80", lone_surrogate(rb'{"a": "\ud83d\ude00 \\udc80"}')
    (True, None)
    """
    for result in _ESCAPES.finditer(raw):
        if result["lone"] is not None:
            return result["lone"].decode("ascii")
    return "as bytes" if _RAW_SURROGATE.search(raw) else None


def canonical(body: Mapping[str, Any]) -> bytes:
    """The same bytes for the same question, however its fields are ordered."""
    try:
        return msgspec.json.encode({k: v for k, v in body.items() if k not in VOLATILE}, order="deterministic")
    except RecursionError:
        raise Invalid("the body is nested too deeply", hint="nest it less") from None


def _key(path: str, body: Mapping[str, Any]) -> bytes:
    return blake3.blake3(path.encode() + b"\0" + canonical(body)).digest()


def _is_retry(headers: Mapping[str, str]) -> bool:
    """The clients of OpenAI and Anthropic count their retries in a header."""
    count = headers.get("x-stainless-retry-count", "0")
    return count.isascii() and count.isdigit() and int(count[:6]) > 0


# --------------------------------------------------------------------------- main loop or outside it


def is_main_loop(
    route: ModelRoute,
    body: Mapping[str, Any],
    side: Iterable[SideRule] = (),
    *,
    recognize: bool = True,
    named: str | None = None,
) -> bool:
    """Whether a request ends a turn. In doubt it does: then an answer waits too long, never too short.

    Outside the main loop are: routes that call no model, requests for a single token (a connection test), what a rule
    of the sandbox names (titles, summaries) and, with `recognize`, what begins as in SIDE_PROMPTS. `named` is the model
    that the agent named, where it was replaced.
    """
    if route.conversation is None:
        return False
    limit = _max_tokens(route, body)
    if limit is not None and limit <= PING_TOKENS:
        return False
    tools = body.get("tools") or body.get("functions")
    if (
        recognize
        and not tools
        and any(text.lstrip("\r\n\t -").startswith(SIDE_PROMPTS) for text in _system(body, route))
    ):
        return False
    model = str(body.get("model", "")) if named is None else named
    return not any(_fits(rule, model, limit, body, route) for rule in side)


def _max_tokens(route: ModelRoute, body: Mapping[str, Any]) -> int | None:
    config = body.get("generationConfig")  # of Gemini
    fields = {**body, **config} if route.family is ApiFamily.GEMINI and isinstance(config, dict) else body
    result = [fields[name] for name in route.limits if isinstance(fields.get(name), int)]
    return min(result) if result else None


def _fits(rule: SideRule, model: str, limit: int | None, body: Mapping[str, Any], route: ModelRoute) -> bool:
    if rule.model is None and rule.max_tokens is None and rule.contains is None:
        return False  # a rule that says nothing means nothing
    if rule.model is not None and not fnmatch.fnmatchcase(model, rule.model):
        return False
    if rule.max_tokens is not None and (limit is None or limit > rule.max_tokens):
        return False
    return rule.contains is None or any(rule.contains in text for text in _last_seen(body, route))


def _last_seen(body: Mapping[str, Any], route: ModelRoute) -> list[str]:
    """The texts that a rule looks at: the system's, and the last of the conversation."""
    return [*_system(body, route), *(text for part in _parts(body, route)[-1:] for text in _texts(part))]


def _system(body: Mapping[str, Any], route: ModelRoute) -> list[str]:
    system = [
        part for part in _parts(body, route) if isinstance(part, dict) and part.get("role") in ("system", "developer")
    ]
    others = (body.get("system"), body.get("instructions"), body.get("systemInstruction"))
    return [text for part in (*others, *system) for text in _texts(part)]


def _parts(body: Mapping[str, Any], route: ModelRoute) -> list[Any]:
    said = body.get(route.conversation or "")
    return said if isinstance(said, list) else [said]


def _texts(part: object, depth: int = 0) -> list[str]:
    if isinstance(part, str):
        return [part]
    if depth > 4:
        return []
    if isinstance(part, list):
        return [text for entry in part for text in _texts(entry, depth + 1)]
    if isinstance(part, dict):
        return [text for name in ("text", "content", "parts") for text in _texts(part.get(name), depth + 1)]
    return []


# --------------------------------------------------------------------------- headers and errors


def forwarded(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Headers of an agent that its model may see, each line of them, in order. Raises Invalid if one is too large.

    Keys, cookies and everything unknown stay behind.
    """
    lines = tuple(_chosen(headers, REQUESTED))
    if len(lines) > MAX_HEADER_LINES:
        raise Invalid(f"{len(lines)} lines of headers for the model", hint=f"at most {MAX_HEADER_LINES} are passed on")
    sizes: Counter[str] = Counter()
    for name, value in lines:
        sizes[name] += len(value)
        if sizes[name] > MAX_HEADER:
            raise Invalid(f"the header {name} has more than {MAX_HEADER} characters", hint="shorten the header")
        if not value.replace("\t", "").isprintable():
            raise Invalid(f"the header {name} has characters that no header may have", hint="use printable ASCII")
    return lines


def reported(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers of an answer that the agent may see; several lines of one as a single line."""
    result: dict[str, str] = {}
    for name, value in _chosen(headers, REPORTED):
        result[name] = f"{result[name]}, {value}" if name in result else value
    return {name: value for name, value in result.items() if value.isprintable()}


def _chosen(headers: Mapping[str, str], which: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    for name, value in headers.items():
        if which.fullmatch(name.lower()):
            yield name.lower(), value


def location_inside(location: str, base: str) -> str:
    """Where a redirect leads, as the agent can follow it: a place at its upstream is reached through the gateway.

    >>> location_inside("http://10.0.0.5:8000/v1/messages?a=b", "http://10.0.0.5:8000/v1")
    '/v1/messages?a=b'
    """
    rest = location.removeprefix(base.rstrip("/").removesuffix("/v1"))
    return rest if rest != location and rest.startswith("/") and not rest.startswith("//") else location


def credential(family: ApiFamily, key: str) -> dict[str, str]:
    """How a key is shown to an upstream of this family."""
    if family is ApiFamily.GEMINI:
        return {"x-goog-api-key": key}
    return {"x-api-key": key} if family is ApiFamily.ANTHROPIC else {"authorization": f"Bearer {key}"}


_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_GEMINI_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def error_body(family: ApiFamily, error: PagurusError) -> bytes:
    """One of our own refusals in the words of the agent's protocol."""
    if family is ApiFamily.ANTHROPIC:
        kind = _ANTHROPIC_TYPES.get(error.status, "api_error")
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": f"pagurus: {error}"}})
    if family is ApiFamily.GEMINI:
        kind = _GEMINI_STATUSES.get(error.status, "INTERNAL")
        return msgspec.json.encode({"error": {"code": error.status, "message": f"pagurus: {error}", "status": kind}})
    return msgspec.json.encode(
        {"error": {"message": f"pagurus: {error}", "type": "gateway_error", "param": None, "code": error.code}}
    )


def family_of(path: str) -> ApiFamily:
    """The family whose errors a client of `path` understands, known or not."""
    if path.startswith("/v1beta/"):
        return ApiFamily.GEMINI
    return ApiFamily.ANTHROPIC if path.startswith("/v1/messages") else ApiFamily.OPENAI
