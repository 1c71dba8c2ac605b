"""Runs every hostile act in a sandbox of its own, beside a neighbour.

::

    pagurus bench isolation [--json] [--restored]       prints each act; the last line is one JSON object

`--restored`: each attacker has been checkpointed, killed and restored before it acts.
`acts`: how many; `contained`: how many of them; `not_contained`: the names of the others, each with what happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench.harness import aftermath, command
from bench.harness.own_daemon import IMAGE, BenchHost
from bench.harness.own_internet import Internet, internet
from daemon.catalogue import SandboxRow
from daemon.network.networks import Networks
from sandbox import paths
from sandbox.container.container import Container, ContainerSpec
from sandbox.criu.checkpointer import Checkpointer
from sandbox.messages import Limits, Network, SandboxState
from sandbox.tree import btrfs
from sandbox.tree.pool import BtrfsPool
from tests.hostile.act import Act, Place, Scene, host_socket
from tests.hostile.acts import ACTS, API_ACTS
from tests.hostile.api import try_api_act

FIRST_UID = 30_000_000


@dataclass(frozen=True)
class World:
    """Where sandboxes are made."""

    pool: BtrfsPool
    image: Path
    run: Path


@asynccontextmanager
async def scene(
    act: Act, world: World, neighbour: Container, checkpointer: Checkpointer | None, internet: Internet | None
) -> AsyncIterator[Scene]:
    """An attacker in a fresh sandbox, targets on the host, and a neighbour; both with a network if the act wants it."""
    run = world.run
    attacker = await container(world, act.limits, FIRST_UID)
    sockets, port = host_socket()
    secret = run / "secret"
    secret.write_bytes(b"secret")
    done = await attacker.exec(
        ["sh", "-c", "cp $(realpath $(command -v python3)) /tmp/rootpython; chmod 4755 /tmp/rootpython"]
    )
    assert done.exit_code == 0

    async def travels() -> None:
        async with checkpoints(run, checkpointer) as these:
            await travel(attacker, these, run / "captures" / attacker.spec.id)

    async def forks() -> None:
        async with checkpoints(run, checkpointer) as these:
            await fork(attacker, world, these)

    try:
        async with place(act, run, attacker, neighbour, internet) as where:
            if checkpointer is not None:
                await travel(attacker, checkpointer, run / "captures" / attacker.spec.id, alone=True)
            yield Scene(attacker, neighbour, port, secret, where, travels, forks)
    finally:
        for listener in sockets:
            listener.close()
        await remove(attacker)


@asynccontextmanager
async def place(
    act: Act, run: Path, attacker: Container, neighbour: Container, internet: Internet | None
) -> AsyncIterator[Place | None]:
    """The networks of an act that wants one."""
    if act.network is None or internet is None:
        yield None
        return
    networks = Networks(run)
    rows = [(row(attacker, act.network), attacker), (row(neighbour, Network.open()), neighbour)]
    await networks.open([])
    try:
        for item, owner in rows:
            await networks.attach(item, owner)
        addresses = [(await networks.status(item)).address for item, _ in rows]
        yield Place(networks, internet, *map(str, addresses))
    finally:
        for item, owner in rows:
            owner.followers.clear()
            await networks.detach(item, owner)
        await networks.close()


def row(owner: Container, network: Network) -> SandboxRow:
    """What the networks must know of a sandbox."""
    return SandboxRow(
        id=owner.spec.id,
        image="",
        state=SandboxState.RUNNING,
        created_at=0.0,
        uid_base=owner.spec.uid_base,
        hostname=owner.spec.hostname,
        tree=None,
        head="",
        origin="",
        network=network,
    )


@asynccontextmanager
async def checkpoints(run: Path, given: Checkpointer | None) -> AsyncIterator[Checkpointer]:
    """The given checkpointer, or one for a moment."""
    if given is not None:
        yield given
        return
    made = Checkpointer(state=run, run=run)
    try:
        await made.prepare()
        yield made
    finally:
        await made.close()
        unmount_below(run)


async def travel(made: Container, checkpointer: Checkpointer, capture: Path, *, alone: bool = False) -> None:
    """Checkpoint, kill and restore a sandbox with a process in it. `alone`: then end what ran in it."""
    await made.exec(["sh", "-c", "sleep 1000 & true"])
    await checkpointer.capture(made, capture)
    await checkpointer.forget(made)
    await made.kill()
    await made.remount(made.tree)
    made.cgroup.lift()
    await checkpointer.restore(made, capture)
    shutil.rmtree(capture)
    if not alone:
        return
    while left := [pid for pid in made.tasks() if pid != made.init_pid]:  # until it is alone, like one just created
        for pid in left:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself meanwhile
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.01)


async def fork(made: Container, world: World, checkpointer: Checkpointer) -> None:
    """Make a sandbox of a checkpoint of this one, and end it."""
    name = f"act-{secrets.token_hex(6)}"
    tree = world.pool.sandboxes / name
    capture = world.run / "captures" / name
    await checkpointer.capture(made, capture, on_frozen=lambda: btrfs.snapshot(made.tree, tree, readonly=False))
    try:
        spec = replace(made.spec, id=name, tree=tree, uid_base=FIRST_UID + 2 * 65_536, run_dir=world.run / name)
        child = await Container.prepare(spec)
        try:
            await checkpointer.restore(child, capture)
        finally:
            await checkpointer.forget(child)
            await remove(child)
    finally:
        shutil.rmtree(capture)


async def container(world: World, limits: Limits, uid_base: int) -> Container:
    name = f"act-{secrets.token_hex(6)}"
    tree = world.pool.sandboxes / name
    world.pool.create_tree(tree)
    spec = ContainerSpec(
        id=name,
        image=world.image,
        tree=tree,
        uid_base=uid_base,
        hostname="crab",
        run_dir=world.run / name,
        limits=limits,
    )
    return await Container.create(spec)


async def remove(made: Container) -> None:
    await made.destroy()
    btrfs.delete_subvolume(made.tree)


async def try_act(
    act: Act,
    world: World,
    neighbour: Container,
    checkpointer: Checkpointer | None = None,
    internet: Internet | None = None,
) -> str:
    """ "" when contained, else what happened."""
    async with scene(act, world, neighbour, checkpointer, internet) as where:
        return await act.check(where)


async def run_all(world: World, internet: Internet, *, restored: bool = False) -> dict[str, str]:
    neighbour = await container(world, Limits(), FIRST_UID + 65_536)
    failed: dict[str, str] = {}
    checkpointer = Checkpointer(state=world.run, run=world.run) if restored else None
    try:
        if checkpointer is not None:
            await checkpointer.prepare()
        for act in ACTS:
            said = await try_act(act, world, neighbour, checkpointer, internet)
            report(act.name, said)
            if said:
                failed[act.name] = said
    finally:
        if checkpointer is not None:
            await checkpointer.close()
        await remove(neighbour)
    return failed


async def run_api(daemon: BenchHost) -> dict[str, str]:
    """The acts against a whole daemon."""
    failed = {}
    async with daemon.client() as host:
        for act in API_ACTS:
            said = await try_api_act(act, host, daemon.run, IMAGE)
            report(act.name, said)
            if said:
                failed[act.name] = said
    return failed


def report(name: str, said: str) -> None:
    print(f"{'contained ' if not said else 'NOT       '} {name}{': ' + said if said else ''}", flush=True)


def unmount_below(directory: Path) -> None:
    """The tmpfs mounts that a checkpointer has made for a run directory."""
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        _, point, kind, *_ = line.split()
        if kind == "tmpfs" and point.startswith(f"{directory}/"):
            subprocess.run(["umount", point], check=True)


def main(argv: list[str] | None = None) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--restored", action="store_true", help="act from restored sandboxes")
    parser.add_argument("--image", type=Path, default=paths.state() / "images" / "debian")
    options = parser.parse_args(argv)
    state = aftermath.directory("pagurus-isolation-")
    state.chmod(stat.S_IRWXU)
    pool = BtrfsPool(state, size=8 << 30).ensure()
    output = sys.stdout
    try:
        if options.json:
            sys.stdout = sys.stderr
        with internet(state) as outside:
            os.environ["PAGURUS_RESOLVERS"] = outside.resolvers
            world = World(pool, options.image.resolve(), state)
            failed = asyncio.run(run_all(world, outside, restored=options.restored))
        acts = len(ACTS)
        if not options.restored:
            daemon = BenchHost(state / "daemon", options.image)
            try:
                daemon.start()
                failed |= asyncio.run(run_api(daemon))
            finally:
                daemon.clean()
            acts += len(API_ACTS)
    finally:
        sys.stdout = output
        unmount_below(state)
        pool.close()
        shutil.rmtree(state)
    command.show({"acts": acts, "contained": acts - len(failed), "not_contained": failed}, options)
    return 1 if failed else 0
