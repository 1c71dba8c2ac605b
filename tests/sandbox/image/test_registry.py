"""Images from registries: a registry on loopback, and skopeo as its client."""

from __future__ import annotations

import json
import os
import shutil
from base64 import b64encode
from pathlib import Path

import pytest

from sandbox.errors import Forbidden, ImageNotFound, Invalid, Protocol, TooMany, Unsupported
from sandbox.image import reference, registry
from sandbox.image.store import ImageStore, filed
from tests.support.registry import ARCHITECTURE, DOCKER_MANIFEST, Registry, digest_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("skopeo"), reason="needs root and skopeo")

BASE = {"etc/": b"", "etc/base": b"base\n", "gone": b"x"}
TOP = {"app/": b"", "app/main": b"main\n", ".wh.gone": b""}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageStore:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("REGISTRY_AUTH_FILE", raising=False)
    (tmp_path / "images").mkdir()
    return ImageStore(tmp_path / "images")


@pytest.mark.parametrize("packing", ["gzip", "zstd", ""])
def test_an_image_is_pulled_and_only_what_is_missing_is_fetched(store: ImageStore, packing: str) -> None:
    reported: list[tuple[int, int]] = []
    with Registry() as there:
        there.push("team/app", "1", [BASE, TOP], config={"Env": ["A=b"], "User": "7"}, packing=packing)
        name = store.pull(f"{there.host}/team/app:1", report=lambda done, total: reported.append((done, total)))
        assert name == f"{there.host}/team/app:1" and store.list() == [name]
        image = store.resolve(name)
        assert (image.tree / "etc/base").read_bytes() == b"base\n" and (image.tree / "app/main").exists()
        assert not (image.tree / "gone").exists()
        assert image.config.env == {"A": "b"} and image.config.user == "7"
        assert reported[-1][0] == reported[-1][1] > 0
        assert len(there.blobs_requested()) == 3  # configuration and layers
        there.requested.clear()
        assert store.pull(f"{there.host}/team/app:1") == name and not there.blobs_requested()  # it has not changed
        there.push("team/app", "1", [BASE, {"app/": b"", "app/main": b"later\n"}], packing=packing)
        store.pull(f"{there.host}/team/app:1")
        assert len(there.blobs_requested()) == 2  # the first layer is here
        assert (store.resolve(name).tree / "app/main").read_bytes() == b"later\n"
        store.pull(f"{there.host}/team/app:1", "mine")
        assert store.resolve("mine").digest == store.resolve(name).digest
        store.remove(name)
        assert store.list() == ["mine"]


def test_the_image_for_this_machine_is_chosen_and_a_digest_is_held_to(store: ImageStore) -> None:
    with Registry() as there:
        mine = there.push("app", "a", [{"mine": b""}])
        other = there.push("app", "b", [{"other": b""}], kind=DOCKER_MANIFEST)
        there.index("app", "both", {"s390x": other, ARCHITECTURE: mine})
        assert (store.resolve(store.pull(f"{there.host}/app:both")).tree / "mine").exists()
        pinned = f"{there.host}/app:whatever@{other}"
        assert (store.resolve(store.pull(pinned)).tree / "other").exists()
        there.index("app", "none", {"s390x": other})
        with pytest.raises(Unsupported, match="s390x"):
            store.pull(f"{there.host}/app:none")
        with pytest.raises(ImageNotFound):
            store.pull(f"{there.host}/app@sha256:{'0' * 64}")
        there.manifests["app", other] = there.manifests["app", mine]  # another image under that digest
        store.remove(pinned)
        with pytest.raises(Invalid, match=r"sent sha256|does not match|digest"):
            store.pull(pinned)


def test_credentials_come_from_the_usual_file(store: ImageStore, tmp_path: Path) -> None:
    with Registry() as there:
        there.push("app", "1", [BASE])
        there.user = ("me", "secret")
        with pytest.raises(Forbidden, match="log in"):
            store.pull(f"{there.host}/app:1")
        (tmp_path / ".docker").mkdir()
        existing = {"auths": {there.host: {"auth": b64encode(b"me:secret").decode()}}}
        (tmp_path / ".docker/config.json").write_text(json.dumps(existing))
        assert store.pull(f"{there.host}/app:1")


def test_a_busy_registry_is_waited_for(store: ImageStore) -> None:
    with Registry() as there:
        there.push("app", "1", [BASE])
        there.busy = 1
        assert store.pull(f"{there.host}/app:1")
        assert there.busy == 0
        store.remove(f"{there.host}/app:1")
        there.busy = 1000
        with pytest.raises(TooMany, match="log in"):
            store.pull(f"{there.host}/app:1")


def test_what_is_not_there_is_said(store: ImageStore) -> None:
    with Registry() as there, pytest.raises(ImageNotFound, match="name and tag"):
        store.pull(f"{there.host}/nothing:1")
    with pytest.raises(Protocol, match="reachable"):
        store.pull(f"{there.host}/nothing:1")
    with pytest.raises(Invalid, match="no name of an image"):
        store.pull("No Such/Name")
    assert store.list() == []


@pytest.mark.parametrize("fault", ["truncated", "damaged", "endless"])
def test_damage_leaves_nothing(store: ImageStore, fault: str) -> None:
    with Registry() as there:
        there.push("app", "1", [BASE, TOP])
        blob = next(name for name, data in there.blobs.items() if data.startswith(b"\x1f\x8b"))
        getattr(there, fault).add(blob)
        with pytest.raises((Invalid, Unsupported, Protocol)):
            store.pull(f"{there.host}/app:1")
        assert store.list() == [] and not store.trees.exists()
        retained = {path.name for path in (store.layers / "blobs/sha256").iterdir()}
        assert blob.removeprefix("sha256:") not in retained
        getattr(there, fault).clear()
        assert store.pull(f"{there.host}/app:1")


def test_a_silent_registry_is_left(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_SILENCE", 1.0)
    with Registry() as there:
        there.push("app", "1", [BASE, TOP])
        there.silent.add(next(name for name, data in there.blobs.items() if data.startswith(b"\x1f\x8b")))
        with pytest.raises(Protocol, match="nothing came from"):
            store.pull(f"{there.host}/app:1")
        assert store.list() == [] and not store.trees.exists()
        there.silent.clear()
        assert store.pull(f"{there.host}/app:1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 100 << 30}, "larger than 64 GiB"),
        ({"size": -1}, "without digest or size"),
        ({"digest": "sha256:../../etc/passwd"}, "without digest or size"),
        ({"urls": ["http://169.254.169.254/"]}, "lie elsewhere"),
    ],
)
def test_a_manifest_that_lies_is_refused_before_anything_is_fetched(
    store: ImageStore, change: dict[str, object], message: str
) -> None:
    with Registry() as there:
        there.push("app", "1", [BASE], change=change)
        with pytest.raises((Invalid, Unsupported, Protocol), match=message):
            store.pull(f"{there.host}/app:1")
        assert not there.blobs_requested()


def test_a_layer_that_leads_out_of_its_tree_is_refused_or_stays_inside(store: ImageStore, tmp_path: Path) -> None:
    with Registry() as there:
        there.push("app", "1", [{"../../escape": b"x"}, {"/abs": b"x"}])
        try:
            tree = store.resolve(store.pull(f"{there.host}/app:1")).tree
        except Invalid:
            tree = None
        assert not (tmp_path / "escape").exists() and not (tmp_path / "images/escape").exists()
        assert tree is None or not (tree.parent.parent / "escape").exists()


def test_layers_are_kept_up_to_a_limit_the_oldest_go_first(tmp_path: Path) -> None:
    directory = tmp_path / "blobs/sha256"
    directory.mkdir(parents=True)
    for number, name in enumerate("abc"):
        (directory / name).write_bytes(bytes(100))
        os.utime(directory / name, (number, number))
    registry.prune(tmp_path / "blobs", 250)
    assert sorted(path.name for path in directory.iterdir()) == ["b", "c"]


@pytest.mark.parametrize(
    ("text", "address", "name"),
    [
        ("python", "docker.io/library/python:latest", "python:latest"),
        ("python:3.12-slim", "docker.io/library/python:3.12-slim", "python:3.12-slim"),
        ("team/app:V1", "docker.io/team/app:V1", "team/app:V1"),
        ("docker.io/python", "docker.io/library/python:latest", "python:latest"),
        ("index.docker.io/library/python", "docker.io/library/python:latest", "python:latest"),
        ("localhost/app", "localhost/app:latest", "localhost/app:latest"),
        ("ghcr.io/a/b/c:1", "ghcr.io/a/b/c:1", "ghcr.io/a/b/c:1"),
        ("r:5000/a", "r:5000/a:latest", "r:5000/a:latest"),
        (f"a:1@{digest_of(b'')}", f"docker.io/library/a@{digest_of(b'')}", f"a@{digest_of(b'')}"),
    ],
)
def test_names_are_read_as_docker_reads_them(text: str, address: str, name: str) -> None:
    result = reference.parse(text)
    assert (result.address, result.name) == (address, name)
    assert reference.parse(name).address == address
    file = filed(name)
    assert file is not None and "/" not in file


@pytest.mark.parametrize(
    "text", ["", "/", "a//b", "UPPER", "a:", "a@sha256:1", "-a", "a:" + "x" * 129, "a b", "../x", "a/../b", "x" * 201]
)
def test_what_is_no_name_is_refused(text: str) -> None:
    assert filed(text) is None
    with pytest.raises(Invalid, match="no name of an image"):
        reference.parse(text)


def test_registries_on_this_machine_are_told_from_others() -> None:
    local = ["localhost/a", "localhost:5000/a", "127.0.0.1:1/a", "127.9.0.1/a"]
    assert all(reference.parse(text).local for text in local)
    assert not any(reference.parse(text).local for text in ["a", "127.0.0.1.example.org/a", "localhost.example.org/a"])
