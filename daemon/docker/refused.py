"""The calls of the Engine API that a sandbox does not answer, each with what to do instead."""

from __future__ import annotations

from aiohttp import web

from daemon.docker.engine import Engine
from daemon.docker.paths import ROUTES, Call
from sandbox.errors import Unsupported

_BUILT_HERE = "images are those of the host, and what `docker build` makes here"
_NO_SWARM = ("a sandbox is no swarm", "docker compose")
NO_BUILDKIT = ("there is no BuildKit in a sandbox", "use the classic builder: DOCKER_BUILDKIT=0 docker build")
_NO_REGISTRY = ("a sandbox reaches no registry", _BUILT_HERE)
_NO_ARCHIVE = ("images neither leave a sandbox nor come in as archives", _BUILT_HERE)

#: (method, path, what is not there, what to do instead).
CALLS = (
    ("POST", "/containers/{id}/pause", "a container is not paused alone", "docker stop, and docker start"),
    ("POST", "/containers/{id}/unpause", "a container is not paused alone", "docker start"),
    ("POST", "/containers/{id}/update", "a container keeps its limits and policies", "docker run, with the new ones"),
    ("GET", "/containers/{id}/stats", "containers are not measured one by one", "docker top, or /proc"),
    ("GET", "/containers/{id}/changes", "changes of a container are not listed", "docker exec NAME find / -newer ..."),
    ("GET", "/containers/{id}/export", "a container is not exported", "docker cp NAME:/ - writes its files as tar"),
    ("GET", "/containers/{id}/attach/ws", "containers are not attached over WebSockets", "docker attach"),
    ("POST", "/commit", "a container does not become an image", "write a Dockerfile, and docker build it"),
    ("GET", "/images/search", *_NO_REGISTRY),
    ("GET", "/distribution/{name}/json", *_NO_REGISTRY),
    ("POST", "/auth", *_NO_REGISTRY),
    ("POST", "/images/{name}/push", *_NO_REGISTRY),
    ("GET", "/images/get", *_NO_ARCHIVE),
    ("GET", "/images/{name}/get", *_NO_ARCHIVE),
    ("POST", "/images/load", *_NO_ARCHIVE),
    ("POST", "/session", *NO_BUILDKIT),
    ("POST", "/grpc", *NO_BUILDKIT),
    ("PUT", "/volumes/{id}", *_NO_SWARM),
    ("GET", "/plugins", "a sandbox has no plugins", "use the drivers that are there: local, bridge"),
    *((method, f"/plugins/{what}", "a sandbox has no plugins", "use the drivers that are there: local, bridge")
      for method, what in (("GET", "privileges"), ("POST", "pull"), ("POST", "create"))),
    *((method, f"/{what}{rest}", *_NO_SWARM)
      for what in ("swarm", "nodes", "services", "tasks", "secrets", "configs")
      for method, rest in (("GET", ""), ("GET", "/{name}"), ("POST", "/{name}"))),
)  # fmt: skip


def _register(method: str, path: str, why: str, instead: str) -> None:
    @ROUTES(method, path)
    async def _refuse(engine: Engine, call: Call) -> web.StreamResponse:
        raise Unsupported(why, hint=instead)


for _call in CALLS:
    _register(*_call)
