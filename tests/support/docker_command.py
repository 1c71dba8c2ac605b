"""Docker's own command in the main service of a composition, and the plugin `docker compose` where there is one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

from sandbox import Client, Sandbox

_FOUND = shutil.which("docker")
COMMAND = None if _FOUND is None else Path(_FOUND).resolve()
MISSING = "there is no docker client: install docker-cli or docker.io"
#: Version 2, which Debian's docker-compose is from Debian 13 on.
PLUGIN_MISSING = "there is no plugin `docker compose`: install docker-compose 2, or name it in PAGURUS_COMPOSE_PLUGIN"
_PLACES = ("/usr/libexec", "/usr/lib", "/usr/local/libexec", "/usr/local/lib")
PROGRAMS = Path(__file__).parents[1] / "conformance/compose/programs"
ROUNDS = "/rounds"  # in a container with traffic: how many it has made
TIMEOUT = 120.0  # seconds
#: A container whose traffic goes over one connection to a service of the composition.
TRAFFIC = (
    "docker run -d --name traffic -v /programs:/programs:ro debian "
    f"python3 /programs/app.py client transaction store:6379 {ROUNDS}"
)

FILE = """
services:
  agent:
    image: debian
    command: sleep infinity
    volumes: ["{client}:/opt/client:ro", "work:/work"]
  store:
    image: debian
    command: python3 /programs/app.py store 6379
    configs: [{{source: app, target: /programs/app.py}}]
volumes: {{work: }}
configs: {{app: {{file: {programs}/app.py}}}}
"""


def plugin() -> Path | None:
    """The program of `docker compose`, version 2."""
    named = os.environ.get("PAGURUS_COMPOSE_PLUGIN")
    places = [Path(named)] if named else [Path(place, "docker/cli-plugins/docker-compose") for place in _PLACES]
    return next((place.resolve() for place in places if place.is_file()), None)


@contextlib.asynccontextmanager
async def with_docker(
    host: Client, directory: Path, *, compose: bool = False, copied: bool = False
) -> AsyncIterator[Sandbox]:
    """An agent that has docker, and a store. `copied`: with the command in its own files, not mounted."""
    assert COMMAND is not None
    clients = directory / "client"
    clients.mkdir()
    found = {"docker": COMMAND}
    if compose and (program := plugin()) is not None:
        found["docker-compose"] = program
    for name, program in found.items():
        try:
            os.link(program, clients / name)
        except OSError:  # another file system
            shutil.copy(program, clients / name)
    (directory / "compose.yaml").write_text(FILE.format(client=clients, programs=PROGRAMS))
    async with host.compose(directory, env={}, docker=True, copy_binds=copied) as sb:
        await sb.exec("ln -s /opt/client/docker /usr/local/bin/; mkdir -p /usr/local/lib/docker/cli-plugins")
        await sb.exec("ln -s /opt/client/docker-compose /usr/local/lib/docker/cli-plugins/")
        await sb.files.upload(PROGRAMS, "/programs")
        yield sb


async def says(sb: Sandbox, command: str, *, code: int = 0) -> str:
    """What a command of the agent prints; it must end with this code."""
    done = await sb.exec(command, timeout=100)
    said = (done.stdout + done.stderr).decode()
    assert done.exit_code == code, f"{command}: {done.exit_code}: {said}"
    return said.strip()


async def more_rounds(sb: Sandbox, count: int = 10) -> None:
    """Wait until the traffic of a container has made so many more rounds."""

    async def rounds() -> int:
        done = await sb.exec(f"docker exec traffic cat {ROUNDS}")
        return int(done.text) if done.exit_code == 0 else 0

    first = await rounds()
    async with asyncio.timeout(TIMEOUT):
        while await rounds() < first + count:
            state = await says(sb, "docker inspect -f '{{.State.Status}}' traffic")
            assert state == "running", await says(sb, "docker logs traffic")
