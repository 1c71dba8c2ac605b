"""`docker` in the main service of a composition: its containers are further services of the same sandbox."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from daemon.docker.service import PORT, for_main
from sandbox import Client
from sandbox.messages import Composition, Service
from sandbox.messages.services import ServiceNetwork, ServiceState, Volume
from tests.support.compositions import GET, ComposedSandbox, composed, server
from tests.support.daemon_host import IMAGE

# Carries out one call of the Engine API where DOCKER_HOST says, as a client of Docker's does.
CALL = """
import http.client, os, sys
peer = http.client.HTTPConnection(os.environ["DOCKER_HOST"].removeprefix("tcp://"), timeout=60)
method, path, body = sys.argv[1:]
peer.request(method, "/v1.43" + path, body or None, {"Content-Type": "application/json"})
answer = peer.getresponse()
print(answer.read().decode())
sys.exit(answer.status >= 400)
"""
IDLE = ["sleep", "infinity"]
COMPOSITION = Composition(
    services={
        "agent": Service(image=IMAGE, command=IDLE, volumes=[Volume(name="work", target="/work")]),
        "db": server("db"),
        "apart": Service(image=IMAGE, command=IDLE, networks={"inner": []}),
    },
    networks={"default": ServiceNetwork(), "inner": ServiceNetwork(internal=True)},
    main="agent",
)


@pytest.fixture
async def sb(host: Client) -> AsyncIterator[ComposedSandbox]:
    async with composed(host, COMPOSITION, docker=True) as sandbox:
        await sandbox.up()
        yield sandbox


async def call(sandbox: ComposedSandbox, method: str, path: str, body: object = None, service: str = "agent") -> str:
    words = [CALL, method, path, "" if body is None else json.dumps(body)]
    quoted = " ".join("'" + word.replace("'", "'\\''") + "'" for word in words)
    done = await sandbox.run(f"python3 -c {quoted}", service)
    assert done.exit_code == 0, (done.stdout, done.stderr)
    return done.stdout.decode().strip()


async def run(sandbox: ComposedSandbox, name: str, service: Service, **more: object) -> None:
    """As `docker run -d`."""
    body = {"Image": IMAGE, "Cmd": service.command, **more}
    await call(sandbox, "POST", f"/containers/create?name={name}", body)
    await call(sandbox, "POST", f"/containers/{name}/start")


async def answer(sandbox: ComposedSandbox, place: str, service: str) -> str:
    """What a server says, as soon as it listens."""
    for _ in range(200):
        done = await sandbox.run(GET % place, service)
        if done.exit_code == 0:
            return done.stdout.decode().split()[0]
        await asyncio.sleep(0.05)
    raise AssertionError(done.stderr)


def test_the_main_service_alone_is_told() -> None:
    made = for_main(COMPOSITION)
    assert [name for name, one in made.services.items() if "DOCKER_HOST" in one.env] == ["agent"]
    assert for_main(Composition(services={}, networks={}, main="")).services == {}


async def find_one_another(sandbox: ComposedSandbox) -> None:
    """extra is a container, db a service, and the agent finds both by name and extra by its port."""
    assert await answer(sandbox, "extra", "agent") == "extra"
    assert await answer(sandbox, "127.0.0.1:8000", "agent") == "extra"
    assert await answer(sandbox, "extra", "db") == "extra"
    assert await answer(sandbox, "db", "extra") == "db"
    assert (await sandbox.run(GET % "127.0.0.1:8000", "db")).exit_code != 0  # its own host, where nothing listens
    assert (await sandbox.run(GET % "extra", "apart")).exit_code != 0


async def test_containers_are_services_beside_the_others(sb: ComposedSandbox) -> None:
    bindings = {"80/tcp": [{"HostPort": "8000"}]}
    await run(sb, "extra", server("extra"), HostConfig={"PortBindings": bindings})
    listed = json.loads(await call(sb, "GET", "/containers/json"))
    assert {one["Names"][0] for one in listed} == {"/agent", "/db", "/apart", "/extra"}
    await find_one_another(sb)
    (fork,) = await sb.fork(1)
    try:
        await call(sb, "DELETE", "/containers/extra?force=1")
        assert set(await sb.services()) == set(COMPOSITION.services)
        assert (await sb.run(GET % "extra", "agent")).exit_code != 0
        assert (await fork.services())["extra"].state is ServiceState.RUNNING
        await find_one_another(fork)
        assert (await fork.restore()).verified
        await find_one_another(fork)
        await run(fork, "another", server("another"))
        assert await answer(fork, "another", "agent") == "another"
    finally:
        await fork.remove()


async def test_no_other_service_reaches_the_engine(sb: ComposedSandbox) -> None:
    for name in ("db", "apart"):
        assert await sb.says('echo "$DOCKER_HOST"', name) == ""
        asked = await sb.run(GET % f"127.0.0.1:{PORT}/version", name)
        assert asked.exit_code != 0 and b"refused" in asked.stderr
    assert json.loads(await call(sb, "GET", "/version"))["ApiVersion"]


async def test_directories_are_those_of_the_main_service(sb: ComposedSandbox) -> None:
    await sb.says(
        "mkdir -p /srv/given /data/deep; echo root > /srv/given/f; echo volume > /data/deep/f; ln -s /srv /to"
    )
    binds = ["/to/given:/a", "/data/deep:/b"]
    await run(sb, "extra", Service(image=IMAGE, command=IDLE), HostConfig={"Binds": binds})
    for said in ("back", "again"):
        assert await sb.says(f"cat /a/f /b/f; echo {said} > /a/g", "extra") == "root\nvolume"
        assert await sb.says("cat /srv/given/g", "agent") == said
        assert (await sb.restore()).verified


async def test_services_of_the_composition_stay(sb: ComposedSandbox) -> None:
    with pytest.raises(AssertionError, match="belongs to the composition"):
        await call(sb, "DELETE", "/containers/db?force=1")
    await call(sb, "POST", "/containers/db/restart?t=0")
    assert await answer(sb, "db", "agent") == "db"
