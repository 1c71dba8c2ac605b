"""Clients of E2B, unmodified, pointed at a coordinator over two real daemons."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from daemon.auth.access import e2b_spelling
from sandbox.messages.cluster import PlaceInfo
from sandbox.messages.tokens import NewToken, TokenQuota, TokenRequest
from tests.support.cluster import Cluster
from tests.support.daemon_host import Daemon, free_port, until

ROOT = Path(__file__).parents[2]
VERSION = "2.63.0"  # the newest known
PYTHON = ROOT / f".prefix/clients/e2b-{VERSION}/bin/python"


@pytest.fixture(scope="module")
def url(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> Iterator[str]:
    """Of the coordinator, by TCP."""
    port = free_port()
    cluster.kill()
    cluster.options("--listen", f"127.0.0.1:{port}", "--plain")
    cluster.start()
    yield f"http://127.0.0.1:{port}"


async def key(cluster: Cluster, **request: Any) -> str:
    async with cluster.client() as client:
        made = await client.call("POST", "/v1/tokens", NewToken, TokenRequest(name="test", **request))
        return e2b_spelling(made.text)


async def places(cluster: Cluster) -> dict[str, str]:
    async with cluster.client() as client:
        return {item.sandbox: item.host for item in await client.call("GET", "/v1/cluster/places", list[PlaceInfo])}


def variables(url: str, key: str) -> dict[str, str]:
    others = {name: value for name, value in os.environ.items() if not name.startswith("E2B_")}
    return {**others, "E2B_API_KEY": key, "E2B_API_URL": url, "E2B_SANDBOX_URL": url}


def outcomes(program: str, environment: dict[str, str]) -> dict[str, str]:
    command = [PYTHON, ROOT / "tests/support" / program]
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
    made = {item["call"]: item["outcome"] for item in map(json.loads, ran.stdout.splitlines())}
    failed = {name: outcome for name, outcome in made.items() if not outcome.startswith(("passed", "refused"))}
    assert ran.returncode == 0 and not failed, "\n".join([ran.stderr, *failed.values()])
    return made


async def test_every_call_of_a_client(cluster: Cluster, url: str) -> None:
    if not PYTHON.exists():
        pytest.skip(f"e2b {VERSION} is not installed: run `make setup-clients`")
    made = await asyncio.to_thread(outcomes, "e2b_calls.py", variables(url, await key(cluster, scope="exec")))
    assert len(made) >= 20


async def test_sandboxes_are_spread_and_found(cluster: Cluster, url: str) -> None:
    one, other = await key(cluster, scope="exec"), await key(cluster, scope="exec")
    async with (
        aiohttp.ClientSession(headers={"X-API-KEY": one}) as session,
        aiohttp.ClientSession(headers={"X-API-KEY": other}) as stranger,
    ):
        made = []
        for number in range(4):
            body = {"templateID": "base", "timeout": 600, "metadata": {"number": str(number)}}
            async with session.post(f"{url}/v2/sandboxes", json=body) as answer:
                assert answer.status == 201, await answer.text()
                made.append(await answer.json())
        ids = [item["sandboxID"] for item in made]
        there = await places(cluster)
        assert {there[f"s-{id[1:]}"] for id in ids} == {"one", "two"}
        assert made[0]["domain"] == url.removeprefix("http://")
        # One list of both hosts, by pages, the newest first; another owner has another.
        listed, after = [], ""
        while True:
            async with session.get(f"{url}/v2/sandboxes?limit=3{after}") as answer:
                listed += [item["sandboxID"] for item in await answer.json()]
                if (token := answer.headers.get("x-next-token")) is None:
                    break
                after = f"&nextToken={token}"
        assert listed == ids[::-1]
        async with stranger.get(f"{url}/v2/sandboxes") as answer:
            assert await answer.json() == []
        async with stranger.delete(f"{url}/sandboxes/{ids[0]}") as answer:
            assert answer.status == 404 and (await answer.json())["code"] == 404
        # A host's token of one sandbox is good for it alone, wherever it is.
        for mine in made:
            headers = {"X-Access-Token": mine["envdAccessToken"], "E2b-Sandbox-Port": "49983"}
            statuses = []
            for target in made:
                async with session.get(
                    f"{url}/files?path=/etc/hostname", headers={**headers, "E2b-Sandbox-Id": target["sandboxID"]}
                ) as answer:
                    statuses.append(answer.status == 200)
            assert statuses == [target is mine for target in made]
        for id in ids:
            async with session.delete(f"{url}/sandboxes/{id}") as answer:
                assert answer.status == 204
            async with session.get(f"{url}/sandboxes/{id}") as answer:
                assert answer.status == 404
        async with session.post(f"{url}/sandboxes", json={"templateID": "no-such"}) as answer:
            assert answer.status == 404 and "no-such" in (await answer.json())["message"]
        async with session.post(f"{url}/v3/templates", json={"name": "mine"}) as answer:
            assert answer.status == 403  # a key of scope exec
        async with aiohttp.ClientSession() as nobody, nobody.get(f"{url}/sandboxes") as answer:
            assert answer.status == 401


async def test_a_quota_counts_over_all_hosts(cluster: Cluster, url: str) -> None:
    few = await key(cluster, scope="exec", quota=TokenQuota(sandboxes=2))
    async with aiohttp.ClientSession(headers={"X-API-KEY": few}) as session:

        async def create(**headers: str) -> int:
            async with session.post(f"{url}/sandboxes", json={"templateID": "base"}, headers=headers) as answer:
                return answer.status

        # The same call again is the same sandbox.
        assert [await create(**{"Idempotency-Key": "one"}) for _ in range(2)] == [201, 201]
        assert [await create() for _ in range(2)] == [201, 429]
        async with session.get(f"{url}/sandboxes") as answer:
            mine = [item["sandboxID"] for item in await answer.json()]
        assert len(mine) == 2
        for id in mine:
            async with session.delete(f"{url}/sandboxes/{id}") as answer:
                assert answer.status == 204
        await until(lambda: _none(cluster, mine), "they are gone")


async def _none(cluster: Cluster, ids: list[str]) -> bool:
    return not {f"s-{id[1:]}" for id in ids} & set(await places(cluster))


async def test_a_template_is_built_by_one_host_and_found_there(cluster: Cluster, url: str) -> None:
    """Its archive passes by an address of the coordinator's; a sandbox of it is made before any host reports it."""
    admin, name = await key(cluster, scope="admin"), "built-through-a-coordinator"
    async with aiohttp.ClientSession(headers={"X-API-KEY": admin}) as session, aiohttp.ClientSession() as nobody:

        async def call(method: str, path: str, body: object = None) -> tuple[int, Any]:
            async with session.request(method, url + path, json=body) as answer:
                return answer.status, await answer.json() if await answer.read() else None

        status, build = await call("POST", "/v3/templates", {"name": name, "tags": ["v1"]})
        assert (status, build["templateID"]) == (202, f"{name}:v1"), build
        data = archive("brought", b"by its client")
        files = f"/templates/{build['templateID']}/files/{hashlib.sha256(data).hexdigest()}"
        status, place = await call("GET", files)
        assert status == 201 and not place["present"] and place["url"].startswith(f"{url}/templates/archives/")
        for address, code in ((place["url"].partition("?")[0], 404), (place["url"], 200)):
            async with nobody.put(address, data=data) as answer:
                assert answer.status == code, await answer.text()
        steps = [
            {"type": "COPY", "args": ["brought", "brought", "", ""], "filesHash": hashlib.sha256(data).hexdigest()},
            {"type": "RUN", "args": ["cp brought copied"]},
        ]
        path = f"/v2/templates/{build['templateID']}/builds/{build['buildID']}"
        assert (await call("POST", path, {"fromImage": "debian", "steps": steps}))[0] == 202

        async def ended() -> Any:
            state = (await call("GET", f"{path.removeprefix('/v2')}/status"))[1]
            return state if state["status"] in ("ready", "error") else None

        state = await until(ended, "the build has ended", 900)
        assert state["status"] == "ready", state.get("reason")
        made = [await call("POST", "/v2/sandboxes", {"templateID": f"{name}:v1"}) for _ in range(2)]
        assert [status for status, _ in made] == [201, 201]
        there = await places(cluster)
        assert len({there[f"s-{item['sandboxID'][1:]}"] for _, item in made}) == 1
        for _, item in made:
            headers = {"X-Access-Token": item["envdAccessToken"], "E2b-Sandbox-Port": "49983"}
            headers["E2b-Sandbox-Id"] = item["sandboxID"]
            async with nobody.get(f"{url}/files?path=copied", headers=headers) as answer:
                assert (answer.status, await answer.read()) == (200, b"by its client")
            assert (await call("DELETE", f"/sandboxes/{item['sandboxID']}"))[0] == 204
        assert (await call("DELETE", f"/templates/{name}"))[0] == 204
        status, refused = await call("GET", "/templates/of-nobody/builds/1/status")
        assert status == 404 and "no host builds" in refused["message"]


def archive(name: str, content: bytes) -> bytes:
    """A tar archive of one file."""
    with io.BytesIO() as data:
        with tarfile.open(fileobj=data, mode="w:gz") as made:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            made.addfile(entry, io.BytesIO(content))
        return data.getvalue()


async def test_names_of_hosts_are_below_the_domain_of_the_coordinator(cluster: Cluster, url: str) -> None:
    cluster.kill()
    cluster.options("--e2b-domain", "sandboxes.example.org")
    cluster.start()
    async with aiohttp.ClientSession(headers={"X-API-KEY": await key(cluster, scope="exec")}) as session:

        async def create() -> Any:
            async with session.post(f"{url}/v2/sandboxes", json={"templateID": "base"}) as answer:
                return await answer.json() if answer.status == 201 else None

        made = await until(create, "a host has come back")
        assert made["domain"] == "sandboxes.example.org"
        name = f"49983-{made['sandboxID']}.{made['domain']}"
        headers = {"X-Access-Token": made["envdAccessToken"], "Host": name}
        async with session.get(f"{url}/files?path=/etc/hostname", headers=headers) as answer:
            assert answer.status == 200, await answer.text()
        async with session.delete(f"{url}/sandboxes/{made['sandboxID']}") as answer:
            assert answer.status == 204
