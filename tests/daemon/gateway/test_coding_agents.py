"""Claude Code, Codex, Gemini CLI, opencode, aider and qwen-code, unmodified, inside of sandboxes behind the gateway.

Each has a task. It is killed with all of its sandbox in the middle of a request, restored, and ends as if nothing had
happened: each command took effect once, and the model was asked exactly as often. `make setup-agents` brings them.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from sandbox import Client, Limits, Sandbox, paths
from sandbox.messages import Gateway
from sandbox.messages import Upstream as Address
from tests.support.daemon_host import Daemon, kill_everything, missing, tasks_of, until
from tests.support.gateway_upstream import Upstream
from tests.support.scripted_agents import AGENTS, FILES, REPAIRED, CodingAgent, reply
from tests.support.tools import record

IMAGE = "coding-agents"
IMAGES = paths.prefix() / "agents" / "images"
TIMEOUT = 500.0  # seconds; some load for many on a busy machine
HOME = "/root"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    if reason := missing():
        pytest.skip(reason)
    if not (IMAGES / IMAGE).exists():
        pytest.skip(f"no coding agents in {IMAGES}; run `make setup-agents` where there is npm")
    daemon = Daemon(tmp_path_factory.mktemp("host"))
    (daemon.state / "images" / IMAGE).symlink_to((IMAGES / IMAGE).resolve())
    try:
        yield daemon.start()
    finally:
        daemon.clean()


@pytest.fixture
async def upstream(host: Client) -> AsyncIterator[Upstream]:
    async with Upstream(reply) as upstream:
        await host.gateway.put("scripted", Address(url=upstream.url))
        yield upstream


async def started(host: Client, agent: CodingAgent) -> Sandbox:
    """A sandbox in which it works."""
    sandbox = await host.create(IMAGE, limits=Limits(memory="4GiB"), gateway=Gateway(upstream="scripted"))
    for name, content in FILES.items():
        await sandbox.files.write(f"/srv/{name}", content)
    for name, content in agent.files.items():
        await sandbox.files.write(str(Path(HOME, name)), content)
    await sandbox.files.write("/task.sh", f"{{ {agent.command}; }} </dev/null >/said 2>&1; echo $? >/done\n")
    command = "setsid sh /task.sh >/dev/null 2>&1 &"
    env = {"HOME": HOME, "PYTHONDONTWRITEBYTECODE": "1", **agent.env}
    await sandbox.exec(command, env=env, cwd="/srv", ends_turn=False)
    return sandbox


async def ended(sandbox: Sandbox, agent: CodingAgent) -> None:
    """It has ended well, and each command took effect once."""

    async def done() -> bool:
        with contextlib.suppress(Exception):
            return bool(await sandbox.files.read("/done"))
        return False

    await until(done, "it ends", TIMEOUT)
    said = (await sandbox.files.read("/said")).decode()
    assert await sandbox.files.read("/done") == b"0\n", said[-3000:]
    assert (await sandbox.files.read("/srv/calc.py")).decode() == REPAIRED, said[-3000:]
    assert (await sandbox.files.read("/srv/log")).decode() == agent.log, said[-3000:]


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_is_killed_restored_and_ends_the_same(host: Client, upstream: Upstream, name: str) -> None:
    agent = AGENTS[name]
    async with await started(host, agent) as calm:
        await ended(calm, agent)
    expected, upstream.requested[:] = len(upstream.requested), []
    upstream.holds = agent.hold
    async with await started(host, agent) as sandbox:
        await until(lambda: len(upstream.requested) == agent.hold, "it asks in the middle of its task", TIMEOUT)
        checkpoint = await until(lambda: _checkpoint(sandbox), "that ended a turn", TIMEOUT)
        await sandbox.captured(checkpoint)
        kill_everything(sandbox.id)
        await until(lambda: not tasks_of(sandbox.id), "all of it is dead")
        upstream.gate.set()  # the answer comes while nobody is there
        await until(lambda: _recorded(sandbox), "it is recorded")
        await sandbox.restore()
        await ended(sandbox, agent)
        assert len(upstream.requested) == expected  # the model was asked nothing twice
    record("agents", {name: "passed"})


async def _checkpoint(sandbox: Sandbox) -> str | None:
    """That of the request under way."""
    waiting = [item for item in await sandbox.gateway.exchanges() if item.main and item.state == "requested"]
    return waiting[-1].checkpoint if waiting else None


async def _recorded(sandbox: Sandbox) -> bool:
    return all(item.state == "answered" for item in await sandbox.gateway.exchanges())
