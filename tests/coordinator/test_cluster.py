"""A coordinator over two real daemons: where things go, who sees what, what its death means."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from openapi_spec_validator import validate

from coordinator.api.description import TYPES
from coordinator.api.routes import DESCRIPTION_TTL, Routes
from coordinator.decide import place
from coordinator.decide.place import HostView, PlacementRequest
from daemon.api.openapi import describe
from sandbox import Client, Sandbox
from sandbox.errors import Conflict, Forbidden, Invalid, NoSpace, NotFound, TooMany, Unauthorized
from sandbox.messages import CreateRequest, ForkEntry, ForkRequest, SandboxInfo
from sandbox.messages.cluster import HostChange, HostInfo, HostReport, PlaceInfo
from sandbox.messages.tokens import ApiToken, NewToken, TokenQuota, TokenRequest
from tests.support.cluster import Cluster
from tests.support.daemon_host import free_port, until


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with cluster.client() as made:
        yield made


async def change(client: Client, host: str, **fields: object) -> HostInfo:
    return await client.call("PATCH", f"/v1/cluster/hosts/{host}", HostInfo, HostChange(**fields))  # type: ignore[arg-type]


async def where(client: Client, sandbox: Sandbox) -> str:
    places = await client.call("GET", "/v1/cluster/places", list[PlaceInfo])
    return next(place.host for place in places if place.sandbox == sandbox.id)


async def test_sandboxes_spread_and_go_where_they_are_told(client: Client) -> None:
    async with contextlib.AsyncExitStack() as stack:
        few = [await stack.enter_async_context(client.create("debian")) for _ in range(6)]
        assert {await where(client, item) for item in few} == {"one", "two"}
        await change(client, "one", labels={"zone": "a"})
        await change(client, "two", draining=True)
        assert await where(client, await stack.enter_async_context(client.create("debian"))) == "one"
        await change(client, "two", draining=False)
        there = await stack.enter_async_context(client.create("debian", labels={"on.zone": "a"}))
        assert await where(client, there) == "one"
        with pytest.raises(NoSpace, match="has other labels"):
            await client.create("debian", labels={"on.zone": "b"})
        await change(client, "one", labels={"zone": None})
        listed = [info.id for info in await client.sandboxes()]
        assert set(listed) >= {item.id for item in few} and len(listed) == len(set(listed))
        assert (await client.statistics()).sandboxes == len(listed)
    assert await client.sandboxes() == []


def _routes() -> list[tuple[str, str]]:
    """Methods and paths of a coordinator without hosts."""
    nothing: Any = SimpleNamespace(tokens=None, logins=None)
    made = Routes(nothing, nothing, nothing, nothing, nothing, nothing)
    return [(route.method, route.resource.canonical) for route in made.application().router.routes() if route.resource]


async def test_the_description_has_the_routes_of_the_cluster_too(client: Client) -> None:
    content = await client.call("GET", "/v1/openapi.json", dict[str, Any])
    validate(content)
    served = {(method, path) for method, path in _routes()}
    described = {(method.upper(), path) for path, item in content["paths"].items() for method in item}
    own = {(method, path) for method, path in served if path.startswith(("/v1/cluster/", "/v1/phases"))}
    assert own == set(TYPES) and described >= {*own, ("POST", "/v1/sandboxes")}
    summaries = [content["paths"][path][method.lower()]["summary"] for method, path in own]
    assert all(summaries)


async def test_the_description_asks_a_host_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    async def complete(*_: object) -> SimpleNamespace:
        nonlocal asked
        asked += 1
        return SimpleNamespace(body=msgspec.json.encode(describe([])))

    host = SimpleNamespace(upstream=SimpleNamespace(complete=complete))
    members: Any = SimpleNamespace(tokens=None, logins=None, living=lambda: [host])
    routes = Routes(members, members, members, members, members, members)
    request = make_mocked_request("GET", "/v1/openapi.json")
    first = await routes._description(request)
    second = await routes._description(request)
    assert isinstance(first, web.Response) and isinstance(second, web.Response)
    assert asked == 1 and second.body == first.body
    now = time.monotonic()
    monkeypatch.setattr("coordinator.api.routes.time.monotonic", lambda: now + DESCRIPTION_TTL)
    await routes._description(request)
    assert asked == 2


async def test_metrics_name_the_host_of_each_sample(client: Client) -> None:
    text = (await client.raw("GET", "/metrics", None, "")).decode()
    assert "\npagurus_cluster_copies_total 0.0\n" in text
    assert 'pagurus_networks{host="one"' in text and 'pagurus_networks{host="two"' in text


async def test_a_name_is_one_sandboxs_over_all_hosts(client: Client) -> None:
    async with client.create("debian", name="mine") as mine:
        await change(client, await where(client, mine), draining=True)
        with pytest.raises(Conflict, match="named mine"):
            await client.create("debian", name="mine")
        assert (await client.get("mine")).id == (await client.get(mine.id[:6])).id == mine.id
        for host in ("one", "two"):
            await change(client, host, draining=False)


async def test_the_death_of_the_coordinator_loses_nothing(cluster: Cluster, client: Client) -> None:
    async with client.create("debian", name="mine") as mine:
        place = await where(client, mine)
        long = asyncio.create_task(mine.exec("sleep 1; echo $$ >> /log; cat /log"))
        created = asyncio.create_task(client.create("debian", name="other")._make())
        await asyncio.sleep(0.3)
        cluster.kill()
        cluster.start()
        other = await created
        assert len((await long).text.split()) == 1  # carried out once, told by the one that followed
        assert await where(client, mine) == place
        assert len([info for info in await client.sandboxes() if info.name == "other"]) == 1
        await other.remove()


async def test_callers_see_their_own_and_hosts_learn_no_token_of_the_cluster(
    cluster: Cluster, client: Client, own_cluster_port: int
) -> None:
    async def made(**fields: object) -> NewToken:
        return await client.call("POST", "/v1/tokens", NewToken, TokenRequest(name="t", **fields))  # type: ignore[arg-type]

    one, two = await made(quota=TokenQuota(sandboxes=1)), await made()
    address = f"http://127.0.0.1:{own_cluster_port}"
    async with Client(address, token=one.text) as first, Client(address, token=two.text) as second:
        async with first.create("debian", name="n") as mine, second.create("debian", name="n") as theirs:
            assert [info.id for info in await first.sandboxes()] == [mine.id]
            assert (await first.get("n")).id == mine.id and (await second.get("n")).id == theirs.id
            with pytest.raises(NotFound):
                await second.get(mine.id)
            with pytest.raises(TooMany, match="quota"):  # over all hosts, whichever would take it
                await first.create("debian")
            for way in ("..%2F..%2Fsandboxes", "%252e%252e/%252e%252e/sandboxes"):  # nor past the cluster to a host
                with pytest.raises(NotFound):
                    beyond = f"/v1/sandboxes/{mine.id}/{way}"
                    await first.call("POST", beyond, SandboxInfo, CreateRequest(image="debian"))
            await sees_its_own_of_the_cluster(client, first, mine)
            with pytest.raises(Invalid):  # of one host, not of a cluster
                await first.call("GET", "/v1/host", HostReport)
        await client.call("DELETE", f"/v1/tokens/{one.token.id}", ApiToken)
        with pytest.raises(Unauthorized):
            await first.sandboxes()
    async with Client(address) as nobody:
        with pytest.raises(Unauthorized):
            await nobody.sandboxes()
        assert (await nobody.health())["hosts"] == 2


async def sees_its_own_of_the_cluster(client: Client, caller: Client, mine: Sandbox) -> None:
    """Of a host, an owner's token reads what says nothing of other owners, and changes nothing."""
    hosts = await caller.call("GET", "/v1/cluster/hosts", list[HostInfo])
    known = await client.call("GET", "/v1/cluster/hosts", list[HostInfo])
    assert [(host.name, host.state) for host in hosts] == [(host.name, host.state) for host in known]
    assert {host.name: host.sandboxes for host in hosts if host.sandboxes} == {await where(client, mine): 1}
    assert all(host.cpus and host.address for host in known)
    assert not any(host.cpus or host.memory_bytes or host.disk_free or host.address for host in hosts)
    assert [place.sandbox for place in await caller.call("GET", "/v1/cluster/places", list[PlaceInfo])] == [mine.id]
    for method, path in (("PATCH", "/v1/cluster/hosts/one"), ("GET", "/v1/cluster/hosts/one/doctor")):
        with pytest.raises(Forbidden):
            await caller.call(method, path, dict)


@pytest.fixture
def own_cluster_port(cluster: Cluster) -> int:
    """The coordinator of the module, started anew so that it listens on TCP as well."""
    port = free_port()
    cluster.kill()
    cluster.options("--listen", f"127.0.0.1:{port}", "--plain")
    cluster.start()
    return port


async def test_forks_are_counted_and_calls_are_paced_over_all_hosts(
    cluster: Cluster, client: Client, own_cluster_port: int
) -> None:
    async def own(**quota: Any) -> Client:
        target = TokenRequest(name="t", scope="exec", quota=TokenQuota(**quota))
        made = await client.call("POST", "/v1/tokens", NewToken, target)
        return Client(f"http://127.0.0.1:{own_cluster_port}", token=made.text)

    async with await own(sandboxes=3, memory=3 << 30) as caller, caller.create("debian") as mine:
        retained = await mine.checkpoint()
        with pytest.raises(Invalid, match="count must lie between"):  # it would place them until it is ended
            await caller.fork(retained, 10**15)
        with pytest.raises(TooMany, match="quota"):
            await mine.fork(3)
        with pytest.raises(TooMany, match="quota"):
            await caller.fork(retained, 3)
        with pytest.raises(NotFound):  # a way to write the route by which it would not be counted
            await caller.call("POST", f"/v1/sandboxes/{mine.id}/fork%3F", list[ForkEntry], ForkRequest(count=2))
        request = ForkRequest()
        made = [
            await caller.call("POST", f"/v1/sandboxes/{mine.id}/fork", list[ForkEntry], request, keyed="once")
            for _ in range(2)  # sent again, it is not counted again
        ]
        assert made[0] == made[1]
        (child,) = await caller.fork(retained, 1)
        assert len(await caller.sandboxes()) == 3
        with pytest.raises(TooMany, match="quota"):
            await child.sandbox.fork(1)
        for info in [item for item in await caller.sandboxes() if item.id != mine.id]:
            await (await caller.get(info.id)).remove()
    async with await own(requests_per_s=0.001) as caller:
        assert await caller.sandboxes() == []
        with pytest.raises(TooMany, match="requests per second"):
            await caller.sandboxes()
    async with await own(execs=0) as caller:
        with pytest.raises(TooMany, match="under way"):
            await caller.create("debian")


async def test_a_host_that_falls_silent_gets_nothing_new_and_comes_back(cluster: Cluster, client: Client) -> None:
    silent = cluster.daemons["two"]
    assert silent.process is not None
    os.kill(silent.process.pid, 19)
    try:

        async def states() -> list[str]:
            return [host.state for host in await client.call("GET", "/v1/cluster/hosts", list[HostInfo])]

        await until(lambda: _is(states(), ["alive", "silent"]), "the host is taken for silent")
        async with client.create("debian") as made:
            assert await where(client, made) == "one"
    finally:
        os.kill(silent.process.pid, 18)
    await until(lambda: _is(states(), ["alive", "alive"]), "the host is back")


async def _is(result, target) -> bool:  # type: ignore[no-untyped-def]
    return (await result) == target


async def test_a_placement_can_be_made_again_from_the_log(cluster: Cluster, client: Client) -> None:
    async with client.create("debian") as first, client.create("debian") as second:
        made = [await where(client, item) for item in (first, second)]
    with contextlib.closing(sqlite3.connect(cluster.root / "state/cluster.sqlite")) as database:
        query = "SELECT row FROM decisions WHERE kind = 'place' ORDER BY number DESC LIMIT 2"
        rows = [msgspec.json.decode(row) for (row,) in database.execute(query)]
    assert [row["action"] for row in reversed(rows)] == made
    for row in rows:
        views = msgspec.convert(row["view"]["hosts"], list[HostView])
        assert place.ranked(views, msgspec.convert(row["view"]["target"], PlacementRequest))[0] == row["action"]
