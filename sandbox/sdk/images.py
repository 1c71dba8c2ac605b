"""The images of a host, as the SDK offers them: ``host.images``."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

import msgspec

from sandbox.errors import Invalid, PagurusError, Protocol, from_body
from sandbox.messages import (
    CheckpointInfo,
    CommitRequest,
    ImageConfig,
    ImageInfo,
    KeepStep,
    Limits,
    NameImage,
    Network,
    PullImage,
    PullProgress,
    PushImage,
    PushResult,
    StepInfo,
    StepsRemoved,
    StepsTarget,
)
from sandbox.messages.images import MAX_LINE, BuildInfo, BuildReport, BuildRequest
from sandbox.sdk.transport import Facet, encoded

if TYPE_CHECKING:
    from sandbox.sdk.client import Client

TAR = "application/x-tar"
CHUNK = 1 << 20
LOG_INTERVAL = 1.0  # seconds between two reports of a build
LINES_AT_ONCE = 500
MAX_LINES = 20_000  # of a build's log that wait to be sent
MAX_REASON = 10_000  # characters
MAX_TITLE = 200  # characters of a kept step's instruction


class Images(Facet):
    """The images that sandboxes start from. Raises ImageNotFound, Conflict (the name is taken), Invalid."""

    _client: Client  # which makes sandboxes too, for builds

    async def list(self) -> list[ImageInfo]:
        """All images, by name."""
        return await self._client.call("GET", "/v1/images", list[ImageInfo])

    async def get(self, name: str) -> ImageInfo:
        """One image."""
        return await self._client.call("GET", f"/v1/images/{quote(name, safe='')}", ImageInfo)

    async def upload(
        self, name: str, archive: str | Path, *, replace: bool = False, progress: Callable[[int], Any] | None = None
    ) -> ImageInfo:
        """Make an image from a local archive: an OCI layout, what ``docker save`` writes, or a tar of a root.

        `progress` is called with the bytes sent so far.
        """
        path = Path(archive)
        if not await asyncio.to_thread(path.is_file):
            raise Invalid(f"{path} is not a file", hint="name an archive: a tar, an OCI layout as a tar, docker save")
        url = f"/v1/images/{quote(name, safe='')}?{encoded(replace='true' if replace else 'false')}"
        return msgspec.msgpack.decode(await self._client.raw("PUT", url, _chunks(path, progress), TAR), type=ImageInfo)

    async def pull(
        self, reference: str, name: str | None = None, *, progress: Callable[[int, int], object] | None = None
    ) -> ImageInfo:
        """Take an image from a registry, by the credentials of the host: ``pull("python:3.12-slim")``.

        It is called as it is there, or `name`. Only layers that are missing are fetched. Raises ImageNotFound,
        Forbidden (log in on the host), TooMany (the registry's limit), Unsupported, Invalid. `progress` is given the
        bytes of its layers that are here, and of how many.
        """
        request = PullImage(reference=reference, name=name)
        parts = self._client.frames("POST", "/v1/images/pull/stream", PullProgress, request)
        async with contextlib.aclosing(parts):
            async for part in parts:
                if part.error is not None:
                    raise from_body(part.error)
                if part.image is not None:
                    return part.image
                if progress is not None:
                    progress(part.done, part.total)
        raise Protocol(f"the pull of {reference} broke off", hint="is the daemon alive?")

    async def export(self, name: str, archive: str | Path, *, progress: Callable[[int], Any] | None = None) -> None:
        """Write an image to a new local file: a tar of an OCI layout, which `docker load` reads as well.

        `progress` is called with the bytes written so far. A failure leaves no file.
        """
        path, done = Path(archive), 0
        file = await asyncio.to_thread(os.open, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            with os.fdopen(file, "wb", buffering=CHUNK) as out:
                url = f"/v1/images/{quote(name, safe='')}/archive"
                async with self._client.request("GET", url, None, "") as response:
                    async for part in response.content.iter_chunked(CHUNK):
                        await asyncio.to_thread(out.write, part)
                        done += len(part)
                        if progress is not None:
                            progress(done)
        except BaseException:
            await asyncio.to_thread(path.unlink, missing_ok=True)
            raise

    async def push(self, name: str, reference: str) -> PushResult:
        """Send an image to a registry, by the credentials of the host: ``push("web", "registry:5000/team/web:2")``."""
        url = f"/v1/images/{quote(name, safe='')}/push"
        return await self._client.call("POST", url, PushResult, PushImage(reference=reference))

    async def commit(
        self,
        checkpoint: CheckpointInfo | str,
        name: str,
        *,
        config: ImageConfig | None = None,
        replace: bool = False,
    ) -> ImageInfo:
        """Make an image of the files of a checkpoint. `config`: None keeps that of the image below it."""
        number = checkpoint if isinstance(checkpoint, str) else checkpoint.id
        request = CommitRequest(name=name, config=config, replace=replace)
        return await self._client.call("POST", f"/v1/checkpoints/{quote(number, safe='')}/image", ImageInfo, request)

    async def give_name(
        self, image: str, name: str, *, config: ImageConfig | None = None, replace: bool = False
    ) -> ImageInfo:
        """Give the tree of an image another name. `config`: None keeps that of the image. No file is copied."""
        request = NameImage(name=name, config=config, replace=replace)
        return await self._client.call("POST", f"/v1/images/{quote(image, safe='')}/name", ImageInfo, request)

    async def build(
        self,
        name: str,
        context: str | Path,
        *,
        file: str | Path | None = None,
        arguments: dict[str, str] | None = None,
        target: str | None = None,
        network: Network | None = None,
        limits: Limits | None = None,
        replace: bool = False,
        cache: bool = True,
        offline: bool = False,
        secrets: Mapping[str, bytes] | None = None,
        ssh: Mapping[str, str | Path] | None = None,
        contexts: Mapping[str, str] | None = None,
        output: Callable[[str], Any] | None = None,
    ) -> ImageInfo:
        """Build a Dockerfile, every step in a sandbox; no Docker Engine is needed.

        `context`: the directory that COPY reads, or a git repository (``https://host/project.git#ref:directory``).
        `file`: the Dockerfile, when it is not in there; of a repository, its path within. `network`: what RUN may reach
        (nothing, unless said). `cache`: do not repeat what the host keeps of an earlier build, by its content.
        `offline`: pull no image, and fetch nothing for ADD. `secrets`: by id, for ``RUN --mount=type=secret``; they are
        in no image and in no key. `ssh`: sockets of agents of keys by id, for ``RUN --mount=type=ssh``; ``default`` is
        that of a mount without one. `contexts`: directories and images (``docker-image://...``) by the names that FROM
        and --from use for them. `output` is called with each line. Raises Invalid with the line of the Dockerfile.
        """
        from sandbox.image import dockerfile
        from sandbox.image.stages import is_repository
        from sandbox.sdk.build import Builder
        from sandbox.sdk.sources import repository
        from sandbox.sdk.sources.context import BuildContext, read_dockerfile
        from sandbox.tree import host_files

        async with _BuildLog(self._client, name) as log, contextlib.AsyncExitStack() as undo:
            top, place = Path(context), None if file is None else Path(file)
            if remote := is_repository(str(context)):
                directory = undo.enter_context(host_files.fresh_directory())
                _, top = await asyncio.to_thread(repository.clone, str(context), directory, "", False)
                place = None if file is None else Path(top, file)
            text = await asyncio.to_thread(read_dockerfile, top, place)
            lasting, own = not (remote or offline), place or Path(top, "Dockerfile")
            about = await asyncio.to_thread(BuildContext.of, top, own, lasting=lasting)
            builder = Builder(
                self._client,
                about,
                dockerfile.parse(text),
                arguments=arguments or {},
                network=network or Network.none(),
                limits=limits or Limits(),
                cache=cache,
                offline=offline,
                secrets=secrets,
                agents={name: Path(place) for name, place in (ssh or {}).items()},
                contexts=contexts,
                output=output,
                log=log.say,
            )
            return await builder.build(name, target=target, replace_name=replace)

    async def steps(self) -> Sequence[StepInfo]:
        """The steps of builds that the host keeps, the one used last first."""
        return await self._client.call("GET", "/v1/steps", list[StepInfo])

    async def prune(self) -> StepsRemoved:
        """Remove the kept steps, but for those that living sandboxes are based on."""
        return await self._client.call("DELETE", "/v1/steps", StepsRemoved)

    async def find_steps(self, keys: Sequence[str]) -> Sequence[StepInfo]:
        """The kept steps with one of these keys (see :mod:`sandbox.sdk.plan`)."""
        return await self._client.call("POST", "/v1/steps/find", list[StepInfo], StepsTarget(keys=[*keys]))

    async def keep_step(self, key: str, checkpoint: str, title: str) -> StepInfo:
        """Keep a checkpoint as the outcome of a step of a build, once it is durable."""
        request = KeepStep(key=key, checkpoint=checkpoint, title=title[:MAX_TITLE])
        return await self._client.call("PUT", "/v1/steps", StepInfo, request)

    async def remove(self, name: str) -> None:
        """Remove a name. The tree stays while another name or a sandbox needs it."""
        await self._client.call("DELETE", f"/v1/images/{quote(name, safe='')}", dict[str, Any])


class _BuildLog:
    """What a build says, sent to the daemon, which keeps it for its page. No build fails because of it."""

    def __init__(self, client: Client, name: str) -> None:
        self._client, self._name = client, name
        self._path: str | None = None  # None: the daemon takes none
        self._lines: list[str] = []
        self._sending: asyncio.Task[None] | None = None

    async def __aenter__(self) -> _BuildLog:
        with contextlib.suppress(PagurusError):  # an earlier daemon, or a coordinator
            made = await self._client.call("POST", "/v1/builds", BuildInfo, BuildRequest(name=self._name))
            self._path = f"/v1/builds/{made.id}"
            self._sending = asyncio.create_task(self._send())
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._sending is None:
            return
        self._sending.cancel()
        await asyncio.wait([self._sending])
        state: Literal["done", "failed"] = "done" if error is None else "failed"
        reason = "" if error is None else (str(error) or type(error).__name__)[:MAX_REASON]
        with contextlib.suppress(PagurusError):
            await self._flush()
            await self._report(BuildReport(state=state, error=reason))

    def say(self, line: str) -> None:
        if self._path is not None and len(self._lines) < MAX_LINES:
            self._lines.append(line[:MAX_LINE])

    async def _send(self) -> None:
        with contextlib.suppress(PagurusError):
            while True:
                await asyncio.sleep(LOG_INTERVAL)
                await self._flush()
                await self._report(BuildReport())  # it is still there

    async def _flush(self) -> None:
        while lines := self._lines[:LINES_AT_ONCE]:
            del self._lines[: len(lines)]
            await self._report(BuildReport(lines=lines))

    async def _report(self, report: BuildReport) -> None:
        assert self._path is not None
        await self._client.call("POST", self._path, BuildInfo, report)


async def _chunks(path: Path, progress: Callable[[int], Any] | None) -> AsyncIterator[bytes]:
    file = await asyncio.to_thread(os.open, path, os.O_RDONLY | os.O_CLOEXEC)
    sent = 0
    try:
        while part := await asyncio.to_thread(os.read, file, CHUNK):
            yield part
            sent += len(part)
            if progress is not None:
                progress(sent)
    finally:
        os.close(file)
