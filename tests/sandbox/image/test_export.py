"""Images as archives and in registries: what is written is read again as it was, here and by skopeo."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from sandbox.errors import Forbidden
from sandbox.image import export
from sandbox.image.store import ImageStore
from sandbox.messages import ImageConfig
from sandbox.messages.images import HealthCheck
from tests.support.registry import Registry

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: owners and capabilities")
CAPABILITY = bytes.fromhex("0100000200040000000000000000000000000000")  # cap_net_bind_service+ep
CONFIG = ImageConfig(
    env={"PATH": "/bin", "A": "b=c"},
    workdir="/srv",
    user="app:staff",
    entrypoint=["/bin/sh"],
    cmd=["-c", "true"],
    labels={"a": "b"},
    exposed_ports=["80/tcp"],
    volumes=["/data"],
    stop_signal="SIGINT",
    shell=["/bin/sh", "-ec"],
    on_build=["RUN true"],
    author="me",
    health_check=HealthCheck(test=["CMD", "true"], interval=1_000_000_000, retries=3),
)


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    made = ImageStore(tmp_path / "images")

    def fill(tree: Path) -> ImageConfig:
        directory = tree / "srv/with blank"
        directory.mkdir(parents=True)
        (directory / ("long" * 50)).write_text("of a long path")
        (directory / "file").write_bytes(b"content")
        os.chown(directory / "file", 70, 80)
        (directory / "file").chmod(0o4751)
        os.setxattr(directory / "file", "security.capability", CAPABILITY)
        os.setxattr(directory / "file", "user.note", b"\xff\x00binary")
        os.setxattr(directory, "user.note", b"of a directory")
        os.link(directory / "file", tree / "srv/linked")
        (tree / "srv/pointer").symlink_to("with blank/file")
        os.mkfifo(tree / "srv/fifo", 0o640)
        (directory / "\udcff").write_text("no UTF-8")
        with (tree / "srv/sparse").open("wb") as file:
            file.truncate(10 << 20)
            os.pwrite(file.fileno(), b"end", (10 << 20) - 3)
        os.setxattr(tree / "srv/sparse", "user.note", b"of holes")
        os.utime(tree / "srv/pointer", (1_000, 1_000), follow_symlinks=False)
        return CONFIG

    made.build("one", fill, "test")
    return made


def _written(store: ImageStore, directory: Path) -> Path:
    image = store.resolve("one")
    directory.mkdir()
    export.write_layout(image.tree, image.config, 1_000_000.5, "one", directory)
    return directory


def test_an_exported_image_is_the_image(store: ImageStore, tmp_path: Path) -> None:
    layout = _written(store, tmp_path / "layout")
    with (tmp_path / "archive.tar").open("wb") as out:
        export.pack_layout(layout, out)
    for number, source in enumerate((layout, tmp_path / "archive.tar")):
        store.import_archive(f"again{number}", source)
        again, former = store.resolve(f"again{number}"), store.resolve("one")
        assert (again.digest, again.config) == (former.digest, CONFIG)
    (tmp_path / "docker").mkdir()  # what `docker load` reads of it, alone
    shutil.copytree(layout / "blobs", tmp_path / "docker/blobs")
    shutil.copy(layout / "manifest.json", tmp_path / "docker")
    subprocess.run(["tar", "-C", tmp_path / "docker", "-cf", tmp_path / "docker.tar", "."], check=True)
    store.import_archive("docker", tmp_path / "docker.tar")
    assert store.resolve("docker").digest == store.resolve("one").digest
    assert (store.resolve("docker").tree / "srv/sparse").stat().st_blocks < 1000
    assert json.loads((layout / "manifest.json").read_text())[0]["RepoTags"] == ["one:latest"]


def test_an_equal_image_gives_equal_bytes(store: ImageStore, tmp_path: Path) -> None:
    first, second = (_written(store, tmp_path / name) for name in ("first", "second"))
    names = [sorted(str(path.relative_to(top)) for path in top.rglob("*")) for top in (first, second)]
    assert names[0] == names[1] and (first / "index.json").read_bytes() == (second / "index.json").read_bytes()


def test_an_image_goes_to_a_registry_and_comes_back(store: ImageStore, tmp_path: Path) -> None:
    image = store.resolve("one")
    with Registry() as registry:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            target = f"{registry.host}/team/one:2"
            digest = export.push(image.tree, image.config, 1_000_000.5, target, tmp_path / name)
            assert registry.manifests["team/one", "2"] == registry.manifests["team/one", digest]
        uploads = [line for line in registry.requested if line.startswith("POST")]
        assert len(uploads) == 2  # the layer and its configuration, once
        store.pull(f"{registry.host}/team/one:2", "pulled")
        registry.user = ("me", "secret")
        (tmp_path / "c").mkdir()
        with pytest.raises(Forbidden, match=r"unauthorized|authentication"):
            export.push(image.tree, image.config, 1.0, f"{registry.host}/team/one:3", tmp_path / "c")
    assert (store.resolve("pulled").digest, store.resolve("pulled").config) == (image.digest, CONFIG)
