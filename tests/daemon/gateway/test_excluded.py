"""An agent that lives in its sandbox and is no part of its checkpoints: killed, restored, started again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from sandbox import Client, Sandbox
from sandbox.messages import Gateway, Verdict
from sandbox.messages import Upstream as Address
from sandbox.sdk.processes import Process
from tests.support.daemon_host import ASLEEP, IMAGE, kill_everything, tasks_of, until
from tests.support.gateway_upstream import Upstream, chat

NONE, FILES, PROCESSES, BOTH = Verdict.NONE, Verdict.FILES, Verdict.PROCESSES, Verdict.BOTH
COMMANDS = [
    "cat /etc/passwd",
    "echo one >> /work",
    f"sleep 1000 > /dev/null 2>&1 & {ASLEEP}",
    "cat /work",
    "echo two >> /work",
    "pgrep -c sleep >> /work",
]
# With `--session` it keeps its conversation in a file, and goes on from there when it is started again.
AGENT = r"""
import json, os, subprocess, sys, threading, time, urllib.error, urllib.request

session = sys.argv[2] if sys.argv[1:2] == ["--session"] else ""
said = json.load(open(session)) if session and os.path.exists(session) else [{"role": "user", "content": "begin"}]
threading.Thread(target=threading.Event().wait, daemon=True).start()

def ask():
    while True:
        try:
            data = json.dumps({"model": "any", "messages": said}).encode()
            headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
            request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", data, headers)
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)["choices"][0]["message"]["content"]
        except (OSError, ValueError, EOFError):
            time.sleep(0.05)

while command := ask():
    print(command, flush=True)
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    said += [{"role": "assistant", "content": command}, {"role": "user", "content": done.stdout}]
    if session:
        with open(session + ".new", "w") as file:
            json.dump(said, file)
        os.replace(session + ".new", session)
"""


def reply(body: dict[str, Any]) -> dict[str, Any]:
    """The next command of the task, by how far the conversation has come."""
    step = sum(message["role"] == "assistant" for message in body["messages"])
    return chat(COMMANDS[step] if step < len(COMMANDS) else "")


@pytest.fixture
async def upstream(host: Client) -> AsyncIterator[Upstream]:
    async with Upstream(reply) as upstream:
        await host.gateway.put("scripted", Address(url=upstream.url))
        yield upstream


@pytest.fixture
async def inside(host: Client, upstream: Upstream) -> AsyncIterator[Sandbox]:
    async with host.create(IMAGE, gateway=Gateway(upstream="scripted")) as sandbox:
        await sandbox.files.write("/agent.py", AGENT)
        yield sandbox


async def start(sandbox: Sandbox, *options: str) -> Process:
    return await sandbox.processes.start(["python3", "/agent.py", *options], excluded=True)


async def killed_at(sandbox: Sandbox, upstream: Upstream, requests: int) -> str:
    """Everything in it dies while the model thinks about this request, whose checkpoint is returned."""
    await until(lambda: len(upstream.requested) == requests - 1, "the request before")
    upstream.gate.clear()
    await until(lambda: len(upstream.requested) == requests, "the request")
    head = await until(lambda: _requested(sandbox, requests), "its turn")
    await sandbox.captured(head)
    kill_everything(sandbox.id)
    await until(lambda: not tasks_of(sandbox.id), "all of it is dead")
    upstream.gate.set()
    return str(head)


async def _requested(sandbox: Sandbox, requests: int) -> str | None:
    turns = [turn for turn in await sandbox.turns() if turn.command.startswith("POST")]
    return turns[-1].checkpoint if len(turns) == requests else None


async def verdicts(sandbox: Sandbox) -> list[Verdict]:
    return [turn.verdict for turn in await sandbox.turns() if turn.command.startswith("POST")]


async def test_turns_that_only_read_make_no_checkpoint(inside: Sandbox) -> None:
    agent = await start(inside)
    assert await agent.wait() == 0
    assert await verdicts(inside) == [NONE, NONE, FILES, PROCESSES, NONE, FILES, FILES]
    assert await inside.files.read("/work") == b"one\ntwo\n1\n"


async def test_restored_and_started_again_it_goes_on_from_its_session(inside: Sandbox, upstream: Upstream) -> None:
    await start(inside, "--session", "/session.json")
    head = await killed_at(inside, upstream, 5)
    assert (await inside.restore(head, verify=True)).verified
    assert await inside.processes.list() == []
    running = await inside.exec("pgrep -c sleep; pgrep -c python3", ends_turn=False)
    assert running.text == "1\n0\n"  # what it had started is there, it is not
    again = await start(inside, "--session", "/session.json")
    assert await again.wait() == 0
    assert (await again.logs()).stdout.decode().splitlines() == COMMANDS[4:]
    assert await inside.files.read("/work") == b"one\ntwo\n1\n"
    assert len(upstream.requested) == len(COMMANDS) + 1  # nothing was asked twice
    assert {verdict for verdict in await verdicts(inside) if verdict.processes} == {BOTH}  # where `sleep` was started


async def test_without_a_session_it_is_told_the_record(inside: Sandbox, upstream: Upstream) -> None:
    before = await inside.checkpoint("before it")
    await start(inside)
    head = await killed_at(inside, upstream, 5)
    await inside.restore(before)
    assert await inside.gateway.replay(head) == 5
    again = await start(inside)
    assert await again.wait() == 0
    assert (await again.logs()).stdout.decode().splitlines() == COMMANDS  # its commands took effect again
    assert await inside.files.read("/work") == b"one\ntwo\n1\n"
    assert len(upstream.requested) == len(COMMANDS) + 1


async def test_a_fork_goes_on_with_an_agent_of_its_own(host: Client, inside: Sandbox, upstream: Upstream) -> None:
    agent = await start(inside, "--session", "/session.json")
    assert await agent.wait() == 0
    turns = [turn for turn in await inside.turns() if turn.command.startswith("POST")]
    assert turns[4].checkpoint is not None
    (fork,) = await host.fork(turns[4].checkpoint, 1)
    try:
        assert await fork.sandbox.processes.list() == []
        again = await start(fork.sandbox, "--session", "/session.json")
        assert await again.wait() == 0
        assert await fork.sandbox.files.read("/work") == b"one\ntwo\n1\n"
    finally:
        await fork.sandbox.remove()
