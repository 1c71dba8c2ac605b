"""An agent outside its sandbox: tokens, commands that take effect once, restarts of everything."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagurus.docker import understand
from sandbox import Client, Conflict, Invalid, PagurusError, Sandbox, SandboxDead
from sandbox.messages import Gateway
from sandbox.messages import Upstream as Address
from tests.support.daemon_host import IMAGE, Daemon, free_port, kill_everything, missing, until
from tests.support.gateway_upstream import Upstream

OUTSIDE = Gateway(upstream="scripted", agent="outside")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    if reason := missing():
        pytest.skip(reason)
    config: Path = tmp_path_factory.mktemp("config") / "gateway.toml"
    config.write_text(f'listen = "127.0.0.1:{free_port()}"\n[upstreams.fixed]\nurl = "http://127.0.0.1:1"\n')
    daemon = Daemon(tmp_path_factory.mktemp("host"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGURUS_GATEWAY_CONFIG", str(config))
        try:
            yield daemon.start()
        finally:
            daemon.clean()


class Agent:
    """An agent outside: a conversation, and commands of its own. It asks again when its connection breaks."""

    def __init__(self, daemon: Daemon, sandbox: str, base: str, token: str) -> None:
        self.daemon, self.sandbox, self.base, self.token = daemon, sandbox, base, token
        self.said: list[Any] = ["begin"]
        self.sources: list[str] = []

    async def request(self) -> str:
        headers = {"Authorization": f"Bearer {self.token}"}
        body = {"messages": self.said}
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with (
                    aiohttp.ClientSession() as session,
                    session.post(f"{self.base}/v1/chat/completions", json=body, headers=headers) as answer,
                ):
                    assert answer.status == 200, await answer.text()
                    text = (await answer.json())["choices"][0]["message"]["content"]
                    self.sources.append(answer.headers["x-pagurus-answer"])
                    self.said.append(text)
                    return str(text)
            await asyncio.sleep(0.05)

    async def run(self, host: Client, command: str) -> str:
        sandbox = await host.get(self.sandbox)
        result = await sandbox.gateway.exec(command)
        self.said.append(result.text)
        return result.text


@pytest.fixture
async def sandbox(host: Client, upstream: Upstream) -> AsyncIterator[Sandbox]:
    async with host.create(IMAGE, gateway=OUTSIDE) as sandbox:
        yield sandbox


async def hire(daemon: Daemon, sandbox: Sandbox) -> Agent:
    token = await sandbox.gateway.token()
    assert token.base_url is not None
    return Agent(daemon, sandbox.id, token.base_url, token.token)


COUNT = "echo x >> /count; wc -l < /count"


async def test_its_request_ends_the_turn_of_its_commands(host: Client, daemon: Daemon, sandbox: Sandbox) -> None:
    agent = await hire(daemon, sandbox)
    assert await agent.request() == "answer 1"
    assert await agent.run(host, COUNT) == "1\n"
    assert await agent.run(host, COUNT) == "2\n"
    assert await agent.request() == "answer 2"
    assert [turn.verdict.value for turn in await sandbox.turns()] == ["none", "files"]  # it is no part of the state


async def test_restarted_it_is_told_the_record_and_nothing_happens_twice(
    host: Client, daemon: Daemon, sandbox: Sandbox, upstream: Upstream
) -> None:
    first = await hire(daemon, sandbox)
    for _ in range(2):
        await first.request()
        await first.run(host, COUNT)
    second = await hire(daemon, sandbox)  # the first one's token ends with this
    for _ in range(2):
        await second.request()
        await second.run(host, COUNT)
    assert second.said == first.said
    assert second.sources == ["record", "record"]
    assert len(upstream.requested) == 2
    assert await second.request() == "answer 3"
    assert await second.run(host, COUNT) == "3\n"
    assert await sandbox.files.read("/count") == b"x\nx\nx\n"


async def test_one_that_leaves_its_path_must_restore_first(host: Client, daemon: Daemon, sandbox: Sandbox) -> None:
    first = await hire(daemon, sandbox)
    await first.request()
    await first.run(host, COUNT)
    await first.request()
    second = await hire(daemon, sandbox)
    await second.request()
    with pytest.raises(Conflict, match="restore the sandbox to checkpoint c-"):
        await second.run(host, "rm -rf /srv")
    to = (await sandbox.turns())[0].checkpoint
    await sandbox.restore(to)
    assert await second.run(host, "ls /count; echo gone") == "gone\n"


async def test_the_sandbox_dies_and_the_agent_goes_on(
    host: Client, daemon: Daemon, sandbox: Sandbox, upstream: Upstream
) -> None:
    agent = await hire(daemon, sandbox)
    await agent.request()
    await agent.run(host, COUNT)
    await agent.request()
    await agent.run(host, COUNT)  # of the turn under way: no checkpoint has it
    kill_everything(sandbox.id)
    running = asyncio.create_task(agent.run(host, COUNT))
    await until(lambda: _dead(host, sandbox.id), "it is seen dead")
    assert not running.done()  # the next command waits for the restore
    await sandbox.restore()
    assert await running == "3\n"  # what the restore had undone was done again first
    kill_everything(sandbox.id)
    asking = asyncio.create_task(agent.request())
    await until(lambda: _dead(host, sandbox.id), "it is seen dead")
    await sandbox.restore()
    assert await asking == "answer 3"
    assert await sandbox.files.read("/count") == b"x\nx\nx\n"
    assert len(upstream.requested) == 3


async def test_killed_in_the_middle_of_a_command_it_runs_once(host: Client, daemon: Daemon, sandbox: Sandbox) -> None:
    agent = await hire(daemon, sandbox)
    await agent.request()
    await agent.run(host, "mkfifo /gate")
    await agent.request()
    running = asyncio.create_task(agent.run(host, "echo x >> /count; test -e /open || cat /gate; wc -l < /count"))
    await until(lambda: _exists(sandbox, "/count"), "the command runs")
    kill_everything(sandbox.id)
    await until(lambda: _dead(host, sandbox.id), "it is seen dead")
    # The restored state is that before the command; let the one that runs again pass.
    restoring = asyncio.create_task(sandbox.restore())
    await restoring
    await sandbox.files.write("/open", b"")
    await until(lambda: _exists(sandbox, "/count"), "the command runs again")
    await sandbox.exec("test -e /count && timeout 20 sh -c 'echo go > /gate' || true", ends_turn=False)
    assert (await running).endswith("1\n")
    assert await sandbox.files.read("/count") == b"x\n"


async def test_killed_daemon_in_the_middle_of_a_command(daemon: Daemon, upstream: Upstream, host: Client) -> None:
    sandbox = await host.create(IMAGE, gateway=OUTSIDE)
    agent = await hire(daemon, sandbox)
    await agent.request()
    await agent.run(host, COUNT)
    # The first time it waits for ever; nobody sees its end.
    command = "echo x >> /count; test -e /tmp/second || { touch /once; sleep 1000; }; wc -l < /count"
    async with daemon.client() as mine:
        running = asyncio.create_task(agent.run(mine, command))
        await until(lambda: _exists(sandbox, "/once"), "the command runs")
        daemon.kill()
        await asyncio.to_thread(daemon.start)
        # Sent again, it takes the sandbox back; the sleeper is gone with it. Let it pass this time.
        await until(lambda: _restored(mine, sandbox.id), "the sandbox is taken back")
        again = await mine.get(sandbox.id)
        await until(lambda: _exists(again, "/once"), "the command runs again")
        await again.exec("until pkill -x sleep; do sleep 0.05; done", ends_turn=False)
        assert await running == "2\n"  # once before it, once now
        assert await again.files.read("/count") == b"x\nx\n"
        assert await agent.request() == "answer 2"
        await again.remove()


async def test_a_token_is_of_one_sandbox(host: Client, daemon: Daemon, sandbox: Sandbox) -> None:
    async with host.create(IMAGE, gateway=OUTSIDE) as other:
        mine, theirs = await hire(daemon, sandbox), await hire(daemon, other)
        kind, identity, secret = mine.token.split(".", 2)
        forged = [
            "",
            "x",
            f"{kind}.{other.id}.{secret}",  # my secret for their sandbox
            f"{kind}.{other.id}.",
            f"{kind}.{identity}.{secret}x",
            f"{kind}..{secret}",
            f"{kind}.{identity}.{secret}"[:-1],
            f"sk.{identity}.{secret}",
        ]
        async with aiohttp.ClientSession() as session:
            for token in forged:
                for headers in ({"Authorization": f"Bearer {token}"}, {"x-api-key": token}):
                    named = {**headers, "X-Pagurus-Sandbox": other.id}
                    async with session.post(f"{mine.base}/v1/messages", json={"messages": []}, headers=named) as answer:
                        assert answer.status == 401
                        assert (await answer.json())["error"]["type"] == "authentication_error"
            async with session.post(f"{mine.base}/v1/messages", data=b"{", headers={"x-api-key": mine.token}) as answer:
                assert answer.status == 400
        assert await other.gateway.exchanges() == []
        former = theirs.token
        await other.gateway.token()
        async with aiohttp.ClientSession() as session:
            headers = {"x-api-key": former}
            async with session.get(f"{mine.base}/v1/models", headers=headers) as answer:
                assert answer.status == 401  # a new token ends the one before
    assert mine.token.encode() not in (daemon.state / "gateway.sqlite").read_bytes()
    assert secret.encode() not in (daemon.state / "gateway.sqlite-wal").read_bytes()


async def test_nothing_listens_in_a_sandbox_whose_agent_is_outside(sandbox: Sandbox) -> None:
    result = await sandbox.exec("cat /proc/net/tcp | wc -l; env | grep -c OPENAI", ends_turn=False)
    assert result.text == "1\n0\n"
    async with sandbox._client.create(IMAGE, gateway=Gateway(upstream="scripted")) as inside:
        with pytest.raises(Invalid, match="only an agent outside"):
            await inside.gateway.exec("true")
    with pytest.raises(PagurusError, match="no gateway"):
        async with sandbox._client.create(IMAGE) as plain:
            await plain.gateway.token()


async def test_upstreams_of_the_configuration_are_fixed(host: Client) -> None:
    assert "fixed" in [item.name for item in await host.gateway.upstreams()]
    for act in (host.gateway.put("fixed", Address(url="http://127.0.0.1:2")), host.gateway.drop("fixed")):
        with pytest.raises(Conflict, match="configuration file"):
            await act
    for name, url in (("a b", "http://x"), ("x", "ftp://x"), ("x", "http://"), ("..", "http://x")):
        with pytest.raises(PagurusError):
            await host.gateway.put(name, Address(url=url))
    with pytest.raises(Invalid, match="header"):
        await host.gateway.put("x", Address(url="http://x", headers={"Host": "y"}))


def test_words_of_docker() -> None:
    words = understand(["exec", "-w", "/src", "-e", "A=b=c", "--user=7", "-i", "s-1", "bash", "-lc", "ls -l"])
    assert (words.rest, words.workdir, words.env, words.user, words.interactive) == (
        ["s-1", "bash", "-lc", "ls -l"],
        "/src",
        {"A": "b=c"},
        "7",
        True,
    )
    assert understand(["run", "-d", "--name", "x", "-w", "/", "--rm", "image", "sleep", "2h"]).rest[0] == "image"
    for wrong in ([], ["build"], ["exec", "--privileged", "x"], ["exec", "-w"], ["exec", "-u"]):
        with pytest.raises(Invalid):
            understand(wrong)


async def _dead(host: Client, sandbox: str) -> bool:
    try:
        await (await host.get(sandbox)).exec("true", ends_turn=False)
    except SandboxDead:
        return True
    return False


async def _exists(sandbox: Sandbox, path: str) -> bool:
    try:
        await sandbox.files.read(path)
    except PagurusError:
        return False
    return True


async def _restored(host: Client, sandbox: str) -> bool:
    with contextlib.suppress(PagurusError):
        return (await host.statistics()).restores > 0
    return False


# --------------------------------------------------------------------------- metrics


async def counted(daemon: Daemon) -> dict[tuple[str, ...], float]:
    """What Prometheus reads of the gateway: (name, values of its labels) -> value."""
    connector = aiohttp.UnixConnector(str(daemon.socket))
    async with aiohttp.ClientSession(connector=connector) as session, session.get("http://host/metrics") as answer:
        text = await answer.text()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("pagurus_gateway_") and not sample.name.endswith(("_created", "_bucket"))
    }


async def test_prometheus_counts_what_was_asked(daemon: Daemon, sandbox: Sandbox, upstream: Upstream) -> None:
    agent = await hire(daemon, sandbox)
    before = await counted(daemon)
    await agent.request()
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {agent.token}"}) as session:
        path = f"{agent.base}/v1/chat/completions"
        for body in ({"messages": []}, {"messages": [1], "max_tokens": 1}, [], {"messages": [2]}):
            upstream.status = 429 if body == {"messages": [2]} else 200
            async with session.post(path, json=body) as answer:
                await answer.read()
        again = {"x-stainless-retry-count": "1"}
        upstream.status = 200
        async with session.post(path, json={"messages": []}, headers=again) as answer:
            assert answer.headers["x-pagurus-answer"] == "record"
        async with session.get(f"{agent.base}/v1/models") as answer:
            await answer.read()
        async with session.get(f"{agent.base}/v1/models", headers={"Authorization": "Bearer nobody"}) as answer:
            assert answer.status == 401

    async def changed() -> dict[tuple[str, ...], float]:
        after = await counted(daemon)
        gauges = {"pagurus_gateway_held_seconds_sum", "pagurus_gateway_journal_bytes", "pagurus_gateway_asking"}
        assert gauges <= {name for name, *_ in after}
        return {
            name: value - before.get(name, 0.0)
            for name, value in after.items()
            if name[0] not in gauges and value != before.get(name, 0.0)
        }

    expected = {
        ("pagurus_gateway_requests_total", "main", "answered"): 2,
        ("pagurus_gateway_requests_total", "main", "recorded"): 1,
        ("pagurus_gateway_requests_total", "main", "upstream_error"): 1,
        ("pagurus_gateway_requests_total", "side", "answered"): 1,
        ("pagurus_gateway_requests_total", "other", "answered"): 1,
        ("pagurus_gateway_requests_total", "none", "refused"): 1,
        ("pagurus_gateway_held_seconds_count",): 4,
        ("pagurus_gateway_exchanges_stored_total",): 3,
        ("pagurus_gateway_upstream_errors_total", "status"): 1,
        ("pagurus_gateway_tokens_rejected_total",): 1,
    }

    async def as_expected() -> bool:
        return await changed() == expected

    with contextlib.suppress(
        AssertionError
    ):  # what differs is told below; a request is counted a moment after its answer was heard
        await until(as_expected, "all of it is counted", 60)
    assert await changed() == expected
