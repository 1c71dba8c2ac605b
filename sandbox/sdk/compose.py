"""A sandbox from compose files: ``host.compose("compose.yaml")``.

::

    files ─▶ Project ─▶ images built and pulled ─▶ sandbox created ─▶ files copied into services ─▶ services up
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sandbox.container.cgroup import parse_bytes
from sandbox.errors import Conflict, ImageNotFound, Invalid, PagurusError
from sandbox.messages import CreateRequest, Limits, Network, SandboxInfo
from sandbox.sdk.handle import Creation, Sandbox

if TYPE_CHECKING:
    from sandbox.compose.project import DirectoryCopy, Project, ServiceBuild
    from sandbox.sdk.client import Client

PULLS = 3  # images that are pulled at once
MEMORY = 1 << 30  # bytes that a service adds to the sandbox's limit when it has none of its own
PROCESSES = 256  # the same of tasks
MAX_COPY = 256 << 20  # bytes of a file that is copied into a service
Pull = Literal["missing", "always", "never"]


class ComposeCreation(Creation):
    """A composition that is being made: as :class:`Creation`, with all that comes before and after."""

    def __init__(
        self,
        client: Client,
        request: CreateRequest,
        load: Callable[[], Project],
        *,
        limits: Limits | None,
        build: bool,
        pull: Pull,
        up: bool,
        wait: bool,
        timeout: float,
        output: Callable[[str], Any] | None,
    ) -> None:
        super().__init__(client, request)
        self._load, self._limits = load, limits
        self._build, self._pull, self._output = build, pull, output
        self._up, self._wait, self._timeout = up, wait, timeout

    def __repr__(self) -> str:
        return "<a sandbox of compose files to be made: await it, or enter it with `async with`>"

    async def _make(self) -> Sandbox:
        project = await asyncio.to_thread(self._load)
        if self._output is not None:
            for line in project.notes:
                self._output(line)
        await provide_images(self._client, project, build=self._build, pull=self._pull, output=self._output)
        request = self.request
        request.composition = project.composition
        request.limits = self._limits or limits_of(project)
        request.no_new_privs = request.no_new_privs or project.no_new_privs
        request.labels = {"compose.project": project.name, **request.labels}
        info = await self._client.call("POST", "/v1/sandboxes", SandboxInfo, request, keyed=True)
        sandbox = Sandbox(self._client, info)
        try:
            await copy_files(sandbox, project)
            if self._up:
                await sandbox.services.up(wait=self._wait, timeout=self._timeout)
        except BaseException:
            with contextlib.suppress(PagurusError):
                await asyncio.shield(sandbox.remove())
            raise
        return sandbox


def limits_of(project: Project) -> Limits:
    """Those of all services together; a service without one adds 1 GiB of memory and 256 tasks."""
    own = [service.limits for service in project.composition.services.values()]
    cores = [one.cpus for one in own]
    return Limits(
        cpus=None if None in cores else sum(core for core in cores if core is not None),
        memory=sum(MEMORY if one.memory is None else parse_bytes(one.memory) for one in own),
        processes=sum(PROCESSES if one.processes is None else one.processes for one in own),
        open_files=max(Limits().open_files, project.open_files or 0),
    )


# --------------------------------------------------------------------------- images


async def provide_images(
    client: Client, project: Project, *, build: bool, pull: Pull, output: Callable[[str], Any] | None = None
) -> None:
    """Build the images of services with a Dockerfile, and pull those of the others that are missing."""
    builds = {item.image: item for item in project.builds.values()} if build else {}
    for item in builds.values():
        await _build(client, item, output)
    policies: dict[str, str] = {}
    for name, service in project.composition.services.items():
        if name not in project.builds:
            policies.setdefault(service.image, project.policies.get(name, pull))
    limit = asyncio.Semaphore(PULLS)

    async def provide(image: str, policy: str) -> None:
        async with limit:
            if policy == "always" or not await _is_there(client, image):
                if policy == "never":
                    raise ImageNotFound(f"no image {image!r}", hint="pull it, or let it be pulled: pull='missing'")
                if output is not None:
                    output(f"pull {image}")
                await client.images.pull(image)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_collected(provide(*item))) for item in policies.items()]
    for task in tasks:
        if (error := task.result()) is not None:
            raise error


async def _collected(work: Awaitable[None]) -> PagurusError | None:
    """The error of some work, which leaves the others at theirs."""
    try:
        await work
    except PagurusError as error:
        return error
    return None


async def _is_there(client: Client, image: str) -> bool:
    try:
        await client.images.get(image)
    except ImageNotFound:
        return False
    return True


async def _build(client: Client, item: ServiceBuild, output: Callable[[str], Any] | None) -> None:
    with contextlib.ExitStack() as undo:
        file: Path | None = None if item.dockerfile is None else Path(item.dockerfile)
        if item.inline:
            file = undo.enter_context(_inline(item.inline))
        try:
            await client.images.build(
                item.image,
                item.context,
                file=file,
                arguments=item.arguments,
                target=item.target,
                network=Network.open() if item.network else Network.none(),
                replace=True,
                cache=item.cache,
                secrets=item.secrets,
                contexts=item.contexts or None,
                output=output,
            )
        except Conflict:  # another client builds the same
            await client.images.get(item.image)
        except Invalid as error:
            error.message = f"the image {item.image}: {error.message}"
            raise


@contextlib.contextmanager
def _inline(text: str) -> Iterator[Path]:
    """A Dockerfile that stands in the compose file."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="pagurus-compose-") as directory:
        file = Path(directory, "Dockerfile")
        file.write_text(text)
        yield file


# --------------------------------------------------------------------------- files


def hidden(project: Project, tree: DirectoryCopy) -> list[str]:
    """The parts of a directory in whose place a service has something else, such as ``node_modules`` of a volume."""
    service = project.composition.services[tree.service]
    places = [*service.tmpfs, *(one.target for one in service.volumes), *(one.target for one in service.mounts)]
    places += [other.target for other in project.directories if other.service == tree.service]
    above = f"{tree.target.rstrip('/')}/"
    return [place.removeprefix(above) for place in places if place.startswith(above)]


async def copy_files(sandbox: Sandbox, project: Project) -> None:
    """Copy the files and directories that services have from this machine, and make the `working_dir` of each."""
    from sandbox.compose.read import read_file

    for name, service in project.composition.services.items():
        if service.workdir is not None:
            await sandbox.files.mkdir(service.workdir, service=name)
    for tree in sorted(project.directories, key=lambda tree: tree.target.count("/")):
        if not tree.source:
            await sandbox.files.mkdir(tree.target, service=tree.service)
            continue
        await sandbox.files.upload(tree.source, tree.target, service=tree.service, without=hidden(project, tree))
    for item in project.files:
        content, mode = item.content, item.mode
        if item.source is not None:
            content, own = await asyncio.to_thread(read_file, item.source, MAX_COPY, "file to copy")
            mode = own if mode is None else mode
        await sandbox.files.write(item.target, content, mode=0o444 if mode is None else mode, service=item.service)
