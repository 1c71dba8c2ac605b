"""What the tests of the container share: a pool, an image, containers that are gone afterwards.

The image is the base image of ``make setup`` (or the directory that PAGURUS_TEST_IMAGE names).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from sandbox import paths, procfs
from sandbox.container import cgroup
from sandbox.container.cgroup import Hierarchy, hierarchy
from sandbox.container.container import Container, ContainerSpec
from sandbox.messages import Limits
from sandbox.tree import btrfs
from sandbox.tree.pool import BtrfsPool

WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
BASE = 20_000_000 + 2_000_000 * WORKER  # uids of test sandboxes, away from those of daemons and of other workers


def base_image() -> Path:
    named = os.environ.get("PAGURUS_TEST_IMAGE")
    result = Path(named) if named else paths.state() / "images" / "debian"
    if not result.is_dir():
        pytest.skip(f"no base image at {result}: run `make setup`")
    return result


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BtrfsPool]:
    """A pool for all tests of a module. What one module leaves over is nothing to the next."""
    if os.geteuid() != 0:
        pytest.skip("sandboxes need root")
    if not paths.shim().exists():
        pytest.skip(f"{paths.shim()} is missing: run `make setup`")
    if shutil.which("mkfs.btrfs") is None:
        pytest.skip("mkfs.btrfs is missing: run `make setup`")
    made = BtrfsPool(tmp_path_factory.mktemp("state"), size=1 << 30).ensure()
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(made.state)


class Maker:
    """Makes specs and containers and removes them all."""

    def __init__(self, pool: BtrfsPool, run: Path):
        self.pool = pool
        self.run = run
        self.made: list[Container] = []
        self.trees: list[Path] = []

    def tree(self, name: str) -> Path:
        path = self.pool.sandboxes / name
        self.pool.create_tree(path)
        self.trees.append(path)
        return path

    def spec(self, **changes: object) -> ContainerSpec:
        name = f"test-{secrets.token_hex(6)}"
        fields: dict[str, object] = {
            "id": name,
            "image": base_image(),
            "uid_base": BASE + 65_536 * len(self.trees),
            "hostname": "crab",
            "run_dir": self.run / name,
            "limits": Limits(),
            **changes,
        }
        if "tree" not in fields:
            fields["tree"] = self.tree(name)
        return ContainerSpec(**fields)  # type: ignore[arg-type]

    async def create(self, **changes: object) -> Container:
        container = await Container.create(self.spec(**changes))
        self.made.append(container)
        return container

    async def prepare(self, **changes: object) -> Container:
        container = await Container.prepare(self.spec(**changes))
        self.made.append(container)
        return container

    async def close(self) -> None:
        for container in self.made:
            await container.destroy()
        for tree in self.trees:
            btrfs.delete_subvolume(tree)


@pytest_asyncio.fixture
async def maker(pool: BtrfsPool, tmp_path: Path) -> AsyncIterator[Maker]:
    made = Maker(pool, tmp_path)
    try:
        yield made
    finally:
        await made.close()


async def shell(container: Container, script: str, **options: object) -> str:
    """stdout of a script that must succeed."""
    done = await container.exec(["/bin/sh", "-c", script], **options)  # type: ignore[arg-type]
    assert done.exit_code == 0, (done.exit_code, done.stdout, done.stderr)
    return done.stdout.decode()


async def finalized(container: Container, target: set[int | None]) -> set[int | None]:
    """Its processes, once they are `target`: a killed one takes a moment to die, and pid 1 to reap it."""
    deadline = time.monotonic() + 240
    while True:
        observed: set[int | None] = {pid for pid in container.tasks() if not zombie(pid)}
        if observed == target or time.monotonic() > deadline:
            return observed
        await asyncio.sleep(0.01)


def zombie(pid: int) -> bool:
    try:
        return procfs.stat(pid)[0] in b"ZX"  # whose name may be anything
    except (FileNotFoundError, ProcessLookupError):
        return True


def traces(name: str, run_dir: Path) -> list[str]:
    """Whatever a sandbox could leave behind on the host."""
    host = hierarchy()
    result = [str(m / "pagurus" / name) for m in (host.unified, *host.v1.values()) if (m / "pagurus" / name).exists()]
    result += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if name in line]
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and not zombie(int(entry.name)):
            with contextlib.suppress(OSError):
                if any(name.encode() in Path(entry.path, file).read_bytes() for file in ("cgroup", "mountinfo")):
                    result.append(entry.path)
    return result + ([str(run_dir)] if run_dir.exists() else [])


@pytest.fixture(params=["as it is", "pure v2"])
def either_hierarchy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The host's hierarchy, and the same host seen as pure v2 (its controllers, here in v1, then do nothing)."""
    if request.param == "pure v2" and not hierarchy().pure:
        pure = Hierarchy(hierarchy().unified)
        monkeypatch.setattr(cgroup, "hierarchy", lambda: pure)
        monkeypatch.setattr(cgroup, "V2_CONTROLLERS", ())
        monkeypatch.setattr(cgroup.Cgroup, "apply", lambda self, limits: None)
        monkeypatch.setattr(cgroup.Cgroup, "oom_kills", lambda self: 0)
        cgroup.prepare_host.cache_clear()
    yield request.param
    cgroup.prepare_host.cache_clear()
