"""Agents and clients from PyPI, unmodified, behind the gateway. `make setup-agents` brings them.

mini-swe-agent repairs a small program. Everything is killed in the middle of it and restored, and it ends as if nothing
had happened: once with the agent inside the sandbox, once with the agent outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from sandbox import Client, Limits, Sandbox, paths
from sandbox.messages import Gateway
from sandbox.messages import Upstream as Address
from tests.support.daemon_host import Daemon, free_port, kill_everything, missing, tasks_of, until
from tests.support.gateway_upstream import Upstream, chat
from tests.support.programs import Program

AGENTS = paths.prefix() / "agents"
DOCKER = Path(__file__).resolve().parents[3] / "examples" / "unmodified_agent" / "docker"
IMAGE = "agents"
TIMEOUT = 500.0  # seconds; importing the agent takes many on a busy machine

COMMANDS = [
    "cat calc.py; echo looked >> log",
    "sed -i 's/a - b/a + b/' calc.py; echo repaired >> log",
    "python3 check.py && echo checked >> log",
    "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
]
FILES = {
    "calc.py": "def add(a, b):\n    return a - b\n",
    "check.py": "from calc import add\nassert add(2, 3) == 5\nprint('good')\n",
}
SETTINGS = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no look-up of prices over the network
}
MINI = ["-y", "--exit-immediately", "-t", "add() is wrong", "-m", "openai/scripted", "-o"]


@pytest.fixture(scope="module")
def agents() -> Path:
    if reason := missing():
        pytest.skip(reason)
    if not (AGENTS / "fingerprint").exists():
        pytest.skip(f"no agents in {AGENTS}; run `make setup-agents`")
    return AGENTS


@pytest.fixture(scope="module")
def daemon(agents: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    config = tmp_path_factory.mktemp("config") / "gateway.toml"
    config.write_text(f'listen = "127.0.0.1:{free_port()}"\n')
    daemon = Daemon(tmp_path_factory.mktemp("host"))
    (daemon.state / "images" / IMAGE).symlink_to((agents / "images" / "agents").resolve())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGURUS_GATEWAY_CONFIG", str(config))
        try:
            yield daemon.start()
        finally:
            daemon.clean()


@pytest.fixture
async def upstream(host: Client) -> AsyncIterator[Upstream]:
    """The model: it says the next command, by how often it has spoken in the conversation."""

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        spoken = sum(message["role"] == "assistant" for message in body["messages"])
        return chat(f"step {spoken}", command=COMMANDS[min(spoken, len(COMMANDS) - 1)], number=spoken)

    async with Upstream(reply) as upstream:
        await host.gateway.put("scripted", Address(url=upstream.url))
        yield upstream


async def workshop(host: Client, gateway: Gateway) -> Sandbox:
    """A sandbox with the broken program in /srv."""
    sandbox = await host.create(IMAGE, limits=Limits(memory="2GiB"), gateway=gateway)
    for name, content in FILES.items():
        await sandbox.files.write(f"/srv/{name}", content)
    return sandbox


async def repaired(sandbox: Sandbox) -> None:
    """The result is right, and each command took effect once."""
    assert await sandbox.files.read("/srv/calc.py") == b"def add(a, b):\n    return a + b\n"
    assert await sandbox.files.read("/srv/log") == b"looked\nrepaired\nchecked\n"


def conversation(trajectory: bytes) -> list[tuple[str, Any]]:
    """What was said, without times and identities of the run."""
    reported = json.loads(trajectory)
    assert reported["info"]["exit_status"] == "Submitted"
    return [(message["role"], message["content"]) for message in reported["messages"]]


# --------------------------------------------------------------------------- inside


async def start_inside(sandbox: Sandbox) -> None:
    settings = {**SETTINGS, "PYTHONPATH": "/opt/agents", "PYTHONDONTWRITEBYTECODE": "1"}
    program = " ".join(["python3", "-m", "minisweagent.run.mini", *(f"'{word}'" for word in MINI), "/out.json"])
    command = f"(setsid sh -c '{{ {program.replace(chr(39), chr(34))}; }} </dev/null >/said 2>&1; echo $? >/done') &"
    await sandbox.exec(command, env=settings, cwd="/srv", ends_turn=False)


async def end_inside(sandbox: Sandbox) -> list[tuple[str, Any]]:
    async def ended() -> bool:
        with contextlib.suppress(Exception):
            return bool(await sandbox.files.read("/done"))
        return False

    await until(ended, "mini-swe-agent ends", TIMEOUT)
    said = (await sandbox.files.read("/said")).decode()
    assert await sandbox.files.read("/done") == b"0\n", said[-3000:]
    return conversation(await sandbox.files.read("/out.json"))


EXPECTED: list[tuple[str, Any]] = []


async def undisturbed(host: Client, upstream: Upstream) -> list[tuple[str, Any]]:
    """What is said when nobody is killed. The same inside and outside, so it is found out once."""
    if not EXPECTED:
        async with await workshop(host, Gateway(upstream="scripted")) as calm:
            await start_inside(calm)
            EXPECTED.extend(await end_inside(calm))
            await repaired(calm)
        assert len(upstream.requested) == len(COMMANDS)
    return EXPECTED


async def test_mini_swe_agent_inside_is_killed_restored_and_ends_the_same(host: Client, upstream: Upstream) -> None:
    gateway = Gateway(upstream="scripted")
    expected = await undisturbed(host, upstream)
    async with await workshop(host, gateway) as sandbox:
        already = len(upstream.requested)
        upstream.holds = already + 3
        await start_inside(sandbox)
        await until(lambda: len(upstream.requested) == already + 3, "it has repaired and asks again", TIMEOUT)
        turn = await until(lambda: _turn(sandbox, 3), "that ended a turn")
        await sandbox.captured(turn)
        kill_everything(sandbox.id)
        await until(lambda: not tasks_of(sandbox.id), "all of it is dead")
        upstream.gate.set()  # the answer comes while nobody is there
        await until(lambda: _recorded(sandbox, 3), "it is recorded")
        await sandbox.restore()
        assert await end_inside(sandbox) == expected
        await repaired(sandbox)
        assert len(upstream.requested) == already + len(COMMANDS)  # the model was asked nothing twice
        third = (await sandbox.gateway.exchanges())[2]
        assert (third.requested, third.answered, third.from_record) == (1, 1, 1)


# --------------------------------------------------------------------------- outside


class Mini:
    """mini-swe-agent in its own environment on the host, whose commands run in a sandbox."""

    def __init__(self, agents: Path, daemon: Daemon, sandbox: Sandbox, place: Path, base: str, token: str) -> None:
        self.out = place / "out.json"
        self.said = place / "said"
        environment = {
            **{name: value for name, value in os.environ.items() if name in ("PATH", "LANG")},
            **SETTINGS,
            "HOME": str(place),
            "OPENAI_BASE_URL": f"{base}/v1",
            "OPENAI_API_BASE": f"{base}/v1",
            "OPENAI_API_KEY": token,
            "PAGURUS_PYTHON": sys.executable,
            "PAGURUS_HOST": str(daemon.socket),
            "PAGURUS_SANDBOX": sandbox.id,
        }
        settings = {"image": "any", "executable": DOCKER, "cwd": "/srv", "timeout": int(TIMEOUT)}
        options = [word for name, value in settings.items() for word in ("-c", f"environment.{name}={value}")]
        program = [str(agents / "venv/bin/mini"), *MINI, str(self.out), "--environment-class", "docker"]
        with self.said.open("wb") as said:
            self.process = Program(
                [*program, "-c", "mini.yaml", *options],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )

    async def end(self) -> list[tuple[str, Any]]:
        await until(lambda: self.process.poll() is not None, "mini-swe-agent ends", TIMEOUT)
        assert self.process.returncode == 0, self.said.read_text()[-3000:]
        return conversation(self.out.read_bytes())

    def kill(self) -> None:
        self.process.destroy()


@contextlib.asynccontextmanager
async def mini(agents: Path, daemon: Daemon, sandbox: Sandbox, place: Path) -> AsyncIterator[Mini]:
    await asyncio.to_thread(place.mkdir)
    token = await sandbox.gateway.token()
    assert token.base_url is not None
    agent = Mini(agents, daemon, sandbox, place, token.base_url, token.token)
    try:
        yield agent
    finally:
        agent.kill()


async def test_mini_swe_agent_outside_is_killed_restored_and_ends_the_same(
    host: Client, daemon: Daemon, upstream: Upstream, agents: Path, tmp_path: Path
) -> None:
    gateway = Gateway(upstream="scripted", agent="outside")
    expected = await undisturbed(host, upstream)
    async with await workshop(host, gateway) as sandbox:
        already = len(upstream.requested)
        upstream.holds = already + 3
        async with mini(agents, daemon, sandbox, tmp_path / "first") as agent:
            await until(lambda: len(upstream.requested) == already + 3, "it has repaired and asks again", TIMEOUT)
            agent.kill()
        kill_everything(sandbox.id)
        upstream.gate.set()
        await until(lambda: _recorded(sandbox, 3), "the answer is recorded")
        async with mini(agents, daemon, sandbox, tmp_path / "second") as agent:  # it starts over
            await sandbox.restore()
            assert await agent.end() == expected
        await repaired(sandbox)
        assert len(upstream.requested) == already + len(COMMANDS)


# --------------------------------------------------------------------------- clients

CLIENTS = r"""
import anthropic, openai

client = openai.OpenAI()
said = [{"role": "user", "content": "hello"}]
print(client.chat.completions.create(model="m", messages=said).choices[0].message.content)
parts = client.chat.completions.create(model="m", messages=said, stream=True)
print("".join(part.choices[0].delta.content or "" for part in parts))
print(client.responses.create(model="m", input="hello").output_text)
print([model.id for model in client.models.list()])
client = anthropic.Anthropic()
print(client.messages.count_tokens(model="m", messages=said).input_tokens)
print(client.messages.create(model="m", max_tokens=9, messages=said).content[0].text)
with client.messages.stream(model="m", max_tokens=9, messages=said) as stream:
    print("".join(stream.text_stream))
"""


async def test_the_clients_of_openai_and_anthropic_stream_through_the_gateway(host: Client, upstream: Upstream) -> None:
    upstream.reply = _speak
    async with host.create(IMAGE, limits=Limits(memory="2GiB"), gateway=Gateway(upstream="scripted")) as sandbox:
        result = await sandbox.exec(
            ["python3", "-c", CLIENTS],
            env={"PYTHONPATH": "/opt/agents", "PYTHONDONTWRITEBYTECODE": "1"},
            timeout=TIMEOUT,
            ends_turn=False,
        )
        assert result.exit_code == 0, result.stderr.decode()[-3000:]
        spoken = "well met, crab"
        assert result.text.splitlines() == [spoken, spoken, spoken, "['scripted']", "3", spoken, spoken]
        exchanges = await sandbox.gateway.exchanges()
        assert [item.path for item in exchanges] == [
            "/v1/chat/completions",
            "/v1/chat/completions",
            "/v1/responses",
            "/v1/messages",
            "/v1/messages",
        ]
        assert len(await sandbox.turns()) == 5


def _speak(body: dict[str, Any]) -> Any:
    """The scripted model in each of the protocols."""
    text = "well met, crab"
    if "input" in body:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        message = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": content}
        return {
            "id": "r", "object": "response", "created_at": 1, "model": "m", "status": "completed", "output": [message],
            "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
        }  # fmt: skip
    if "max_tokens" in body:
        return _anthropic(text, stream=body.get("stream") is True)
    if body["messages"] and not body.get("stream") and "stream" not in body and set(body) == {"model", "messages"}:
        return _either(text)
    return chat(text)


def _either(text: str) -> Any:
    """The routes that count tokens and that chat take the same body."""

    async def answer(_: Upstream, request: web.Request) -> web.Response:
        if request.path.endswith("count_tokens"):
            return web.json_response({"input_tokens": 3})
        return web.json_response(chat(text))

    return answer


def _anthropic(text: str, *, stream: bool) -> Any:
    message = {
        "id": "m", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn",
        "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1},
    }  # fmt: skip
    if not stream:
        return {**message, "content": [{"type": "text", "text": text}]}
    events = [
        {"type": "message_start", "message": {**message, "content": [], "stop_reason": None}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": x}} for x in text),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}},
        {"type": "message_stop"},
    ]

    async def answer(_: Upstream, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
            await asyncio.sleep(0)
        await response.write_eof()
        return response

    return answer


async def _turn(sandbox: Sandbox, number: int) -> str | None:
    turns = await sandbox.turns()
    return turns[number - 1].checkpoint if len(turns) >= number else None


async def _recorded(sandbox: Sandbox, count: int) -> bool:
    return [item.state for item in await sandbox.gateway.exchanges()] == ["answered"] * count
