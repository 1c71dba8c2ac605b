"""The mechanism of one sandbox: namespaces, limits, root, processes.

Guarantee: `create` and `prepare` leave either a whole sandbox or nothing: no process, mount, group or namespace.
`destroy` may be called in any state, any number of times.

::

    create = prepare ▸ start                     prepare: groups ▸ shim ▸ overlay
    kill ▸ remount ▸ start | restore ▸ attach    restore: a CRIU process started by outside.start(in_cgroup=True)

Mounts that a process of the sandbox sees: the overlay, proc, devpts, and Docker's masks over parts of proc.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
import shutil
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox import hints, paths
from sandbox.container import endings, kernel_views, services, spawn
from sandbox.container.alive import ended, is_readable
from sandbox.container.cgroup import Cgroup, parse_bytes
from sandbox.container.excluded import ExclusionGroup
from sandbox.container.identity import machine_id
from sandbox.container.outlet import Outlet
from sandbox.container.outside import Outside
from sandbox.container.paced import Allowance
from sandbox.container.process import (
    ReapWaiter,
    RunningCommand,
    exit_code,
    exit_status,
    readable,
    unreaped_status,
)
from sandbox.container.process import pidfd_tells_exit as _pidfd_tells_exit
from sandbox.container.service_groups import ServiceGroups
from sandbox.container.services import Join
from sandbox.container.shim import Shim, ShimError, ShimGone, launch
from sandbox.container.spawn import ID_RANGE, PATH
from sandbox.descriptors import closing
from sandbox.errors import Conflict, Invalid, NotFound, PagurusError, SandboxDead, Unsupported
from sandbox.messages import Composition, ExecResult, Limits
from sandbox.private import passable
from sandbox.procfs import is_doomed
from sandbox.tree import quota
from sandbox.tree.safe_path import SandboxRoot


@dataclass(frozen=True)
class Bind:
    """A directory of the host's that a sandbox sees. It is no part of its file tree or of its checkpoints."""

    source: Path
    target: str  # in the sandbox: absolute, without "..", not through links
    read_only: bool = True


@dataclass(frozen=True)
class ContainerSpec:
    """What a sandbox is made from. Example: ``ContainerSpec(id="sb-1", image=images.path("debian"), ...)``."""

    id: str
    image: Path  # read-only image tree
    tree: Path  # btrfs subvolume of this sandbox with upper/ and work/
    uid_base: int  # host uid of the sandbox's root; 65,536 ids from there are its own
    hostname: str
    run_dir: Path  # <run>/sandboxes/<id>
    limits: Limits = field(default_factory=Limits)
    binds: tuple[Bind, ...] = ()
    layer: str = ""  # name of its runtime layer; "": that of new sandboxes
    no_new_privs: bool = False  # set-user-ID programs and file capabilities give nothing
    workdir: str = "/"  # made with the sandbox where its image lacks it
    login: bool = False  # likewise the user of :mod:`sandbox.container.users`
    composition: Composition | None = None  # the services whose roots its tree holds


def _words(joins: Iterable[Join]) -> list[str | int]:
    return [word for join in joins for word in (join.source, join.target, join.read_only + 2 * join.recursive)]


class Container:
    """One sandbox. Make it by `create`, `prepare` or `adopt`."""

    def __init__(self, spec: ContainerSpec):
        self.spec = spec
        self.cgroup = Cgroup(spec.id)
        self.groups = ServiceGroups(self.cgroup, spec.composition)
        self.root = spec.run_dir / "root"  # the overlay, in the shim's mount namespace
        self.layer = paths.runtime_layer(spec.layer)
        self.init_pid: int | None = None
        self.tree = spec.tree
        self._init_pidfd = -1
        self.held_root: SandboxRoot | None = None  # of pid 1; another object after each restore
        self._shim: Shim | None = None
        self.shim_pid = 0  # host pid of its shim
        self.allowance = Allowance()  # of its commands' outputs
        self._reaped: ReapWaiter | None = None
        #: By who asks: called with `netns`, from a thread, when a restore has made a new one and before it is used.
        self.followers: dict[str, Callable[[Path], None]] = {}
        self.excluded = ExclusionGroup()  # processes that are no part of its checkpoints
        self.outside = Outside(self)
        self.address: str | None = None  # IPv4, of the link that the daemon gave it; None without a network
        self.authority = b""  # certificate (PEM) that its programs are to trust, before any of them runs

    # ---------------------------------------------------------------- making

    @classmethod
    async def create(cls, spec: ContainerSpec) -> Container:
        """A running sandbox with a fresh pid 1."""
        container = await cls.prepare(spec)
        try:
            await container.start()
        except BaseException:
            await asyncio.shield(container.destroy())
            raise
        return container

    @classmethod
    async def prepare(cls, spec: ContainerSpec) -> Container:
        """Everything but processes: for a restore or a fork."""
        container = await cls.begin(spec)
        try:
            await container.furnish()
        except BaseException:
            await asyncio.shield(container.destroy())
            raise
        return container

    @classmethod
    async def begin(cls, spec: ContainerSpec) -> Container:
        """Groups, shim and namespaces of a sandbox that has no files yet. :meth:`furnish` follows."""
        if spec.uid_base < ID_RANGE:
            raise Invalid(
                f"uid_base {spec.uid_base} overlaps the host's own users",
                hint="choose one above the ids of /etc/passwd and /etc/subuid",
            )
        container = cls(spec)
        await container._disk()
        if not container.layer.is_dir():
            again = hints.parts("native")
            raise NotFound(
                f"the runtime layer {spec.layer or 'of new sandboxes'} is not here",
                hint=f"{again}, with the version that made the sandbox, or bring {container.layer} back",
                sandbox=spec.id,
            )
        try:
            container.cgroup.create()
        except FileExistsError as error:
            raise Conflict(
                f"a control group {spec.id} exists already",
                sandbox=spec.id,
                hint="remove the sandbox, or choose another id",
            ) from error
        try:
            with container._refusals():
                container.root.mkdir(parents=True, exist_ok=True)
                spec.run_dir.chmod(0o711)  # CRIU passes through it with a sandbox's rights; no other user looks into it
                container.shim_pid = launch(spec.run_dir, container.cgroup.path, container.cgroup.joined())
                container._shim = await Shim.connect(spec.run_dir)
                layer, files = str(container.layer), spec.limits.open_files
                names, privileges = (spec.hostname[:64], files, machine_id(spec.id)), int(spec.no_new_privs)
                await container.call("setup", str(container.root), layer, spec.uid_base, *names, privileges)
                await container.outside.hold()
        except BaseException:
            await asyncio.shield(container.destroy())
            raise
        return container

    async def furnish(self) -> None:
        """Mount its files. When it fails, the caller destroys the sandbox."""
        with self._refusals():
            await self._bind()
            await self._mount()

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """What the shim refuses while a sandbox is made, as its maker should read it."""
        try:
            yield
        except ShimError as error:
            refused = {"runtime layer": self.layer, "image layer": self.spec.image}.get(error.stage)
            hint = hints.layer(refused) if refused and error.errno == errno.EINVAL else ""
            raise Unsupported(f"cannot make a sandbox: {error}", hint=hint, sandbox=self.spec.id) from error
        except ShimGone as error:
            raise Unsupported(
                f"the shim ended at once: {self._said()}",
                sandbox=self.spec.id,
                hint=hints.HOST,
            ) from error

    def _said(self) -> str:
        """The shim's own words."""
        with contextlib.suppress(FileNotFoundError):
            return (self.spec.run_dir / "shim.log").read_text().strip()
        return ""

    @classmethod
    async def adopt(cls, spec: ContainerSpec) -> Container:
        """Reconnect to the living shim of a sandbox after the daemon was restarted."""
        container = cls(spec)
        try:
            container._shim = await Shim.connect(spec.run_dir)
            (pid, init, _), fds = await container.call("hello")
            container.shim_pid = int(pid)
            await container.outside.hold()
        except (ShimGone, FileNotFoundError) as error:
            raise SandboxDead("its shim is gone", hint=f"pagurus restore {spec.id}", sandbox=spec.id) from error
        if int(init):
            container._adopt_init(int(init), fds[0])
        return container

    @property
    def binds(self) -> list[tuple[str, Path]]:
        """Target of each bind, and where the shim has its source."""
        return [(bind.target, self.spec.run_dir / "mounts" / str(n)) for n, bind in enumerate(self.spec.binds)]

    @property
    def views(self) -> list[tuple[str, str, Path]]:
        """Name and target of each part of the kernel that it sees, and where the shim has it."""
        result = kernel_views.places(self.spec.run_dir)
        return [(name, kernel_views.TARGETS[name], place) for name, place in result.items()]

    def trees(self) -> tuple[Path, dict[str, Path]]:
        """Where the shim has the root of the sandbox, and the source of each bind by its target. Raises SandboxDead."""
        own = self.outside.root
        return Path(f"{own}{self.root}"), {target: Path(f"{own}{place}") for target, place in self.binds}

    async def _bind(self) -> None:
        for bind, (target, place) in zip(self.spec.binds, self.binds, strict=True):
            await asyncio.to_thread(passable, place, self.spec.run_dir)
            await self.call("bind", str(bind.source), str(place), target, int(bind.read_only))
        views = await asyncio.to_thread(kernel_views.make, self.spec.run_dir, self.cgroup)
        await self.call("views", *(str(word) for view in views for word in view))
        if self.spec.composition is not None:
            await self.change_services(self.spec.composition)

    async def change_services(self, composition: Composition | None) -> None:
        """From now on it has these services: the next pid 1 mounts their roots. The present one is left as it is."""
        self.spec = dataclasses.replace(self.spec, composition=composition)
        await asyncio.to_thread(self.groups.make, composition)
        if self.groups.divided:
            await self._start_below()
        await asyncio.to_thread(self.groups.divide, self.spec.limits)
        await self.call("joins", *_words(services.joins(composition)))

    async def _start_below(self) -> None:
        """Let the shim start programs in the group below the sandbox's."""
        with closing(os.open(self.cgroup.leaf, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as leaf:
            try:
                await self.call("leaf", fds=[leaf])
            except ShimError:  # a shim of before this
                await asyncio.to_thread(self.groups.unmake)

    async def join_service(self, composition: Composition, name: str) -> None:
        """Mount the root of a service for the living pid 1. Raises Refused."""
        await self.call("join", *_words(services.joins_of(composition, name)))

    async def part_service(self, name: str) -> None:
        """Take the mount of its root away again, with what is mounted in it. Raises Refused."""
        await self.call("part", services.root(name))

    async def _mount(self) -> None:
        await asyncio.to_thread(quota.count, self.tree, self.spec.id)
        await self.call("mount", str(self.tree), str(self.spec.image))

    async def limit(self) -> None:
        """Set all limits. Of a restored sandbox once it is complete: until then a full one takes more than it may."""
        self.cgroup.apply(self.spec.limits)
        self.groups.divide(self.spec.limits)
        await asyncio.to_thread(quota.limit, self.tree, self.spec.id, await self._disk())

    def lift(self) -> None:
        """Remove the limits of what is in memory, before a restore."""
        self.cgroup.lift()
        self.groups.lift()

    async def _disk(self) -> int | None:
        """The limit of what it writes. Raises Unsupported for one that this kernel cannot keep."""
        size = self.spec.limits.disk
        needed = await asyncio.to_thread(quota.need, self.tree.parent, size, Limits().disk)
        return parse_bytes(size) if needed and size is not None else None

    async def start(self) -> int:
        """Start a fresh pid 1 in a prepared or killed sandbox; returns its host pid."""
        await self.limit()
        await asyncio.to_thread(self.groups.gather)
        try:
            (pid,), (pidfd,) = await self.call("start")
        except ShimError as error:
            raise Unsupported(f"cannot start pid 1: {error}", sandbox=self.spec.id, hint=hints.HOST) from error
        self._adopt_init(int(pid), pidfd)
        await asyncio.to_thread(self.groups.divide, self.spec.limits)
        return int(pid)

    async def attach(self, init_pid: int) -> None:
        """A restore made `init_pid` (its host pid) the sandbox's pid 1. It has no limits yet."""
        (pid,), (pidfd,) = await self.call("attach", init_pid)
        self._adopt_init(int(pid), pidfd)

    def _adopt_init(self, pid: int, pidfd: int) -> None:
        self._drop_init()
        self.init_pid, self._init_pidfd = pid, pidfd
        with contextlib.suppress(Conflict):  # it has died since: `inside` says so to callers
            self.held_root = SandboxRoot(pid, pidfd)

    def _drop_init(self) -> None:
        if self.held_root is not None:
            self.held_root.close()
            self.held_root = None
        if self._init_pidfd >= 0:
            os.close(self._init_pidfd)
        self.init_pid, self._init_pidfd = None, -1

    async def call(self, *fields: str | bytes | int, fds: Sequence[int] = ()) -> tuple[list[str], list[int]]:
        """Ask the shim. Raises SandboxDead without one, Refused, ShimGone."""
        return await self.need_shim().call(*fields, fds=fds)

    def post(self, *fields: str | bytes | int) -> None:
        """Ask the shim without waiting for its answer. Without a shim nothing happens."""
        if self._shim is not None:
            self._shim.post(*fields)

    def need_shim(self) -> Shim:
        if self._shim is None:
            raise self.dead("no shim")
        return self._shim

    # ---------------------------------------------------------------- observing

    @property
    def alive(self) -> bool:
        """True while pid 1 lives and is not about to die, and the shim is there, without which nothing can be done."""
        if self.init_pid is None or self.shim_gone:
            return False
        try:
            signal.pidfd_send_signal(self._init_pidfd, 0)
        except ProcessLookupError:
            return False
        # A zombie still takes signals; its pidfd is readable.
        return not is_readable(self._init_pidfd) and not is_doomed(self.init_pid)

    @property
    def shim_gone(self) -> bool:
        """Whether the shim has ended by itself: no process can be started any more, and nothing mounted."""
        return self._shim is not None and not self._shim.connected

    def fate(self) -> str:
        """What became of it, in words for a log."""
        if self.init_pid is None:
            return "pid 1 is not there"
        if self.shim_gone:
            return "its shim has ended"
        status = exit_status(self._init_pidfd) if is_readable(self._init_pidfd) else None
        if status is None:
            return "pid 1 lives" if self.alive else "pid 1 was killed or is exiting"
        how = f"was killed by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"ended with {status >> 8}"
        return f"pid 1 {how}"

    async def wait_dead(self) -> None:
        """Returns when pid 1 has died."""
        if self.init_pid is None:
            return
        with closing(self.pidfd()) as pidfd:
            await readable(pidfd)

    async def wait_lost(self) -> None:
        """Returns when pid 1 has died or the shim has ended."""
        waits = [asyncio.ensure_future(self.wait_dead())]
        if self._shim is not None:
            waits.append(asyncio.ensure_future(self._shim.gone()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def pidfd(self) -> int:
        """A new descriptor of pid 1. Raises SandboxDead when there is none."""
        if self.init_pid is None:
            raise self.dead("no processes")
        return os.dup(self._init_pidfd)

    @property
    def inside(self) -> SandboxRoot:
        """The root directory of pid 1, held since it was attached. Raises SandboxDead when there is none."""
        if self.held_root is None:
            raise self.dead("no processes")
        return self.held_root

    @property
    def roots(self) -> list[SandboxRoot]:
        """The roots in which programs run: that of the sandbox, or those of its services, the main one first."""
        if (composition := self.spec.composition) is None:
            return [self.inside]
        names = sorted(composition.services, key=lambda name: name != composition.main)
        own = [] if composition.main else [self.inside]
        return own + [self.inside.below(services.root(name)) for name in names]

    def tasks(self) -> list[int]:
        """Host pids of the sandbox's processes."""
        return self.cgroup.pids()

    def retained_tasks(self) -> list[int]:
        """Those of them that are part of its checkpoints."""
        excluded = self.excluded.pids()
        return [pid for pid in self.tasks() if pid not in excluded]

    @property
    def netns(self) -> Path:
        """The network namespace of this sandbox's processes. It lives as long as the shim, also without them."""
        return self.outside.netns

    async def move_network(self, pid: int) -> None:
        """Take the network namespace of `pid` (host pid) for this sandbox's own: a restore has made a new one."""
        await self.call("network", pid)
        await self.outside.hold()

    # ---------------------------------------------------------------- commands

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        uid: int = 0,
        gid: int | None = None,
        groups: Sequence[int] = (),
        root: str = "",
        stdin: bytes = b"",
        timeout: float | None = None,
        output_limit: int = 1 << 20,
        outlet: Outlet | None = None,
        on_start: Callable[[RunningCommand], None] | None = None,
    ) -> ExecResult:
        """Run a program to its end. Adopted by pid 1, in a session of its own.

        After `timeout` seconds what it started is signalled to end, and killed soon after. `gid`: as `uid`. `groups`:
        supplementary ones. `root`: of a service, in which `cwd` lies. A failure of the program is a result;
        CommandNotFound, Invalid (working directory), Conflict (no process left under the limit), SandboxDead raise.
        An `outlet` gets all output instead of the result, at the pace of its reader; when that leaves, the command ends
        as after `timeout`. `on_start` gets the command, which takes signals.
        """
        began = time.monotonic()
        flags = spawn.STDIN if stdin else 0
        variables = {"PATH": PATH, "HOME": "/root" if uid == 0 else "/", **(env or {})}
        before = self.cgroup.oom_kills()

        async def launch_command() -> RunningCommand:
            started, fds = await spawn.start(
                self, flags, uid, cwd, argv, variables, gid, groups, root=root, joins=root, oom_kills=before
            )
            return RunningCommand(self, started, fds, stdin=stdin, limit=output_limit, outlet=outlet)

        try:
            command = await _launched(launch_command())
        except spawn.KilledBeforeStart:  # by another command of the sandbox: its end is a result like any other
            return ExecResult(exit_code=128 + signal.SIGKILL, stdout=b"", stderr=b"", duration=time.monotonic() - began)
        try:
            if on_start is not None:
                on_start(command)
            status, timed_out = await command.wait(timeout)
        finally:
            # Also when the caller was cancelled: no caller is left to see the end.
            await asyncio.shield(command.close())
        return ExecResult(
            exit_code=exit_code(status),
            stdout=bytes(command.stdout.retained),
            stderr=bytes(command.stderr.retained),
            duration=time.monotonic() - began,
            timed_out=timed_out,
            stdout_dropped=command.stdout.dropped if outlet is None else 0,
            stderr_dropped=command.stderr.dropped if outlet is None else 0,
            oom_killed=self.cgroup.oom_kills() > before,
        )

    def dead(self, why: str) -> SandboxDead:
        """The error for users of a sandbox that has ended."""
        return SandboxDead(why, hint=f"pagurus restore {self.spec.id}", sandbox=self.spec.id)

    async def ended(self, command: RunningCommand) -> int:
        """Wait status of a command, once it has one."""

        def noted() -> int | None:
            if self.held_root is not command.root or self.init_pid is None:  # killed with the pid 1 of then
                return signal.SIGKILL
            return endings.noted(self.init_pid, self._init_pidfd, command.inner)

        if not _pidfd_tells_exit():
            return await endings.ended(command.pid, command.pidfd, noted)
        if self._reaped is None:
            self._reaped = ReapWaiter()
        await self._reaped.wait(command.pidfd)
        if (status := unreaped_status(command.pid, command.pidfd)) is not None:
            return status
        status = exit_status(command.pidfd)
        assert status is not None
        return status

    # ---------------------------------------------------------------- ending

    def inject(self) -> None:
        """SIGKILL to all processes, without waiting for their end. None of them sees another's."""
        if self.cgroup.exists():
            self.cgroup.freeze()
            try:
                self.cgroup.kill()
            finally:
                self.cgroup.thaw()

    async def kill(self) -> None:
        """SIGKILL to all processes; returns when all are gone. The shim stays."""
        if self.cgroup.exists():
            self.inject()
            await self.wait_dead()
            await self.cgroup.wait_empty()
        if self._shim is not None and self._shim.connected:
            with contextlib.suppress(ShimGone):  # the next mount gets the error
                await self._until_init_forgotten()
        self._drop_init()
        self.excluded.clear()

    async def _until_init_forgotten(self) -> None:
        """The shim answers after it has noticed pid 1's death and reaped it."""
        while True:
            (_, init, _), fds = await self.call("hello")
            for fd in fds:
                os.close(fd)
            if not int(init):
                return

    async def remount(self, tree: Path) -> None:
        """After `kill`: the same sandbox over another upper tree."""
        await self.call("umount")
        self.tree = tree
        try:
            await self._mount()
        except ShimError as error:
            raise Unsupported(
                f"cannot mount the file tree: {error}",
                sandbox=self.spec.id,
                hint=hints.HOST,
            ) from error

    async def destroy(self) -> None:
        """Processes, mounts, groups, namespaces, shim: gone. The tree stays its owner's."""
        with contextlib.suppress(ShimGone, FileNotFoundError):
            await self.kill()
        await self._end_shim()
        for pid in self.cgroup.stragglers():  # a shim that cannot be reached
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            await ended(pid)
        self._let_go()
        self.outside.close()
        await self.cgroup.remove()
        shutil.rmtree(self.spec.run_dir, ignore_errors=True)

    def detach(self) -> None:
        """Let go of the sandbox without touching it: its shim waits for the next daemon."""
        if self._shim is not None:
            self._shim.close()
            self._shim = None
        self.outside.close()
        self._let_go()

    def _let_go(self) -> None:
        self._drop_init()
        self.excluded.clear()
        if self._reaped is not None:
            self._reaped.close()
            self._reaped = None

    async def _end_shim(self) -> None:
        if self._shim is not None:
            with contextlib.suppress(ShimGone, ShimError):
                await self._shim.call("exit")
            self._shim.close()
            self._shim = None
        pid, self.shim_pid = self.shim_pid, 0
        await ended(pid)


async def _launched(launch: Coroutine[Any, Any, RunningCommand]) -> RunningCommand:
    """The command that is being started. If cancelled, it is ended, not lost."""
    launching = asyncio.ensure_future(launch)
    try:
        return await asyncio.shield(launching)
    except asyncio.CancelledError:
        with contextlib.suppress(PagurusError):
            await (await launching).close()
        raise
