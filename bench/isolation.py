"""Runs every hostile act of :mod:`bench._hostile` in a sandbox of its own, beside a neighbour.

::

    python -m bench.isolation [--json] [--restored]       prints each act; the last line is one JSON object

`--restored`: each attacker has been checkpointed, killed and restored before it acts.
`acts`: how many; `contained`: how many of them; `not_contained`: the names of the others, each with what happened.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bench._hostile import ACTS, Act, Scene, host_socket
from sandbox import btrfs, paths
from sandbox.checkpoint import Checkpointer
from sandbox.container import Container, ContainerSpec
from sandbox.messages import Limits
from sandbox.pool import Pool

FIRST_UID = 30_000_000


@asynccontextmanager
async def scene(
    pool: Pool, image: Path, run: Path, limits: Limits, neighbour: Container, checkpointer: Checkpointer | None
) -> AsyncIterator[Scene]:
    """An attacker in a fresh sandbox, targets on the host, and a neighbour."""
    attacker = await container(pool, image, run, limits, FIRST_UID)
    sockets, port = host_socket()
    secret = run / "secret"
    secret.write_bytes(b"secret")
    done = await attacker.exec(["sh", "-c", "cp /usr/bin/id /tmp/rootid; chmod 4755 /tmp/rootid"])
    assert done.exit_code == 0
    try:
        if checkpointer is not None:
            await travel(attacker, checkpointer, run / "captures" / attacker.spec.id)
        yield Scene(attacker, neighbour, port, secret)
    finally:
        for listener in sockets:
            listener.close()
        await remove(attacker)


async def travel(made: Container, checkpointer: Checkpointer, capture: Path) -> None:
    """Checkpoint, kill and restore a sandbox with a process in it."""
    await made.exec(["sh", "-c", "sleep 1000 & true"])
    await checkpointer.capture(made, capture, processes=True)
    await checkpointer.forget(made)
    await made.kill()
    await made.remount(made.tree)
    made.cgroup.lift()
    await checkpointer.restore(made, capture)
    shutil.rmtree(capture)
    for pid in made.tasks():  # as alone as one that was created
        if pid != made.init_pid:
            os.kill(pid, signal.SIGKILL)
    await made.exec(["true"])  # once this is adopted, the killed one is reaped


async def container(pool: Pool, image: Path, run: Path, limits: Limits, uid_base: int) -> Container:
    name = f"act-{secrets.token_hex(6)}"
    tree = pool.sandboxes / name
    pool.create_tree(tree)
    spec = ContainerSpec(
        id=name, image=image, tree=tree, uid_base=uid_base, hostname="crab", run_dir=run / name, limits=limits
    )
    return await Container.create(spec)


async def remove(made: Container) -> None:
    await made.destroy()
    btrfs.delete_subvolume(made.tree)


async def try_act(
    act: Act, pool: Pool, image: Path, run: Path, neighbour: Container, checkpointer: Checkpointer | None = None
) -> str:
    """ "" when contained, else what happened."""
    async with scene(pool, image, run, act.limits, neighbour, checkpointer) as where:
        return await act.check(where)


async def run_all(pool: Pool, image: Path, run: Path, *, restored: bool = False) -> dict[str, object]:
    neighbour = await container(pool, image, run, Limits(), FIRST_UID + 65_536)
    failed: dict[str, str] = {}
    checkpointer = Checkpointer(state=run, run=run) if restored else None
    try:
        if checkpointer is not None:
            await checkpointer.prepare()
        for act in ACTS:
            said = await try_act(act, pool, image, run, neighbour, checkpointer)
            print(f"{'contained ' if not said else 'NOT       '} {act.name}{': ' + said if said else ''}", flush=True)
            if said:
                failed[act.name] = said
    finally:
        if checkpointer is not None:
            await checkpointer.close()
        await remove(neighbour)
    return {"acts": len(ACTS), "contained": len(ACTS) - len(failed), "not_contained": failed}


def unmount_below(folder: Path) -> None:
    """The tmpfs mounts that a checkpointer has made for a run directory."""
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        _, point, kind, *_ = line.split()
        if kind == "tmpfs" and point.startswith(f"{folder}/"):
            subprocess.run(["umount", point], check=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench isolation", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object")
    parser.add_argument("--restored", action="store_true", help="act from restored sandboxes")
    parser.add_argument("--image", type=Path, default=paths.state() / "images" / "debian")
    options = parser.parse_args(argv)
    state = Path(tempfile.mkdtemp(prefix="pagurus-isolation-"))
    state.chmod(stat.S_IRWXU)
    pool = Pool(state, size=1 << 30).ensure()
    output = sys.stdout
    try:
        if options.json:
            sys.stdout = sys.stderr
        result = asyncio.run(run_all(pool, options.image, state, restored=options.restored))
    finally:
        sys.stdout = output
        unmount_below(state)
        pool.close()
        shutil.rmtree(state)
    print(json.dumps(result))
    return 0 if not result["not_contained"] else 1


if __name__ == "__main__":
    sys.exit(main())
