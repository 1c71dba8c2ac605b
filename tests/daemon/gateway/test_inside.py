"""An agent inside its sandbox: real sockets in its network namespace, real checkpoints, a scripted model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
import sys
from pathlib import Path

import pytest

from sandbox import Client, PagurusError, Sandbox
from sandbox.messages import CheckpointState, Gateway, SandboxState, SideRule
from sandbox.messages import Upstream as Address
from tests.support.daemon_host import IMAGE, Daemon, kill_everything, tasks_of, until
from tests.support.gateway_agent import done, start
from tests.support.gateway_upstream import Upstream

GATEWAY = Gateway(upstream="scripted")


def texts(entries: list[dict[str, object]]) -> list[object]:
    return [entry["text"] for entry in entries]


async def test_a_request_ends_the_turn_and_its_answer_waits_for_the_capture(
    inside: Sandbox, upstream: Upstream
) -> None:
    await start(inside, 3)
    entries = await done(inside)
    assert texts(entries) == ["answer 1", "answer 2", "answer 3"]
    tree = {info.id: info for info in await inside.tree()}
    for entry in entries:
        info = tree[entry["checkpoint"]]
        assert info.captured_at is not None
        assert info.captured_at <= entry["at"]
        assert info.verdict.processes  # the agent itself is part of the state
    assert [turn.command for turn in await inside.turns()] == ["POST /v1/chat/completions"] * 3
    assert [entry["answer"] for entry in entries] == ["upstream"] * 3
    exchanges = await inside.gateway.exchanges()
    assert [(item.state, item.requested, item.answered, item.main) for item in exchanges] == [
        ("answered", 1, 1, True)
    ] * 3
    assert [item.checkpoint for item in exchanges] == [entry["checkpoint"] for entry in entries]
    last = await inside.gateway.exchange(exchanges[2])
    assert json.loads(last.request)["messages"][0] == {"role": "user", "content": "begin"}
    assert json.loads(last.request) == {**upstream.requested[2][1]}
    assert json.loads(last.response)["choices"][0]["message"]["content"] == "answer 3"


async def test_a_durable_answer_waits_for_the_disk(host: Client, upstream: Upstream) -> None:
    gateway = Gateway(upstream="scripted", hold="durable")
    async with host.create(IMAGE, gateway=gateway) as sandbox:
        await start(sandbox, 2)
        entries = await done(sandbox)
        tree = {info.id: info for info in await sandbox.tree()}
        for entry in entries:
            info = tree[entry["checkpoint"]]
            assert info.state is CheckpointState.DURABLE
            assert info.durable_at is not None
            assert info.durable_at <= entry["at"]


async def test_killed_and_restored_the_agent_hears_the_answer_that_was_on_its_way(
    inside: Sandbox, upstream: Upstream
) -> None:
    upstream.holds = 2
    await start(inside, 4)
    await until(lambda: len(upstream.requested) == 2, "the second request")
    checkpoint = await until(lambda: _head(inside), "its checkpoint")
    kill_everything(inside.id)
    upstream.gate.set()  # the answer comes while nobody lives to hear it
    await until(lambda: _answered(inside, 2), "the answer is recorded")
    assert (await inside.restore()).checkpoint == checkpoint
    entries = await done(inside)
    assert texts(entries) == ["answer 1", "answer 2", "answer 3", "answer 4"]
    assert [entry["answer"] for entry in entries] == ["upstream", "record", "upstream", "upstream"]
    assert len(upstream.requested) == 4  # nothing was asked twice


async def test_restored_and_forked_while_the_model_thinks_it_is_asked_once(
    host: Client, inside: Sandbox, upstream: Upstream
) -> None:
    upstream.holds = 2
    await start(inside, 3)
    await until(lambda: len(upstream.requested) == 2, "the second request")
    checkpoint = await until(lambda: _head(inside), "its checkpoint")
    kill_everything(inside.id)
    await until(lambda: not tasks_of(inside.id), "all of it is dead")
    await inside.restore()
    forks = [fork.sandbox for fork in await host.fork(checkpoint, 2)]
    try:
        upstream.gate.set()
        reported = [texts(await done(item)) for item in (inside, *forks)]
    finally:
        for fork in forks:
            await fork.remove()
    assert [item[:2] for item in reported] == [["answer 1", "answer 2"]] * 3
    assert len(upstream.requested) == 5  # the third of each; the second was asked once for all


async def test_an_older_checkpoint_begins_a_branch_of_its_own(inside: Sandbox, upstream: Upstream) -> None:
    await start(inside, 3)
    first = await done(inside)
    await inside.restore(first[1]["checkpoint"])
    entries = await done(inside)
    # The request under way in that state is answered from the record; what came later belongs to the other branch.
    assert texts(entries) == ["answer 1", "answer 2", "answer 4"]
    assert [entry["answer"] for entry in entries] == ["upstream", "record", "upstream"]
    parents = {item.id: item.parent for item in await inside.gateway.exchanges()}
    assert parents == {1: None, 2: 1, 3: 2, 4: 2} or len(set(parents.values())) == 3
    await inside.restore(first[2]["checkpoint"])  # and back again
    assert texts(await done(inside)) == ["answer 1", "answer 2", "answer 3"]
    assert len(upstream.requested) == 4


async def test_forks_go_on_from_the_same_answer(host: Client, inside: Sandbox, upstream: Upstream) -> None:
    await start(inside, 3)
    entries = await done(inside)
    forks = await host.fork(entries[1]["checkpoint"], 2)
    children = [fork.sandbox for fork in forks]
    try:
        last_seen_by = [await done(child) for child in children]
    finally:
        for child in children:
            await child.remove()
    assert [texts(item)[:2] for item in last_seen_by] == [["answer 1", "answer 2"]] * 2
    assert {item[2]["text"] for item in last_seen_by} == {"answer 4", "answer 5"}  # each asked for itself
    assert len(upstream.requested) == 5


async def test_the_record_is_acted_again_in_a_fresh_sandbox(host: Client, inside: Sandbox, upstream: Upstream) -> None:
    await start(inside, 3)
    entries = await done(inside)
    async with host.create(IMAGE, gateway=GATEWAY) as other:
        assert await other.gateway.replay(entries[1]["checkpoint"]) == 2
        await start(other, 3)
        again = await done(other)
    assert texts(again) == ["answer 1", "answer 2", "answer 4"]
    assert [entry["answer"] for entry in again] == ["record", "record", "upstream"]
    assert [entry["turn"] for entry in again] == ["1", "2", "3"]  # its commands took effect, turn by turn


async def test_an_agent_that_asks_the_same_again_wants_another_sample(inside: Sandbox, upstream: Upstream) -> None:
    for expected in ("answer 1", "answer 2"):
        assert await _once(inside) == expected
    assert await _once(inside, headers={"x-stainless-retry-count": "1"}) == "answer 2"  # unless it says that it retries
    assert len(upstream.requested) == 2


async def test_what_is_beside_the_main_loop_makes_no_turn(host: Client, upstream: Upstream) -> None:
    gateway = Gateway(upstream="scripted", model="real", side=(SideRule(model="*-mini"),))
    async with host.create(IMAGE, gateway=gateway) as sandbox:
        await _request(sandbox, "/v1/models")
        await _request(sandbox, "/v1/messages/count_tokens", {"messages": []})
        await _request(sandbox, "/v1/chat/completions", {"messages": [], "max_tokens": 1})
        await _request(sandbox, "/v1/chat/completions", {"messages": [], "model": "x-mini"})
        assert await sandbox.turns() == []
        await _request(sandbox, "/v1/chat/completions", {"messages": [], "model": "x"})
        assert len(await sandbox.turns()) == 1
        assert {body["model"] for path, body in upstream.requested if path != "/v1/models"} == {"real"}


async def test_the_keys_stay_with_the_host(host: Client, upstream: Upstream, daemon: Daemon, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sk-of-the-host\n")
    await host.gateway.put("keyed", Address(url=upstream.url + "/v1/", key_file=str(key), headers={"X-Team": "crabs"}))
    assert next(item for item in await host.gateway.upstreams() if item.name == "keyed").headers == ["X-Team"]
    async with host.create(IMAGE, gateway=Gateway(upstream="keyed")) as sandbox:
        result = await sandbox.exec("env; cat /proc/1/environ", ends_turn=False)
        assert "OPENAI_BASE_URL=http://127.0.0.1:7000/v1" in result.text
        assert "ANTHROPIC_BASE_URL=http://127.0.0.1:7000" in result.text
        assert "sk-of-the-host" not in result.text
        await _request(
            sandbox, "/v1/chat/completions", {"messages": []}, headers={"Authorization": "Bearer sk-of-the-agent"}
        )
        await _request(
            sandbox, "/v1/messages", {"messages": []}, headers={"X-Api-Key": "sk-of-the-agent", "Cookie": "a=b"}
        )
        assert upstream.headers[0]["authorization"] == "Bearer sk-of-the-host"
        assert upstream.headers[1]["x-api-key"] == "sk-of-the-host"
        assert upstream.headers[0]["x-team"] == "crabs"
        assert "sk-of-the-agent" not in str(upstream.headers)
        assert "cookie" not in upstream.headers[1]
        key.unlink()
        status, answer = await _request(sandbox, "/v1/chat/completions", {"messages": [1]})
        assert status == 500
        assert "keyed" in answer
    assert "sk-of-the-host" not in daemon.log.read_text()
    for name in ("gateway.sqlite", "gateway.sqlite-wal"):
        assert b"sk-of-the-host" not in (daemon.state / name).read_bytes()
    await host.gateway.drop("keyed")


async def test_errors_of_the_upstream_are_passed_on_and_asked_again(inside: Sandbox, upstream: Upstream) -> None:
    upstream.status = 429
    status, answer = await _request(inside, "/v1/chat/completions", {"messages": []})
    assert (status, json.loads(answer)) == (429, {"error": {"message": "no"}})
    upstream.status = 200
    assert (await _request(inside, "/v1/chat/completions", {"messages": []}))[0] == 200
    (exchange,) = await inside.gateway.exchanges()
    assert (exchange.requested, exchange.answered) == (2, 1)
    assert len(await inside.turns()) == 1  # it is one turn


async def test_an_upstream_that_is_not_there_is_an_error_in_the_agents_words(host: Client) -> None:
    await host.gateway.put("nowhere", Address(url="http://127.0.0.1:1"))
    async with host.create(IMAGE, gateway=Gateway(upstream="nowhere")) as sandbox:
        status, answer = await _request(sandbox, "/v1/messages", {"messages": []})
        assert status == 502
        assert json.loads(answer)["error"]["type"] == "api_error"
        with pytest.raises(PagurusError, match="is used by 1"):
            await host.gateway.drop("nowhere")
    with pytest.raises(PagurusError, match="known are"):
        await host.create(IMAGE, gateway=Gateway(upstream="unheard-of"))


async def test_streams_are_passed_through_and_recorded(inside: Sandbox, upstream: Upstream) -> None:
    body = {"messages": [], "stream": True}
    status, answer = await _request(inside, "/v1/chat/completions", body)
    assert status == 200
    assert answer.endswith("data: [DONE]\n\n")
    (exchange,) = await inside.gateway.exchanges()
    assert (await inside.gateway.exchange(exchange)).response.decode() == answer
    again = await _request(inside, "/v1/chat/completions", body, headers={"x-stainless-retry-count": "1"})
    assert again == (200, answer)
    assert len(upstream.requested) == 1


@pytest.mark.parametrize("ballast", [0, 150], ids=["while it is asked", "while it is held"])
async def test_a_killed_daemon_answers_once(daemon: Daemon, upstream: Upstream, ballast: int) -> None:
    """The answer is journalled and held (a heavy state takes its time to become durable), or not even there."""
    gateway = Gateway(upstream="scripted", hold="durable")
    async with daemon.client() as host:
        sandbox = await host.create(IMAGE, gateway=gateway)
        if not ballast:
            upstream.gate.clear()
        await start(sandbox, 2, ballast)
        await until(lambda: len(upstream.requested) == 1, "the first request")
        if ballast:
            await until(lambda: _journalled(daemon, sandbox.id), "the answer is journalled")
    daemon.kill()
    journalled = _journalled(daemon, sandbox.id)
    assert journalled or not ballast
    upstream.gate.set()
    await asyncio.to_thread(daemon.start)
    async with daemon.client() as host:
        sandbox = await host.get(sandbox.id)
        assert sandbox.info.state is SandboxState.RUNNING
        entries = await done(sandbox)
        last = 2 if ballast else 3  # asked again only if nothing was journalled
        assert len(upstream.requested) == last
        assert texts(entries) == [f"answer {last - 1}", f"answer {last}"]
        first = (await sandbox.gateway.exchanges())[0]
        assert (first.requested, first.answered) == (last - 1, 1)
        await sandbox.remove()


# It asks once, and when its connection breaks once more, at once: whoever is refused then has lost.
IMPATIENT = r"""
import http.client, json, os, urllib.parse
address = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])

def ask():
    connection = http.client.HTTPConnection(address.hostname, address.port)
    connection.request("POST", "/v1/chat/completions", json.dumps({"messages": ["same"]}))
    return json.loads(connection.getresponse().read())["choices"][0]["message"]["content"]

try:
    try:
        said = ask()
    except (OSError, http.client.HTTPException):
        said = ask()
except Exception as error:
    said = repr(error)
with open("/done", "w") as file:
    file.write(said)
"""


async def test_who_asks_while_no_daemon_lives_waits_for_the_next_one(daemon: Daemon, upstream: Upstream) -> None:
    async with daemon.client() as host:
        sandbox = await host.create(IMAGE, gateway=GATEWAY)
        await sandbox.files.write("/agent.py", IMPATIENT)
        upstream.gate.clear()
        await sandbox.exec("setsid python3 /agent.py > /out 2>&1 &", ends_turn=False)
        await until(lambda: len(upstream.requested) == 1, "the request")
    before = _connections(sandbox.id)
    assert before
    daemon.kill()
    await until(lambda: _connections(sandbox.id) - before, "it is connected again, to nobody")
    upstream.gate.set()
    await asyncio.to_thread(daemon.start)
    async with daemon.client() as host:
        sandbox = await host.get(sandbox.id)
        assert await until(lambda: _read(sandbox, "/done"), "an answer") == b"answer 2"
        await sandbox.remove()


def _connections(sandbox: str) -> set[str]:
    """Local addresses inside that are connected to the gateway."""
    for task in tasks_of(sandbox):
        with contextlib.suppress(OSError):  # it ended meanwhile; all are in the same namespace
            lines = [line.split() for line in Path(f"/proc/{task}/net/tcp").read_text().splitlines()[1:]]
            return {fields[1] for fields in lines if fields[2].endswith(f":{7000:04X}") and fields[3] == "01"}
    return set()


async def _read(sandbox: Sandbox, path: str) -> bytes:
    try:
        return await sandbox.files.read(path)
    except PagurusError:
        return b""


async def test_a_removed_sandbox_leaves_no_record(host: Client, upstream: Upstream, daemon: Daemon) -> None:
    async with host.create(IMAGE, gateway=GATEWAY) as sandbox:
        await _once(sandbox)
    with contextlib.closing(sqlite3.connect(daemon.state / "gateway.sqlite")) as database:
        for table in ("exchanges", "lines", "tokens", "commands"):
            (left,) = database.execute(f"SELECT count(*) FROM {table} WHERE sandbox = ?", (sandbox.id,)).fetchone()
            assert left == 0, table
        assert database.execute("SELECT count(*) FROM texts").fetchone() == (0,)


async def test_a_command_of_the_operator_is_a_turn_of_its_own(inside: Sandbox, upstream: Upstream) -> None:
    await _once(inside)
    verdict = (await inside.exec("echo x > /x")).verdict
    assert verdict is not None
    assert verdict.files
    assert [turn.turn for turn in await inside.turns()] == [1, 2]


async def test_the_program_tells_what_was_said(inside: Sandbox, upstream: Upstream, daemon: Daemon) -> None:
    async def pagurus(*words: str) -> str:
        program = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "pagurus",
            "gateway",
            *words,
            env={**os.environ, "PAGURUS_HOST": str(daemon.socket)},
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await program.communicate()
        assert program.returncode == 0
        return said.decode()

    await _once(inside)
    assert "scripted" in [item["name"] for item in json.loads(await pagurus("ls", "--json"))]
    (exchange,) = json.loads(await pagurus("log", inside.id, "--json"))
    assert str(exchange["id"]) in await pagurus("log", inside.id)
    assert "answer 1" in await pagurus("log", inside.id, str(exchange["id"]))
    await pagurus("set", "other", upstream.url)
    await pagurus("rm", "other")


# --------------------------------------------------------------------------- helpers

REQUEST = r"""
import json, os, sys, urllib.error, urllib.request
path, body, headers = json.load(sys.stdin)
address = os.environ["ANTHROPIC_BASE_URL"] + path
data = None if body is None else json.dumps(body).encode()
try:
    with urllib.request.urlopen(urllib.request.Request(address, data, headers)) as answer:
        print(answer.status, answer.read().decode(), end="")
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode(), end="")
"""


async def _request(
    sandbox: Sandbox, path: str, body: object = None, headers: dict[str, str] | None = None
) -> tuple[int, str]:
    """One request from inside: status and body."""
    reported = json.dumps([path, body, {"Content-Type": "application/json", **(headers or {})}]).encode()
    result = await sandbox.exec(["python3", "-c", REQUEST], stdin=reported, ends_turn=False)
    assert result.exit_code == 0, result.stderr.decode()
    status, _, answer = result.text.partition(" ")
    return int(status), answer


async def _once(sandbox: Sandbox, headers: dict[str, str] | None = None) -> str:
    status, answer = await _request(sandbox, "/v1/chat/completions", {"messages": ["same"]}, headers)
    assert status == 200, answer
    return str(json.loads(answer)["choices"][0]["message"]["content"])


async def _head(sandbox: Sandbox) -> str | None:
    """The checkpoint of turn 2, once it is captured."""
    turns = await sandbox.turns()
    if len(turns) < 2 or turns[1].checkpoint is None:
        return None
    info = await sandbox.captured(turns[1].checkpoint)
    return info.id


async def _answered(sandbox: Sandbox, count: int) -> bool:
    exchanges = await sandbox.gateway.exchanges()
    return [item.state for item in exchanges] == ["answered"] * count


def _journalled(daemon: Daemon, sandbox: str) -> bool:
    with contextlib.closing(sqlite3.connect(daemon.state / "gateway.sqlite")) as database:
        rows = database.execute("SELECT state FROM exchanges WHERE sandbox = ?", (sandbox,)).fetchall()
    return rows == [("answered",)]
