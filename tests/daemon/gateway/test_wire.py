"""What the gateway understands of a request, without any connection."""

from __future__ import annotations

import json
import secrets
import socket
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from daemon.auth import tls
from daemon.gateway import listener, wire
from daemon.gateway.journal import ConversationJournal, JournalCursor, RecordedAnswer
from daemon.gateway.upstream import GatewayConfig
from sandbox.errors import Conflict, Invalid, NotFound, TooMany
from sandbox.messages import ExecResult, SideRule

CHAT = wire.find("POST", "/v1/chat/completions")
COMPLETIONS = wire.find("POST", "/v1/completions")
RESPONSES = wire.find("POST", "/v1/responses")
MESSAGES = wire.find("POST", "/v1/messages")
COUNT = wire.find("POST", "/v1/messages/count_tokens")
MODELS = wire.find("GET", "/v1/models")
HELLO = [{"role": "user", "content": "hello"}]
TITLES = SideRule(model="*-mini", max_tokens=512)


@pytest.mark.parametrize(
    ("route", "body", "side", "main"),
    [
        (CHAT, {"messages": HELLO}, (), True),
        (CHAT, {"messages": HELLO, "max_tokens": 2}, (), True),
        (CHAT, {"messages": HELLO, "max_tokens": 1}, (), False),
        (CHAT, {"messages": HELLO, "max_completion_tokens": 1, "max_tokens": 9}, (), False),
        (CHAT, {"messages": HELLO, "max_tokens": "1"}, (), True),  # nonsense is the upstream's to refuse
        (COMPLETIONS, {"prompt": "hello", "max_tokens": 0}, (), False),
        (COMPLETIONS, {"prompt": "hello"}, (), True),
        (RESPONSES, {"input": "hello"}, (), True),
        (RESPONSES, {"input": "hello", "max_output_tokens": 1}, (), False),
        (RESPONSES, {"input": "hello", "max_tokens": 1}, (), True),  # not a field of this route
        (MESSAGES, {"messages": HELLO, "max_tokens": 1024}, (), True),
        (MESSAGES, {"messages": HELLO, "max_tokens": 1}, (), False),
        (COUNT, {"messages": HELLO}, (), False),
        (MODELS, {}, (), False),
        (CHAT, {"messages": HELLO, "model": "x-mini", "max_tokens": 512}, (TITLES,), False),
        (CHAT, {"messages": HELLO, "model": "x-mini", "max_tokens": 513}, (TITLES,), True),
        (CHAT, {"messages": HELLO, "model": "x-mini"}, (TITLES,), True),  # no bound: as many as it likes
        (CHAT, {"messages": HELLO, "model": "x-large", "max_tokens": 10}, (TITLES,), True),
        (CHAT, {"messages": HELLO, "model": "m"}, (SideRule(),), True),  # an empty rule is no rule
        (CHAT, {"messages": HELLO}, (SideRule(contains="hell"),), False),
        (CHAT, {"messages": [*HELLO, {"role": "user", "content": "go"}]}, (SideRule(contains="hell"),), True),
        (MESSAGES, {"system": [{"type": "text", "text": "make a title"}], "messages": HELLO, "max_tokens": 99},
         (SideRule(contains="a title"),), False),
        (CHAT, {"messages": [{"role": "system", "content": "make a title"}, *HELLO]},
         (SideRule(contains="a title"),), False),
        (RESPONSES, {"instructions": "make a title", "input": "x"}, (SideRule(contains="a title"),), False),
        (CHAT, {"messages": 7}, (SideRule(contains="x"),), True),
    ],
)  # fmt: skip
def test_which_requests_end_a_turn(
    route: wire.ModelRoute, body: dict[str, Any], side: tuple[SideRule, ...], main: bool
) -> None:
    assert wire.is_main_loop(route, body, side) is main
    assert wire.understand(route, json.dumps(body).encode(), side=side).main is main


OPENCODE = "You are a title generator. You output ONLY a thread title. Nothing else."
CRUSH = "\n\n - you will generate a short title based on the first message a user begins a conversation with"
TOPIC = "Analyze if this message indicates a new conversation topic. If it does, extract a title."


@pytest.mark.parametrize(
    ("route", "body", "main"),
    [
        (MESSAGES, {"system": [{"type": "text", "text": "You are Claude Code."}, {"type": "text", "text": TOPIC}],
                    "messages": HELLO, "max_tokens": 512, "tools": []}, False),
        (MESSAGES, {"system": TOPIC, "messages": HELLO, "tools": [{"name": "bash"}]}, True),
        (MESSAGES, {"system": f"You write agents. They say: {TOPIC}", "messages": HELLO}, True),
        (MESSAGES, {"messages": [{"role": "user", "content": TOPIC}]}, True),  # somebody reads the source of an agent
        (CHAT, {"messages": [{"role": "system", "content": OPENCODE}, *HELLO]}, False),
        (RESPONSES, {"input": [{"role": "developer", "content": [{"type": "input_text", "text": CRUSH}]}]}, False),
        (RESPONSES, {"instructions": wire.SIDE_PROMPTS[-1], "input": "x"}, False),
    ],
)  # fmt: skip
def test_known_requests_beside_the_main_loop(route: wire.ModelRoute, body: dict[str, Any], main: bool) -> None:
    raw = json.dumps(body).encode()
    assert wire.understand(route, raw).main is main
    assert wire.understand(route, raw, recognize_side=False).main


def test_a_rule_looks_at_the_model_that_the_agent_names() -> None:
    body = json.dumps({"model": "x-mini", "messages": HELLO, "max_tokens": 9}).encode()
    requested = wire.understand(CHAT, body, model="pool", side=(TITLES,))
    assert requested.body["model"] == "pool"
    assert not requested.main


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/chat/completions"),
        ("POST", "/v1/models"),
        ("POST", "/v1/sandboxes"),
        ("GET", "/v1/models/../sandboxes"),
        ("GET", "/"),
        ("POST", "/v1/chat/completions/"),
        ("CONNECT", "example.org:443"),
    ],
)
def test_nothing_but_the_models_routes_is_passed_on(method: str, path: str) -> None:
    with pytest.raises(NotFound, match=r"/v1/messages"):
        wire.find(method, path)


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"7", b'"x"', b"\xff\xfe", b'{"a":' * 100_000, b"[" * 1_000_000, b'{"messages": [NaN]}'],
)
def test_hostile_bodies_are_refused(raw: bytes) -> None:
    with pytest.raises(Invalid):
        wire.understand(CHAT, raw)


def test_the_number_of_values_is_bounded_before_they_are_made() -> None:
    many = b'{"messages": [' + b"{}," * wire.MAX_VALUES + b"{}]}"
    with pytest.raises(Invalid, match="values"):
        wire.understand(COUNT, many)
    parts = [{"role": "user", "content": "x"}] * (wire.MAX_PARTS + 1)
    with pytest.raises(Invalid, match="10001 parts"):
        wire.understand(CHAT, json.dumps({"messages": parts}).encode())
    assert len(wire.understand(CHAT, json.dumps({"messages": parts[1:]}).encode()).conversation) == wire.MAX_PARTS
    tokens = wire.understand(COMPLETIONS, json.dumps({"prompt": [*range(100_000)]}).encode())
    assert tokens.conversation == [] and len(tokens.envelope["prompt"]) == 100_000


async def test_the_record_counts_all_that_is_stored(tmp_path: Path) -> None:
    journal = ConversationJournal(tmp_path / "journal")
    place, size, said = JournalCursor(tree="t"), 0, []
    try:
        for turn in range(6):
            said += [{"role": "user", "content": secrets.token_hex(5000)} for _ in range(8)]
            requested = wire.understand(
                MESSAGES, json.dumps({"messages": said, "system": secrets.token_hex(9000)}).encode()
            )
            number, grown = await journal.begin(
                requested, sandbox="s", parent=place.head, checkpoint=None, turn=turn, open_=(), place=place
            )
            assert grown > 8 * 5000 + 9000
            size += grown
            if turn % 2:
                await journal.failed(number, 500)
            else:
                size += await journal.answered(
                    number, RecordedAnswer(200, {"a": "b"}, secrets.token_bytes(20_000)), durable=False
                )
        number, grown = await journal.begin(
            requested, sandbox="s", parent=number, checkpoint=None, turn=9, open_=(), place=place, copied=1
        )
        assert grown > 20_000
        command = await journal.command_begins("s", 0, b"key", "t", b"request" * 100)
        ended = ExecResult(exit_code=0, stdout=secrets.token_bytes(5000), stderr=b"", duration=1.0)
        size += await journal.command_ended(command, ended, "s", place)
        assert size + grown <= await journal.size("s") < size + grown + 1000
    finally:
        await journal.close()


CERTIFIED = 'tls_cert = "/c.pem"\ntls_key = "/k.pem"'


@pytest.mark.parametrize(
    ("text", "refused", "base_url"),
    [
        ("", "", None),
        ('listen = "127.0.0.1:7070"', "", "http://127.0.0.1:7070"),
        ('listen = "[::1]:7070"', "", "http://[::1]:7070"),
        ('listen = "localhost:7070"', "", "http://localhost:7070"),
        ('listen = "0.0.0.0:7070"', "without TLS", None),
        ('listen = "[::]:7070"', "without TLS", None),
        ('listen = "gateway.example:7070"', "without TLS", None),
        (f'listen = "10.0.0.1:7070"\n{CERTIFIED}', "", "https://10.0.0.1:7070"),
        ('listen = "0.0.0.0:7070"\nproxy = "https://gateway.example"', "", "https://gateway.example"),
        ('listen = "0.0.0.0:7070"\nproxy = "http://gateway.example"', "cannot be read", None),
        (f'listen = "0.0.0.0:7070"\nproxy = "https://gateway.example"\n{CERTIFIED}', "exclude", None),
        ('listen = "0.0.0.0:7070"\ntls_cert = "/c.pem"', "needs its key", None),
        (CERTIFIED, "nowhere", None),
        ('listen = "127.0.0.1"', "HOST:PORT", None),
    ],
)
def test_agents_outside_are_not_served_in_the_clear(
    tmp_path: Path, text: str, refused: str, base_url: str | None
) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(text)
    if refused:
        with pytest.raises(Invalid, match=refused):
            GatewayConfig.load(file)
    else:
        assert GatewayConfig.load(file).base_url() == base_url


async def test_a_listener_speaks_tls_and_waits_for_no_handshake(tmp_path: Path) -> None:
    async def handler(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text="here")

    certificate, key = tls.self_signed(tmp_path, "127.0.0.1")
    sock = listener.socket_outside("127.0.0.1", 0)
    port = sock.getsockname()[1]
    serving = listener.GatewayListener(sock, handler, paced=False, tls=tls.context(certificate, key))
    silent, talker = socket.create_connection(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port))
    try:
        talker.sendall(b"GET / HTTP/1.1\r\n\r\n")
        trusted = ssl.create_default_context(cafile=str(certificate))
        async with aiohttp.ClientSession() as session:
            async with session.get(f"https://127.0.0.1:{port}/", ssl=trusted) as answer:
                assert await answer.text() == "here"
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"http://127.0.0.1:{port}/")
    finally:
        silent.close()
        talker.close()
        await serving.close()


def test_the_key_is_of_the_question_not_of_its_form() -> None:
    def key(route: wire.ModelRoute = CHAT, **fields: Any) -> bytes:
        return wire.understand(route, json.dumps({"model": "m", "messages": HELLO, **fields}).encode()).key

    same = key()
    assert key(user="somebody", metadata={"session": 1}) == same
    reordered = b'{"messages": [{"content": "hello", "role": "user"}], "model": "m"}'
    assert wire.understand(CHAT, reordered).key == same
    assert len({same, key(stream=True), key(temperature=1), key(MESSAGES), key(model="n"), key(seed=None)}) == 6
    assert wire.understand(CHAT, reordered, model="m").key == same


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=20,
    )
)
def test_any_json_is_understood_or_refused(value: Any) -> None:
    raw = json.dumps(value).encode()
    for route in (CHAT, COMPLETIONS, RESPONSES, MESSAGES, COUNT):
        try:
            requested = wire.understand(route, raw, side=(TITLES, SideRule(contains="x")))
        except Invalid:
            assert not isinstance(value, dict)
            continue
        again = wire.understand(route, wire.canonical(requested.body))
        assert isinstance(requested.main, bool)
        if not wire.VOLATILE & value.keys():
            assert again.key == requested.key


def test_secrets_of_the_sandbox_do_not_travel() -> None:
    headers = {
        "Authorization": "Bearer stolen",
        "X-Api-Key": "stolen",
        "Cookie": "stolen",
        "Proxy-Authorization": "stolen",
        "X-Forwarded-For": "1.2.3.4",
        "Host": "metadata",
        "OpenAI-Organization": "other",
        "anthropic-version": "2023-06-01",
        "Accept": "text/event-stream",
    }
    assert wire.forwarded(headers) == (("anthropic-version", "2023-06-01"), ("accept", "text/event-stream"))
    answer = {
        "Set-Cookie": "a=b",
        "Content-Type": "application/json",
        "Retry-After": "3",
        "Server": "x",
        "request-id": "1",
    }
    assert wire.reported(answer) == {"content-type": "application/json", "retry-after": "3", "request-id": "1"}
    assert wire.credential(wire.ApiFamily.OPENAI, "k") == {"authorization": "Bearer k"}
    assert wire.credential(wire.ApiFamily.ANTHROPIC, "k") == {"x-api-key": "k"}


def test_each_line_of_a_header_travels_in_order() -> None:
    lines = [("Anthropic-Beta", "a"), ("anthropic-beta", "b,c"), ("Accept", "x"), ("ANTHROPIC-BETA", "d" * 5000)]
    sent = tuple((name.lower(), value) for name, value in lines)
    assert wire.forwarded(CIMultiDict(lines)) == sent
    reported = CIMultiDict([("OpenAI-Processing-Ms", "1"), ("openai-processing-ms", "2"), ("Location", "/x")])
    assert wire.reported(reported) == {"openai-processing-ms": "1, 2", "location": "/x"}


@pytest.mark.parametrize(
    "lines",
    [
        [("anthropic-beta", "x" * (wire.MAX_HEADER + 1))],
        [("anthropic-beta", "x" * wire.MAX_HEADER), ("anthropic-beta", "x")],
        [("anthropic-beta", "x")] * (wire.MAX_HEADER_LINES + 1),
        [("anthropic-beta", "tools\nHost: evil")],
        [("accept", "\udc80")],
    ],
)
def test_a_header_that_cannot_travel_is_refused(lines: list[tuple[str, str]]) -> None:
    with pytest.raises(Invalid, match="header"):
        wire.forwarded(CIMultiDict(lines))


@pytest.mark.parametrize(
    ("location", "observed"),
    [
        ("http://up:80/v1/x?y=z", "/v1/x?y=z"),
        ("/v1/x", "/v1/x"),
        ("http://up:8080/v1/x", "http://up:8080/v1/x"),
        ("https://elsewhere/v1/x", "https://elsewhere/v1/x"),
        ("http://up:80//evil/x", "http://up:80//evil/x"),
    ],
)
def test_redirects_at_the_upstream_lead_through_the_gateway(location: str, observed: str) -> None:
    assert wire.location_inside(location, "http://up:80/v1") == observed
    assert wire.location_inside(location, "http://up:80/") == observed


@pytest.mark.parametrize(
    "raw",
    [
        rb'{"messages": "\udc80"}',
        rb'{"messages": "\ud83d"}',
        rb'{"messages": "\ud83d and more"}',
        rb'{"messages": "\ud83d\ud83d\ude00"}',
        b'{"messages": "\xed\xb2\x80"}',
    ],
)
def test_a_lone_surrogate_is_called_what_it_is(raw: bytes) -> None:
    with pytest.raises(Invalid, match="lone surrogate"):
        wire.understand(CHAT, raw)


def test_a_pair_of_surrogates_is_a_character() -> None:
    body = wire.understand(CHAT, rb'{"messages": "\ud83d\ude00 \\udc80"}').body
    assert body == {"messages": "\U0001f600 \\udc80"}


@pytest.mark.parametrize(
    ("method", "path", "family"),
    [
        ("HEAD", "/", wire.ApiFamily.ANTHROPIC),
        ("GET", "/api/hello", wire.ApiFamily.ANTHROPIC),
        ("POST", "/api/event_logging/batch", wire.ApiFamily.ANTHROPIC),
        ("POST", "/v1/messages/count_tokens", wire.ApiFamily.ANTHROPIC),
        ("POST", "/v1/responses/input_tokens", wire.ApiFamily.OPENAI),
    ],
)
def test_what_agents_ask_beside_their_model(method: str, path: str, family: wire.ApiFamily) -> None:
    route = wire.find(method, path)
    requested = wire.understand(route, b"{}")
    assert (route.family, requested.kind, route.has_body) == (family, "other", method == "POST")


def test_a_compaction_ends_a_turn() -> None:
    assert wire.understand(wire.find("POST", "/v1/responses/compact"), b'{"input": []}').main


def test_the_models_of_anthropic_are_asked_for_with_its_key() -> None:
    for path in ("/v1/models", "/v1/models/x"):
        assert wire.find("GET", path, {"anthropic-version": "2023-06-01"}).family is wire.ApiFamily.ANTHROPIC
        assert wire.find("GET", path).family is wire.ApiFamily.OPENAI


def test_our_errors_have_the_form_of_the_protocol() -> None:
    openai = json.loads(wire.error_body(wire.family_of("/v1/responses"), Conflict("no", hint="do")))
    assert openai["error"]["code"] == "conflict"
    assert openai["error"]["message"] == "pagurus: no (do)"
    anthropic = json.loads(wire.error_body(wire.family_of("/v1/messages"), TooMany("no")))
    assert anthropic == {"type": "error", "error": {"type": "rate_limit_error", "message": "pagurus: no"}}


@pytest.mark.parametrize(("header", "retry"), [(None, False), ("0", False), ("1", True), ("x", False), ("²", False)])
def test_clients_say_that_they_ask_again(header: str | None, retry: bool) -> None:
    headers = {} if header is None else {"x-stainless-retry-count": header}
    assert wire.understand(CHAT, b'{"messages": []}', headers=headers).retry is retry


@pytest.mark.parametrize("path", ["/v1/models/a\n", "/v1/models/a\nHost: b", "/v1/models/a?b", "/v1/models/../a"])
def test_no_model_has_such_a_name(path: str) -> None:
    with pytest.raises(NotFound):
        wire.find("GET", path)


GEMINI = "/v1beta/models/gemini-2.5-flash:streamGenerateContent"


def test_gemini_names_its_model_and_streams_by_the_path() -> None:
    body = json.dumps({"contents": [{"role": "user", "parts": [{"text": "hello"}]}]}).encode()
    route = wire.find("POST", GEMINI)
    requested = wire.understand(route, body, query="alt=sse&key=the-agents-own", model="other")
    assert requested.stream and requested.main and len(requested.conversation) == 1
    assert requested.path == "/v1beta/models/other:streamGenerateContent?alt=sse"
    assert "model" not in requested.body
    assert not wire.understand(wire.find("POST", GEMINI.replace("streamG", "g")), body).stream
    counted = wire.understand(wire.find("POST", GEMINI.replace("streamGenerateContent", "countTokens")), body)
    assert counted.kind == "other"
    ping = json.dumps({"contents": [], "generationConfig": {"maxOutputTokens": 1}}).encode()
    assert not wire.understand(route, ping).main
    title = {"contents": [], "systemInstruction": {"parts": [{"text": "Generate a concise, sentence-case title"}]}}
    assert not wire.understand(route, json.dumps(title).encode()).main
    assert wire.credential(route.family, "k") == {"x-goog-api-key": "k"}
    refused = json.loads(wire.error_body(wire.family_of(GEMINI), TooMany("wait")))
    assert refused["error"]["code"] == 429 and refused["error"]["status"] == "RESOURCE_EXHAUSTED"
    for path in ("/v1beta/models/a/b:generateContent", "/v1beta/models/..:generateContent", "/v1beta/files/x"):
        with pytest.raises(NotFound):
            wire.find("POST", path)
    with pytest.raises(NotFound):
        wire.find("POST", "/v1beta/models/x:predict")
