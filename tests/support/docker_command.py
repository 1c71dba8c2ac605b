"""Docker's own command in the main service of a composition, and the plugin `docker compose` where there is one."""

from __future__ import annotations

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
async def with_docker(host: Client, directory: Path, *, compose: bool = False) -> AsyncIterator[Sandbox]:
    """An agent that has docker, and a store."""
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
    async with host.compose(directory, env={}, docker=True) as sb:
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
