"""The SDK: a typed, asynchronous client of a sandbox host's daemon.

::

    async with Client() as host:
        async with host.create("debian") as sb:
            result = await sb.exec("make test", timeout=60)
            await sb.captured(result)
            print(result.exit_code, result.verdict, result.checkpoint)
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from sandbox.errors import CheckpointFailed
from sandbox.messages import (
    AtEnd,
    CheckpointInfo,
    CheckpointState,
    CreateRequest,
    ForkEntry,
    ForkRequest,
    Gateway,
    IgnoreRules,
    Limits,
    Mount,
    Network,
    Retention,
    SandboxInfo,
    Statistics,
)
from sandbox.sdk.compose import ComposeCreation, Pull
from sandbox.sdk.gateway import Models
from sandbox.sdk.handle import Creation, Fork, Sandbox, checkpoint_id, forks
from sandbox.sdk.images import Images
from sandbox.sdk.network import Credentials
from sandbox.sdk.run import Run
from sandbox.sdk.store import Store
from sandbox.sdk.transport import Transport, encoded, part

POLL = 60.0  # seconds of one long poll; a longer wait polls again
PAUSE = 0.05  # seconds between polls that end at once


class Client(Transport):
    """A sandbox host. `address` is the daemon's socket, or a URL where a daemon listens on TCP.

    Opens on first use; use ``async with`` or call :meth:`close`.
    """

    @property
    def images(self) -> Images:
        """The images that sandboxes start from."""
        return Images(self)

    @property
    def store(self) -> Store:
        """The checkpoints of the host as content."""
        return Store(self)

    def create(
        self,
        image: str,
        *,
        name: str | None = None,
        limits: Limits | None = None,
        network: Network | None = None,
        env: dict[str, str] | None = None,
        workdir: str | None = None,
        user: int | str | None = None,
        labels: dict[str, str] | None = None,
        mounts: list[Mount] | None = None,
        durable_answers: bool = False,
        replicated_answers: bool = False,
        gateway: Gateway | None = None,
        retention: Retention | None = None,
        lifetime: float | None = None,
        idle_timeout: float | None = None,
        at_end: AtEnd = AtEnd.STOP,
        ignore: IgnoreRules | None = None,
        no_new_privs: bool = False,
        docker: bool = False,
    ) -> Creation:
        """A new sandbox: ``sb = await host.create(...)``, or ``async with host.create(...) as sb``.

        `env`, `workdir` and `user` (``"name[:group]"`` or numbers) are what commands have that say nothing else; what
        is not given here is the image's. `lifetime`: seconds from now; `idle_timeout`: seconds without a call. Neither
        cuts a call short. What happens then says `at_end`: a last checkpoint and a stop, or removal. With
        `no_new_privs` set-user-ID programs (sudo, su) and file capabilities give nothing. With `docker` its programs
        find Docker's Engine API at DOCKER_HOST, whose containers are services of this sandbox.
        """
        request = CreateRequest(
            image=image,
            name=name,
            limits=limits or Limits(),
            network=network or Network.none(),
            env=env or {},
            workdir=workdir,
            user=user,
            labels=labels or {},
            mounts=mounts or [],
            durable_answers=durable_answers,
            replicated_answers=replicated_answers,
            gateway=gateway,
            retention=retention,
            lifetime=lifetime,
            idle_timeout=idle_timeout,
            at_end=at_end,
            ignore=ignore,
            no_new_privs=no_new_privs,
            docker=docker,
        )
        return Creation(self, request)

    def compose(
        self,
        paths: str | Path | Sequence[str | Path] = ".",
        *,
        name: str | None = None,
        profiles: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        main: str | None = None,
        limits: Limits | None = None,
        network: Network | None = None,
        build: bool = True,
        pull: Pull = "missing",
        copy_binds: bool = False,
        directory: str | Path | None = None,
        up: bool = True,
        wait: bool = True,
        timeout: float = 300.0,
        output: Callable[[str], Any] | None = None,
        **options: Any,
    ) -> Creation:
        """A new sandbox of the services of compose files: ``async with host.compose("compose.yaml") as sb``.

        `paths`: a file, several that are merged, or a directory; their paths begin at `directory`, else where the first
        one lies. `env`: the variables of the files (None: the
        environment of this process), on top of ``.env``; `main`: the service that calls mean which name none. Images
        are built, and pulled when they are missing; files, configs and secrets are copied into the services, with
        `copy_binds` host directories, too. `limits`: None: those of all services together. Returns once the services
        are up (see :meth:`Services.up`); with ``up=False`` none is started. `output` is called with what is noteworthy.
        `options`: as of :meth:`create`. Raises Invalid, with file, line and key; ImageNotFound; what `up` raises.
        """
        from sandbox.compose.load import load

        variables = dict(os.environ if env is None else env)
        request = self.create("", name=name, network=network, **options).request
        return ComposeCreation(
            self,
            request,
            lambda: load(
                paths, profiles=profiles, env=variables, main=main, copy_binds=copy_binds, directory=directory
            ),
            limits=limits,
            build=build,
            pull=pull,
            up=up,
            wait=wait,
            timeout=timeout,
            output=output,
        )

    def run(self, run: str | None = None, *, lease: float = 60.0) -> Run:
        """Sandboxes that end with this client: ``async with host.run() as run: sb = await run.create("debian")``.

        `run`: a name, so that others find them (`pagurus rm --run`); `lease`: seconds for which they outlive a client
        that has died.
        """
        return Run(self, run, lease)

    @property
    def gateway(self) -> Models:
        """The LLM gateway of the host."""
        return Models(self)

    @property
    def credentials(self) -> Credentials:
        """Headers that requests of sandboxes get on their way out."""
        return Credentials(self)

    async def get(self, sandbox: str) -> Sandbox:
        """The sandbox with this id or name, or whose id alone begins so (``"s-4f"``)."""
        return Sandbox(self, await self.call("GET", f"/v1/sandboxes/{part(sandbox)}", SandboxInfo))

    async def sandboxes(self, labels: dict[str, str | None] | None = None) -> list[SandboxInfo]:
        """All, or those with these labels (None: with any value)."""
        target = ",".join(name if value is None else f"{name}={value}" for name, value in (labels or {}).items())
        query = f"?{encoded(label=target)}" if target else ""
        return await self.call("GET", f"/v1/sandboxes{query}", list[SandboxInfo])

    async def statistics(self) -> Statistics:
        return await self.call("GET", "/v1/statistics", Statistics)

    async def health(self) -> dict[str, Any]:
        return await self.call("GET", "/v1/health", dict[str, Any])

    # ----------------------------------------------------------------- checkpoints

    async def checkpoint(
        self, checkpoint: str | CheckpointInfo, *, wait: Literal["captured", "durable"] | None = None
    ) -> CheckpointInfo:
        """A checkpoint as it is now, or once it is captured or durable; raises if it failed."""
        path = f"/v1/checkpoints/{part(checkpoint_id(checkpoint))}"
        if wait is None:
            return await self.call("GET", path, CheckpointInfo)
        done = {CheckpointState.DURABLE} | ({CheckpointState.CAPTURED} if wait == "captured" else set())
        while True:
            info = await self.call("GET", f"{path}?wait={wait}&timeout={POLL}", CheckpointInfo, timeout=POLL + 30)
            if info.state in done:
                return info
            if info.error is not None:
                raise CheckpointFailed(info.error, sandbox=info.sandbox, turn=info.turn)
            await asyncio.sleep(PAUSE)  # no call is in progress, yet: the daemon has just been started

    async def fork(
        self,
        checkpoint: str | CheckpointInfo,
        count: int = 1,
        *,
        verify: bool = False,
        labels: dict[str, str] | None = None,
    ) -> list[Fork]:
        """`count` new sandboxes that continue from a checkpoint. Each succeeds or fails alone.

        `verify` compares each with the checkpoint before it runs: one that differs has failed. `labels` are theirs;
        None: those of the sandbox that they come from.
        """
        path = f"/v1/checkpoints/{part(checkpoint_id(checkpoint))}/fork"
        request = ForkRequest(count=count, verify=verify, labels=labels)
        return forks(self, await self.call("POST", path, list[ForkEntry], request, keyed=True))
