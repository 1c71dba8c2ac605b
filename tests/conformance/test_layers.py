"""Odd layers of images, unpacked here and by `docker load`: the trees are the same, or both refuse.

Part of `make test-images`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.errors import PagurusError
from sandbox.image import export
from sandbox.image.store import ImageStore
from tests.conformance.dockerfiles import layers
from tests.conformance.dockerfiles.differences import LAYER_DIFFERENCES
from tests.support import reference_docker
from tests.support.image_facts import differences, docker_config, our_config, tree_facts
from tests.support.reference_docker import ReferenceDocker

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReferenceDocker]:
    if not reference_docker.TREE:
        pytest.skip("needs Docker: run `make test-images`")
    made = ReferenceDocker(tmp_path_factory.mktemp("docker"))
    try:
        yield made
    finally:
        made.close()


def both(reference: ReferenceDocker, store: ImageStore, archive: Path) -> list[str]:
    """How the trees differ that both make of an archive of `docker save`."""
    done = reference.run("load", "-i", reference.inside(archive))
    theirs, refusal = {}, done.stderr.decode()[-300:] if done.returncode else ""
    if not refusal:
        with reference.tree("odd") as tree:
            theirs = tree_facts(tree)
        reference.run("image", "rm", "-f", "odd")
    try:
        ours = tree_facts(store.import_archive("odd", archive, replace=True))
        said = ""
    except PagurusError as error:
        ours, said = {}, str(error)
    if refusal or said:
        return [] if refusal and said else [f"reference: {refusal or 'loaded'}", f"here: {said or 'loaded'}"]
    return differences(theirs, ours)


def judged(name: str, found: list[str]) -> None:
    if name in LAYER_DIFFERENCES:
        assert found, f"there is no difference any more: {LAYER_DIFFERENCES[name]}"
    else:
        assert not found, "\n".join(["", *found])


@pytest.mark.parametrize("name", layers.CASES)
def test_layers(reference: ReferenceDocker, tmp_path: Path, name: str) -> None:
    archive = reference.root / "odd.tar"
    layers.save(archive, [layers.layer(entries) for entries in layers.CASES[name]])
    judged(name, both(reference, ImageStore(tmp_path / "images"), archive))


@pytest.mark.parametrize("packing", layers.PACKINGS)
def test_compressions(reference: ReferenceDocker, tmp_path: Path, packing: str) -> None:
    archive = reference.root / "odd.tar"
    layers.save(archive, [layers.layer(layers.BASE), layers.layer([layers.f("b", b"b" * 5000)])], packing)
    judged(packing, both(reference, ImageStore(tmp_path / "images"), archive))


@pytest.mark.parametrize("form", ["gnu", "0.0", "0.1", "1.0"])
def test_files_with_holes(reference: ReferenceDocker, tmp_path: Path, form: str) -> None:
    archive = reference.root / "odd.tar"
    layers.save(archive, [layers.sparse(tmp_path / "sparse", form)])
    judged(f"sparse {form}", both(reference, ImageStore(tmp_path / "images"), archive))


@pytest.mark.parametrize(
    "name",
    [
        "three layers",
        "modes",
        "owners",
        "times",
        "long names",
        "capabilities",
        "fifo",
        "attributes",
        "names of all kinds",
    ],
)
def test_docker_loads_what_is_exported(reference: ReferenceDocker, tmp_path: Path, name: str) -> None:
    store = ImageStore(tmp_path / "images")
    layers.save(tmp_path / "odd.tar", [layers.layer(entries) for entries in layers.CASES[name]])
    tree = store.import_archive("odd", tmp_path / "odd.tar")
    image = store.resolve("odd")
    (tmp_path / "layout").mkdir()
    export.write_layout(tree, image.config, 1_000_000.0, "odd", tmp_path / "layout")
    with (reference.root / "exported.tar").open("wb") as out:
        export.pack_layout(tmp_path / "layout", out)
    done = reference.run("load", "-i", reference.inside(reference.root / "exported.tar"))
    assert done.returncode == 0, done.stderr
    with reference.tree("odd") as loaded:
        found = differences(tree_facts(loaded), tree_facts(tree), ())
    assert not found and docker_config(reference.inspect("odd")) == our_config(image.config)
