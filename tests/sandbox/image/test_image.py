"""Images: names, content, sources. Real files, root's rights."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from zstandard import compress as zstd

from sandbox.errors import Conflict, ImageNotFound, Invalid, Unsupported
from sandbox.image.store import ImageStore
from sandbox.messages import ImageConfig
from tests.support.registry import ARCHITECTURE

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: images keep owners")


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    (tmp_path / "images").mkdir()
    return ImageStore(tmp_path / "images")


def test_image_from_a_directory(store: ImageStore, tmp_path: Path) -> None:
    source = tmp_path / "root"
    (source / "bin").mkdir(parents=True)
    (source / "bin/tool").write_text("x")
    os.chown(source / "bin/tool", 7, 8)
    (source / "bin/tool").chmod(0o4755)
    (source / ".pagurus/run").mkdir(parents=True)
    (source / "dev").mkdir()
    (source / "dev/console").write_text("")
    os.mknod(source / "disk", 0o60660, os.makedev(7, 0))
    tree = store.import_directory("dir-1", source)
    try:
        tool = (tree / "bin/tool").stat()
        assert (tool.st_mode & 0o7777, tool.st_uid, tool.st_gid) == (0o4755, 7, 8)
        assert not (tree / "disk").exists()
        assert list((tree / "dev").iterdir()) == []
        assert not (tree / ".pagurus").exists()
        assert (tree / "tmp").stat().st_mode & 0o7777 == 0o1777
        assert "localhost" in (tree / "etc/hosts").read_text()
        assert store.list() == ["dir-1"]
        assert store.path("dir-1") == tree
        with pytest.raises(Conflict):
            store.import_directory("dir-1", source)
    finally:
        store.remove("dir-1")
    with pytest.raises(ImageNotFound, match="no image 'dir-1'; there are: none"):
        store.path("dir-1")
    assert list(store.trees.iterdir()) == []


def test_a_folder_that_holds_the_image_store_is_refused(store: ImageStore, tmp_path: Path) -> None:
    """Its copy would copy itself, without end."""
    alias = tmp_path / "alias"
    alias.symlink_to(store.directory.parent)
    store.trees.mkdir(parents=True)
    (store.trees / "stop").mkdir()
    for source in (store.directory.parent, alias, store.directory, Path("/")):
        with pytest.raises(Invalid, match="holds the image store itself") as refused:
            store.import_directory("complete", source)
        assert "next to it" in (refused.value.hint or "")
        assert [path.name for path in store.trees.iterdir()] == ["stop"]
    alongside = tmp_path / "alongside"
    alongside.mkdir()
    store.import_directory("alongside", alongside)
    store.remove("alongside")


def test_image_from_a_tar_cannot_leave_its_tree(store: ImageStore, tmp_path: Path) -> None:
    archive, outside = tmp_path / "a.tar", tmp_path / "outside"
    outside.mkdir()
    with tarfile.open(archive, "w") as tar:
        link = tarfile.TarInfo("escape")
        link.type, link.linkname = tarfile.SYMTYPE, str(outside)
        tar.addfile(link)
        tar.addfile(tarfile.TarInfo("escape/file"))
    try:
        store.import_archive("evil", archive)
    except Invalid as error:
        assert "escape" in str(error)
    else:
        store.remove("evil")
    assert list(outside.iterdir()) == []
    assert list(store.directory.iterdir()) == []


@pytest.mark.parametrize("name", ["", "..", "a//b", "UPPER", "-x", "x" * 201])
def test_image_names(store: ImageStore, tmp_path: Path, name: str) -> None:
    with pytest.raises(Invalid):
        store.import_directory(name, tmp_path)
    with pytest.raises(ImageNotFound):
        store.path(name)


def test_broken_archive_leaves_no_image(store: ImageStore, tmp_path: Path) -> None:
    archive = tmp_path / "broken.tar"
    archive.write_bytes(b"not a tar" * 100)
    with pytest.raises(Invalid, match="not a tar archive"):
        store.import_archive("broken", archive)
    assert list(store.directory.iterdir()) == []


def test_docker_without_engine(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    with pytest.raises(Unsupported, match="no Docker Engine answers"):
        store.import_docker("busybox", "busybox:latest")
    assert list(store.directory.iterdir()) == []


# --------------------------------------------------------------------------- content


def _root(directory: Path, text: str = "x") -> Path:
    (directory / "bin").mkdir(parents=True)
    (directory / "bin/tool").write_text(text)
    os.utime(directory / "bin/tool", (1, 1))
    return directory


def test_equal_trees_are_stored_once_and_kept_while_used(store: ImageStore, tmp_path: Path) -> None:
    first = store.import_directory("one", _root(tmp_path / "a"))
    again = store.import_directory("two", _root(tmp_path / "b"))
    other = store.import_directory("three", _root(tmp_path / "c", "y"))
    assert first == again != other
    content = store.resolve("one").digest
    assert store.tree(content) == first
    assert store.remove("one") is False
    assert store.remove("two", used=lambda: {content}) is False
    assert store.tree(content) == first  # a sandbox stands on it
    assert store.collect(used=lambda: {content}) == 0
    assert store.collect(used=tuple) == 1
    with pytest.raises(ImageNotFound):
        store.tree(content)
    assert store.remove("three") is True


def test_a_tree_that_a_sandbox_began_to_stand_on_while_it_was_removed_stays(store: ImageStore, tmp_path: Path) -> None:
    tree = store.import_directory("one", _root(tmp_path / "a"))
    content = store.resolve("one").digest
    observed: list[bool] = []

    def used() -> set[str]:
        observed.append(tree.exists())
        return {content} if len(observed) > 1 else set()

    assert store.remove("one", used) is False
    assert observed == [True, False] and (tree / "bin/tool").read_text() == "x"


def test_a_name_may_move_to_another_tree(store: ImageStore, tmp_path: Path) -> None:
    store.import_directory("app", _root(tmp_path / "a"))
    before = store.resolve("app").digest
    store.import_directory("app", _root(tmp_path / "b", "new"), replace=True)
    after = store.resolve("app")
    assert after.digest != before
    assert (after.tree / "bin/tool").read_text() == "new"
    assert (store.tree(before) / "bin/tool").read_text() == "x"


def test_the_tag_latest_is_the_one_of_a_name_without_a_tag(store: ImageStore, tmp_path: Path) -> None:
    for made, names in {
        "plain": ("plain", "plain:latest", "docker.io/library/plain", "docker.io/library/plain:latest"),
        "team/app:latest": ("team/app", "docker.io/team/app:latest"),
    }.items():
        store.import_directory(made, _root(tmp_path / made.replace("/", "-"), made))
        assert {store.resolve(name).digest for name in names} == {store.resolve(made).digest}
    with pytest.raises(ImageNotFound):
        store.resolve("plain:12")


def test_a_directory_that_was_put_there_is_taken_in(store: ImageStore) -> None:
    _root(store.directory / "plain")
    image = store.resolve("plain")
    assert (store.directory / "plain").is_symlink()
    assert store.resolve("plain") == image
    assert store.info("plain").size > 0


def test_what_is_being_made_is_not_collected(store: ImageStore, tmp_path: Path) -> None:
    def fill(tree: Path) -> None:
        _root(tree)
        assert store.collect(used=tuple) == 0

    assert (store.build("app", fill, "here") / "bin/tool").exists()


def test_what_a_crash_left_is_collected(store: ImageStore, tmp_path: Path) -> None:
    store.import_directory("app", _root(tmp_path / "a"))
    (store.trees / ".new-1/tree").mkdir(parents=True)
    (store.trees / ".gone-1").mkdir()
    (store.trees / ".link-1").symlink_to("nowhere")
    assert store.collect(used=tuple) == 0
    assert [path.name for path in store.trees.iterdir()] == [store.resolve("app").digest]


# --------------------------------------------------------------------------- OCI layouts and docker save


def _layer(*entries: tuple[str, bytes, bytes], links: dict[str, str] | None = None) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind, data in entries:
            member = tarfile.TarInfo(name)
            member.type, member.size, member.uid, member.gid = kind, len(data), 7, 8
            member.mode = 0o4755 if kind == tarfile.REGTYPE else 0o755
            member.linkname = (links or {}).get(name, "")
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


FILE, DIR, LINK = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE
LOWER = _layer(
    ("usr", DIR, b""), ("usr/old", FILE, b"old"), ("d", DIR, b""), ("d/below", FILE, b"b"), ("x", FILE, b"x")
)
UPPER = _layer(
    ("usr/.wh.old", FILE, b""),
    ("none/.wh.none", FILE, b""),
    ("usr/new", FILE, b"new"),
    ("d/kept", FILE, b"k"),
    ("d/.wh..wh..opq", FILE, b""),
    ("x", DIR, b""),
    ("x/in", FILE, b"in"),
    ("l", LINK, b""),
    links={"l": "/usr/new"},
)
CONFIG = {"config": {"Env": ["A=1", "PATH=/bin"], "WorkingDir": "/usr", "User": "me", "Cmd": ["sh"], "Labels": None}}


def _oci(
    directory: Path,
    layers: list[bytes],
    *,
    architecture: str = ARCHITECTURE,
    own: str | None = None,
    damage: bool = False,
) -> Path:
    """`architecture`: what its index says; `own`: what its configuration says."""
    blobs = directory / "blobs/sha256"
    blobs.mkdir(parents=True)
    config = {**CONFIG, **({"architecture": own, "os": "linux"} if own else {})}

    def blob(data: bytes) -> dict[str, Any]:
        name = hashlib.sha256(data).hexdigest()
        (blobs / name).write_bytes(data + (b"!" if damage else b""))
        return {"digest": f"sha256:{name}", "size": len(data)}

    manifest = {"config": blob(json.dumps(config).encode()), "layers": [blob(layer) for layer in layers]}
    target = {**blob(json.dumps(manifest).encode()), "platform": {"os": "linux", "architecture": architecture}}
    other = {**blob(b"{}"), "platform": {"os": "windows", "architecture": architecture}}
    (directory / "index.json").write_text(json.dumps({"manifests": [other, target]}))
    (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return directory


def _broken(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes(byte ^ 0xFF for byte in data[middle : middle + 16]) + data[middle + 16 :]


def _packed(directory: Path, target: Path) -> Path:
    with tarfile.open(target, "w") as tar:
        for path in sorted(directory.rglob("*")):
            tar.add(path, str(path.relative_to(directory)), recursive=False)
    return target


def _check(store: ImageStore) -> None:
    image = store.resolve("app")
    tree = image.tree
    assert sorted(path.name for path in (tree / "usr").iterdir()) == ["new"]
    assert [path.name for path in (tree / "d").iterdir()] == ["kept"]
    assert (tree / "x/in").read_bytes() == b"in"
    assert list((tree / "none").iterdir()) == []  # made by a whiteout, as docker load does
    assert os.readlink(tree / "l") == "/usr/new"
    new = (tree / "usr/new").stat()
    assert (new.st_uid, new.st_gid, new.st_mode & 0o7777) == (7, 8, 0o4755)
    assert image.config == ImageConfig(env={"A": "1", "PATH": "/bin"}, workdir="/usr", user="me", cmd=["sh"])


@pytest.mark.parametrize("packed", [False, True])
def test_an_oci_layout(store: ImageStore, tmp_path: Path, packed: bool) -> None:
    layout = _oci(tmp_path / "oci", [gzip.compress(LOWER), zstd(UPPER)])
    store.import_archive("app", _packed(layout, tmp_path / "oci.tar") if packed else layout)
    _check(store)


def test_an_archive_of_docker_save(store: ImageStore, tmp_path: Path) -> None:
    directory = tmp_path / "saved"
    (directory / "1").mkdir(parents=True)
    (directory / "1/layer.tar").write_bytes(LOWER)
    (directory / "2.tar").write_bytes(UPPER)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    manifest = [{"Config": "config.json", "RepoTags": ["app:1"], "Layers": ["1/layer.tar", "2.tar"]}]
    (directory / "manifest.json").write_text(json.dumps(manifest))
    store.import_archive("app", _packed(directory, tmp_path / "saved.tar"))
    _check(store)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"damage": True}, "damaged"),
        ({"architecture": "s390x"}, "for windows/s390x, s390x, not for"),
        ({"own": "s390x"}, "for s390x, not for"),
        ({"layers": [b"no tar" * 200]}, "not a tar"),
        ({"layers": [gzip.compress(LOWER)[:60]]}, "damaged|not a tar"),
        *(
            ({"layers": [_broken(pack(LOWER))]}, "damaged|zlib error")
            for pack in (gzip.compress, bz2.compress, lzma.compress, zstd)
        ),
        ({"layers": [_layer(("../out", FILE, b"x"))]}, "leaves its directory"),
        ({"layers": [_layer(("l", LINK, b""), ("l/out", FILE, b"x"), links={"l": "/"})]}, ""),
    ],
)
def test_bad_layouts_are_refused_or_contained(
    store: ImageStore, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    layout = _oci(tmp_path / "oci", **{"layers": [LOWER], **change})
    if message:
        with pytest.raises((Invalid, Unsupported), match=message):
            store.import_archive("app", layout)
        assert store.list() == []
    else:
        store.import_archive("app", layout)
    assert not (tmp_path / "out").exists() and not Path("/out").exists()


@pytest.mark.parametrize("index", [{"manifests": 7}, {"manifests": [7]}, {"manifests": [{"annotations": 7}]}])
def test_an_index_of_another_form_is_refused(store: ImageStore, tmp_path: Path, index: dict[str, Any]) -> None:
    layout = _oci(tmp_path / "oci", [LOWER])
    (layout / "index.json").write_text(json.dumps(index))
    with pytest.raises((Invalid, Unsupported)):
        store.import_archive("app", layout)
    assert store.list() == []


def test_of_an_index_the_image_for_this_machine_is_taken(tmp_path: Path, store: ImageStore) -> None:
    """What names its platform first, then what its configuration says; one that names nothing may be another's."""
    layout = tmp_path / "oci"
    (layout / "blobs/sha256").mkdir(parents=True)
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def blob(data: bytes) -> dict[str, Any]:
        name = hashlib.sha256(data).hexdigest()
        (layout / "blobs/sha256" / name).write_bytes(data)
        return {"digest": f"sha256:{name}", "size": len(data)}

    def entry(name: str, own: str | None, **about: Any) -> dict[str, Any]:
        config = {"architecture": own, "os": "linux", "config": {"User": name}}
        layers = [blob(_layer((name, FILE, b"")))]
        return {**blob(json.dumps({"config": blob(json.dumps(config).encode()), "layers": layers}).encode()), **about}

    def taken(*entries: dict[str, Any]) -> str:
        (layout / "index.json").write_text(json.dumps({"manifests": entries}))
        store.import_archive("app", layout, replace=True)
        return store.resolve("app").config.user

    mine = {"os": "linux", "architecture": ARCHITECTURE}
    other, silent = entry("other", "s390x"), entry("silent", ARCHITECTURE)
    named = entry("named", ARCHITECTURE, platform=mine)
    newer = entry("newer", ARCHITECTURE, platform={**mine, "variant": "v3"})
    proof = entry("proof", None, platform={"os": "unknown", "architecture": "unknown"})
    assert taken(other, silent) == "silent"
    assert taken(other, silent, named) == taken(newer, named) == "named"
    assert taken(proof, newer) == "newer"
    nested = blob(json.dumps({"manifests": [other, proof, silent]}).encode())
    assert taken(blob(json.dumps({"manifests": [other]}).encode()), nested) == "silent"
    for entries in ([other], [proof], [other, proof]):
        with pytest.raises(Unsupported, match=r"for (s390x|unknown/unknown), not for"):
            taken(*entries)
    names = [{"annotations": {"org.opencontainers.image.ref.name": name}} for name in ("one", "two")]
    assert taken(silent | names[0], silent | names[1]) == "silent"  # two tags of an image
    with pytest.raises(Invalid, match="holds 2 images"):
        taken(silent | names[0], named | names[1])


def test_a_tree_of_another_store_gets_a_name_here(store: ImageStore, tmp_path: Path) -> None:
    """As that of the base image in a test's store: a name of this one points into the other."""
    theirs = ImageStore(tmp_path / "theirs")
    tree = theirs.import_directory("base", _root(tmp_path / "a"))
    (store.directory / "base").symlink_to(theirs.directory / "base")
    content = store.resolve("base").digest
    assert content == theirs.resolve("base").digest and store.tree(content) == tree
    config = ImageConfig(user="7")
    assert store.give_name("mine", content, "given", config)
    assert store.resolve("mine").config == config and store.resolve("mine").tree.resolve() == tree
    assert not store.give_name("none", "0" * 64, "given", config)
    store.remove("base")
    assert store.resolve("mine").digest == content and store.collect(tuple) == 0
    assert store.remove("mine") and list(store.trees.iterdir()) == []
    assert (tree / "bin/tool").read_text() == "x" and theirs.resolve("base").tree == tree  # it is theirs


def test_names_of_one_tree_have_each_its_own_configuration(store: ImageStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_text("same")

    def fill(config: ImageConfig) -> Callable[[Path], ImageConfig]:
        def copy(tree: Path) -> ImageConfig:
            shutil.copy2(source / "file", tree / "file")
            return config

        return copy

    configs = {
        name: ImageConfig(user=user, env={"A": user}) for name, user in (("one", ""), ("two", "x"), ("tres", "y"))
    }
    trees = {store.build(name, fill(config), "test") for name, config in configs.items()}
    assert len(trees) == 1
    for name, config in configs.items():
        assert store.resolve(name).config == config == store.info(name).config
        assert store.image(store.resolve("one").digest, name).config == config
    store.build("two", fill(configs["tres"]), "test", replace=True)
    assert store.resolve("two").config == configs["tres"] and store.resolve("one").config == configs["one"]
    store.remove("one")
    assert store.collect(tuple) == 0 and store.resolve("tres").config == configs["tres"]
    store.remove("two")
    assert store.remove("tres") and not list(store.trees.iterdir())
