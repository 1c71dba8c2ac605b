"""`docker build` in a sandbox: the classic call of the Engine API, carried out by the builder of the host.

Guarantee: a build fetches nothing itself, its steps reach what the sandbox may reach, within its limits; what comes out
has a name in that sandbox, and in those that descend from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING

from aiohttp import web

from daemon.docker import streams
from daemon.docker.paths import Call
from sandbox import Client
from sandbox.container.cgroup import parse_bytes
from sandbox.errors import Invalid, NoSpace, NotFound, PagurusError
from sandbox.image import reference
from sandbox.image.store import BUILT
from sandbox.messages import ImageInfo
from sandbox.tree import host_files, safe_path

if TYPE_CHECKING:
    from daemon.docker.engine import Engine
    from daemon.host.host import Host

MAX_CONTEXT = 4 << 30  # bytes of a context where the sandbox has no limit of its disk
MAX_BUILT = 16 << 30  # bytes of the images that were built in a sandbox without a limit of its disk
MAX_DOCKERFILE = 1 << 20
MAX_LINES, MAX_LINE = 10_000, 4096  # that wait for the client; characters of one
MAX_IMAGES = 32  # names of one sandbox


class Builds:
    """The images on a host that were built in sandboxes."""

    def __init__(self, host: Host, address: str) -> None:
        """`address`: of the daemon's own socket."""
        self._host, self.address = host, address
        self.under_way: set[str] = set()

    async def sweep(self, *, without: str = "") -> None:
        """Remove those that no sandbox and no checkpoint knows; `without`: of a sandbox that is being removed."""
        host = self._host
        rows = [*host.making.rows(), *(live.row for live in host.live_sandboxes.values())]
        checkpoints = list(host.services.checkpoints.values())
        compositions = [row.composition for row in rows if row.id != without]
        compositions += [row.composed(None) for row in checkpoints if row.sandbox != without]
        compositions += [row.template.composition for row in checkpoints if row.template is not None]
        used = {name for one in compositions if one is not None for name in one.images.values()} | self.under_way
        for name in await asyncio.to_thread(host.images.list):
            if name.startswith(BUILT) and name not in used:
                with contextlib.suppress(NotFound):
                    await asyncio.to_thread(host.images.remove, name, host.images_used)


async def answer(engine: Engine, call: Call) -> web.StreamResponse:
    """The lines of a build as they come, and at the end its image or its error."""
    names = [reference.parse(tag).name for tag in call.query.getall("t", [])]
    if len({*engine.composition.images, *names}) > MAX_IMAGES:
        raise Invalid(f"a sandbox names {MAX_IMAGES} images at most", hint="docker rmi")
    if call.query.get("remote"):
        raise Invalid("a build in a sandbox takes its context from there", hint="clone it, and build the directory")
    disk = engine.live.row.limits.disk
    limit = MAX_CONTEXT if disk is None else min(MAX_CONTEXT, parse_bytes(disk))
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    lines: asyncio.Queue[dict[str, object] | None] = asyncio.Queue()
    async with engine.building:
        with host_files.fresh_directory(engine.host.images.directory) as directory:
            await streams.fed(call.request, functools.partial(_unpack, directory, limit))
            await response.prepare(call.request)
            work = asyncio.ensure_future(_build(engine, call, directory, names, lines))
            try:
                while (line := await lines.get()) is not None:
                    await response.write(json.dumps(line).encode() + b"\r\n")
            finally:
                work.cancel()
                await asyncio.wait({work})
    await response.write_eof()
    return response


async def _build(
    engine: Engine, call: Call, directory: Path, names: list[str], lines: asyncio.Queue[dict[str, object] | None]
) -> None:
    row, made = engine.live.row, f"{BUILT}{secrets.token_hex(8)}"
    file, quiet = call.query.get("dockerfile", "") or "Dockerfile", call.flag("q")
    said: asyncio.Queue[dict[str, object] | None] = asyncio.Queue() if quiet else lines
    engine.builds.under_way.add(made)
    try:
        arguments = json.loads(call.query.get("buildargs", "") or "{}")
        if not isinstance(arguments, dict):
            raise Invalid("`buildargs` is no object", hint="an object of strings")
        text = await asyncio.to_thread(host_files.read, directory, file.lstrip("/"), MAX_DOCKERFILE)
        # Not in the context, where a link on the way could lead out of it.
        with host_files.fresh_directory(engine.host.images.directory) as own:
            await asyncio.to_thread(host_files.write, own / "Dockerfile", text)
            async with Client(engine.builds.address) as client:
                image = await client.images.build(
                    made,
                    directory,
                    file=own / "Dockerfile",
                    arguments={str(key): str(value) for key, value in arguments.items() if value is not None},
                    target=call.query.get("target") or None,
                    network=row.network,
                    limits=row.limits,
                    cache=not call.flag("nocache"),
                    offline=True,
                    contexts=_contexts(engine.composition.images),
                    output=functools.partial(_say, said),
                )
        await _need_space(engine, image)
        await engine.live.added.change_images(add=dict.fromkeys(names or [f"{image.digest[:12]}:latest"], made))
        if quiet:
            lines.put_nowait({"stream": f"sha256:{image.digest}\n"})
            return
        lines.put_nowait({"aux": {"ID": f"sha256:{image.digest}"}})
        lines.put_nowait({"stream": f"Successfully built {image.digest[:12]}\n"})
        for name in names:
            lines.put_nowait({"stream": f"Successfully tagged {name}\n"})
    except (PagurusError, OSError, ValueError) as error:
        while quiet and not said.empty():  # a client that wants the id alone shows all where there is none
            lines.put_nowait(said.get_nowait())
        lines.put_nowait({"errorDetail": {"message": str(error)}, "error": str(error)})
    finally:
        engine.builds.under_way.discard(made)
        await engine.builds.sweep()  # a name may have meant another image
        lines.put_nowait(None)


async def _need_space(engine: Engine, image: ImageInfo) -> None:
    """Images lie outside the limit of a sandbox's disk, and may take as much again. Raises NoSpace."""
    disk, images = engine.live.row.limits.disk, engine.host.images

    def size() -> int:
        sizes = {image.digest: image.size}
        for name in engine.composition.images.values():
            with contextlib.suppress(NotFound):
                info = images.info(name)
                sizes[info.digest] = info.size
        return sum(sizes.values())

    limit = MAX_BUILT if disk is None else parse_bytes(disk)
    if (total := await asyncio.to_thread(size)) > limit:
        raise NoSpace(
            f"the images built in this sandbox would be {total} bytes; {limit} is the limit", hint="docker rmi"
        )


def _say(lines: asyncio.Queue[dict[str, object] | None], line: str) -> None:
    """Pass a line on to the client. One that does not read loses some: the build does not wait for it."""
    if lines.qsize() < MAX_LINES:
        lines.put_nowait({"stream": f"{line[:MAX_LINE]}\n"})


def _unpack(directory: Path, limit: int, stream: IO[bytes]) -> None:
    with safe_path.directory(directory) as top:
        host_files.unpack(stream, top, limit=limit)


def _contexts(images: Mapping[str, str]) -> dict[str, str]:
    """What FROM may name in addition to the images of the host."""
    result = {}
    for tag, name in images.items():
        result[tag] = result[tag.removesuffix(":latest")] = f"docker-image://{name}"
    return result
