"""What the tests of the container share: a pool, an image, containers that are gone afterwards.

The image is the base image of ``make setup`` (or the directory that PAGURUS_TEST_IMAGE names).
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from sandbox import btrfs, paths
from sandbox.container import Container, ContainerSpec
from sandbox.messages import Limits
from sandbox.pool import Pool

BASE = 20_000_000  # uids of test sandboxes, away from those of a daemon on this machine


def base_image() -> Path:
    named = os.environ.get("PAGURUS_TEST_IMAGE")
    found = Path(named) if named else paths.state() / "images" / "debian"
    if not found.is_dir():
        pytest.skip(f"no base image at {found}: run `make setup`")
    return found


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    if os.geteuid() != 0:
        pytest.skip("sandboxes need root")
    if not paths.shim().exists():
        pytest.skip(f"{paths.shim()} is missing: run `make setup`")
    if shutil.which("mkfs.btrfs") is None:
        pytest.skip("mkfs.btrfs is missing: run `make setup`")
    made = Pool(tmp_path_factory.mktemp("state"), size=1 << 30).ensure()
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(made.state)


class Maker:
    """Makes specs and containers and removes them all."""

    def __init__(self, pool: Pool, run: Path):
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
async def maker(pool: Pool, tmp_path: Path) -> AsyncIterator[Maker]:
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
