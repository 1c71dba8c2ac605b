"""A sandbox arrives: from a state of its own, and not before somebody says so, whatever is prepared for it."""

from __future__ import annotations

import asyncio

import pytest

from daemon import fence
from sandbox import Client
from sandbox.errors import Conflict
from sandbox.messages import SandboxInfo
from sandbox.messages.cluster import ArriveRequest, DepartedSandbox
from tests.crash.whole_host import group
from tests.support.cluster import frozen
from tests.support.daemon_host import Daemon, kill_everything, tasks_of, until

TICKS = "setsid sh -c 'while :; do echo x >> /ticks; sleep 0.02; done' > /dev/null 2>&1 < /dev/null &"
MOVES = "a=$(wc -c < /ticks); sleep 0.3; b=$(wc -c < /ticks); test $b -gt $a"


@pytest.mark.parametrize("ahead", [False, True])
async def test_nothing_arrives_from_another_ones_checkpoint(host: Client, ahead: bool) -> None:
    async with host.create("debian") as other:
        secret = await other.durable(await other.exec("echo secret > /srv/secret"))
        gone = await host.create("debian")
        own = await gone.durable(await gone.exec("echo own > /srv/own"))
        left = await host.call("POST", f"/v1/sandboxes/{gone.id}/left", DepartedSandbox)
        assert left.checkpoint == own.id
        target = ArriveRequest(id=gone.id)
        if ahead:  # a container and a pid 1 of its own wait for it
            prepare = ArriveRequest(id=gone.id, ahead=True)
            await host.call("POST", f"/v1/checkpoints/{own.id}/arrive", SandboxInfo, prepare)
        with pytest.raises(Conflict, match="of another sandbox"):
            await host.call("POST", f"/v1/checkpoints/{secret.id}/arrive", SandboxInfo, target)
        await host.call("POST", f"/v1/checkpoints/{own.id}/arrive", SandboxInfo, target)
        there = await host.get(gone.id)
        assert (await there.exec("ls /srv")).text == "own\n"
        await there.remove()


async def left(host: Client) -> tuple[str, str]:
    """A sandbox that left, and its checkpoint."""
    gone = await host.create("debian")
    retained = await gone.durable(await gone.exec(TICKS))
    assert (await host.call("POST", f"/v1/sandboxes/{gone.id}/left", DepartedSandbox)).checkpoint == retained.id
    return gone.id, retained.id


async def prepare(host: Client, id: str, checkpoint: str) -> None:
    """All of it is here again when this returns, and stands still."""
    request = ArriveRequest(id=id, ahead=True, newer=False, verify=False)
    await host.call("POST", f"/v1/checkpoints/{checkpoint}/arrive", SandboxInfo, request)


async def prepared(host: Client) -> tuple[str, str]:
    id, checkpoint = await left(host)
    await prepare(host, id, checkpoint)
    return id, checkpoint


async def arrives(host: Client, id: str, checkpoint: str) -> None:
    await host.call("POST", f"/v1/checkpoints/{checkpoint}/arrive", SandboxInfo, ArriveRequest(id=id))
    there = await host.get(id)
    assert (await there.exec(MOVES)).exit_code == 0
    await there.remove()


async def test_what_was_brought_back_before_it_arrives_stands_still_until_then(daemon: Daemon, host: Client) -> None:
    id, checkpoint = await prepared(host)
    await until(lambda: frozen(daemon, id), "the last of it has come to the freezer")
    assert len(tasks_of(id)) > 2
    await asyncio.to_thread(fence.freeze, daemon.run, True)
    await asyncio.to_thread(fence.freeze, daemon.run, False)  # a lease was over, and is not any more
    assert frozen(daemon, id)
    assert id not in [info.id for info in await host.sandboxes()]
    await arrives(host, id, checkpoint)


async def test_a_lease_that_is_over_while_it_is_brought_back_only_delays_that(daemon: Daemon, host: Client) -> None:
    id, checkpoint = await left(host)
    preparing = asyncio.create_task(prepare(host, id, checkpoint))
    await until(lambda: tasks_of(id), "something of it is there")
    for _ in range(20):
        fence.freeze(daemon.run, True)
        await asyncio.sleep(0.01)
    while not preparing.done():
        fence.freeze(daemon.run, False)
        await asyncio.sleep(0.01)
    await preparing
    await until(lambda: frozen(daemon, id), "the last of it has come to the freezer")
    await arrives(host, id, checkpoint)


async def test_what_died_before_it_arrives_is_brought_back_again(host: Client) -> None:
    id, checkpoint = await prepared(host)
    kill_everything(id)
    await until(lambda: not tasks_of(id), "all of it is dead")
    await arrives(host, id, checkpoint)


@pytest.mark.parametrize("killed", [True, False])
async def test_what_stands_still_goes_with_the_daemon_and_what_arrived_does_not(own: Daemon, killed: bool) -> None:
    async with own.client() as host:
        id, checkpoint = await prepared(host)
        await asyncio.to_thread(own.kill if killed else own.stop)
        await asyncio.to_thread(own.start)
    assert not group(own, id).exists() and not tasks_of(id)
    async with own.client() as host:
        await prepare(host, id, checkpoint)
        await host.call("POST", f"/v1/checkpoints/{checkpoint}/arrive", SandboxInfo, ArriveRequest(id=id))
        await asyncio.to_thread(own.kill)
        await asyncio.to_thread(own.start)
    async with own.client() as host:
        there = await host.get(id)
        assert not frozen(own, id) and (await there.exec(MOVES)).exit_code == 0
        await there.remove()
