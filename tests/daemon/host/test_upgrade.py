"""An upgrade changes the programs of ours that run inside sandboxes: what was made before it stays usable."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox import paths
from sandbox.container.container import Container, ContainerSpec
from sandbox.errors import Invalid
from tests.support.daemon_host import Daemon


@pytest.fixture
def prefix(own: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Built parts whose runtime layers are this test's own, and a daemon over them."""
    made = tmp_path / "prefix"
    made.mkdir()
    for part in paths.prefix().iterdir():
        if part.name not in ("layer", "layers"):
            (made / part.name).symlink_to(part.resolve())
    current = paths.runtime_layer()
    (made / "layers").mkdir()
    copy_layer(current, made / "layers" / current.name)
    (made / "layer").symlink_to(f"layers/{current.name}")
    own.stop()
    monkeypatch.setenv("PAGURUS_PREFIX", str(made))
    own.start()
    yield made


def copy_layer(source: Path, target: Path) -> None:
    """With its device nodes."""
    subprocess.run(["cp", "-a", source, target], check=True)


def upgrade(prefix: Path) -> str:
    """Another layer for new sandboxes; returns its name. Bytes behind an ELF file change nothing but its size."""
    name = "0123456789abcdef" * 2
    layer = prefix / "layers" / name
    copy_layer(paths.runtime_layer(), layer)
    for program in ("init", "attend", "relay"):
        with open(layer / ".pagurus" / program, "ab") as file:
            file.write(b"another version\n")
    new = prefix / "layer.new"
    new.symlink_to(f"layers/{name}")
    os.replace(new, prefix / "layer")
    assert paths.runtime_layer() == layer
    return name


async def test_what_was_checkpointed_before_an_upgrade_comes_back_after_it(own: Daemon, prefix: Path) -> None:
    async with own.client() as host:
        old = await host.create("debian")
        session = await old.sessions.open("/bin/sh")
        await session.exec("A=kept")
        before = await old.checkpoint("before", wait="durable")
        own.stop()
        name = upgrade(prefix)
        own.start()
        assert (await session.exec("echo $A")).text == "kept\n"  # it ran through the upgrade
        await session.exec("A=lost")
        await old.restore(before, verify=True)
        assert (await session.exec("echo $A")).text == "kept\n"
        for entry in await old.fork(1):
            async with entry.sandbox as fork:
                (theirs,) = await fork.sessions.list()
                assert (await theirs.exec("echo $A")).text == "kept\n"
        async with host.create("debian") as new:
            size = (await new.exec("wc -c < /.pagurus/init")).text
            assert int(size) == (prefix / "layers" / name / ".pagurus/init").stat().st_size
            assert int((await old.exec("wc -c < /.pagurus/init")).text) < int(size)
        await old.remove()


async def test_a_layer_that_is_gone_is_named(own: Daemon, prefix: Path) -> None:
    async with own.client() as host:
        old = await host.create("debian")
        before = await old.checkpoint("before", wait="durable")
        made_with = paths.runtime_layer()
        upgrade(prefix)
        shutil.rmtree(made_with)
        (entry,) = await host.fork(before, 1)
        assert entry.error is not None and f"the runtime layer {made_with.name} is not here" in str(entry.error)
        await old.remove()


def test_names_of_layers_are_digests(tmp_path: Path) -> None:
    made = ContainerSpec(id="x", image=tmp_path, tree=tmp_path, uid_base=1 << 20, hostname="x", run_dir=tmp_path)
    for name in ("../../etc", "x", "0" * 31, "0" * 33, "A" * 32):
        with pytest.raises(Invalid):
            paths.runtime_layer(name)
        with pytest.raises(Invalid):
            Container(replace(made, layer=name))
