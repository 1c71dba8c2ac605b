"""Publisher, store, mirror and puller together: whatever happens, a reader has a version bit for bit, or none."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rollout.weights.mirror import Mirror
from rollout.weights.puller import PulledVersion, Puller
from rollout.weights.source import DirectorySource
from rollout.weights.store import ReaderLease, VersionStore
from sandbox.errors import Conflict, EngineFailed, Invalid, NotFound
from tests.support.weights import FILES, Walk, same
from trainer.weights import Publisher


def reader(store: VersionStore, directory: Path, changes: bool = True, **options: int | bool) -> Puller:
    mirror = Mirror(directory, **options)  # type: ignore[arg-type]
    return Puller(DirectorySource(store), mirror, name=directory.name, changes=changes)


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    return VersionStore(tmp_path / "weights")


async def test_readers_of_every_kind_follow_with_skips_and_restarts(store: VersionStore, tmp_path: Path) -> None:
    walk, chance = Walk(), random.Random(7)
    publisher = Publisher(store, slots=4, complete_every=6, keep=2)
    kinds: dict[str, dict[str, int]] = {
        "complete": {},
        "left": {"part": 0, "parts": 2},
        "right": {"part": 1, "parts": 2},
    }
    readers = {name: reader(store, tmp_path / name, **options) for name, options in kinds.items()}
    ways = set()
    for version in range(40):
        if chance.random() < 0.1:  # the trainer is restarted: it goes on from the bytes that it published
            publisher.close()
            publisher = Publisher(store, slots=4, complete_every=6, keep=2)
            assert publisher.resume(walk.tensors, {name: item.shape for name, item in walk.tensors.items()})
        publisher.publish(version, walk.step(), FILES)
        for name, options in kinds.items():
            if chance.random() < 0.2:
                await readers[name].close()
                readers[name] = reader(store, tmp_path / name, **options)
            if chance.random() < 0.5:
                pulled = await readers[name].pull()
                ways.add((pulled.writes is None, min(pulled.hops, 2)))
                assert pulled.version == version == readers[name].mirror.version
                assert same(tmp_path / name, walk.tensors, **options)
    assert ways >= {(True, 1), (False, 1), (False, 2)}  # whole images, single steps and chains were all taken
    assert (tmp_path / "complete" / "tokenizer.json").read_bytes() == FILES["tokenizer.json"]
    for item in readers.values():
        await item.close()


async def test_an_engine_that_writes_what_was_pulled_has_the_weights(store: VersionStore, tmp_path: Path) -> None:
    walk, publisher, puller = Walk(), Publisher(store, complete_every=100), reader(store, tmp_path / "m", untie=True)
    publisher.publish(0, walk.tensors, FILES)
    assert (await puller.pull()).writes is None
    memory = {name: tensor.view(torch.int16).numpy().view(np.uint16).reshape(-1).copy()
              for name, tensor in load_file(tmp_path / "m" / "model.safetensors").items()}  # fmt: skip
    for version in range(1, 8):
        publisher.publish(version, walk.step(), FILES)
        if version % 2:
            pulled = await puller.pull()
            assert pulled.since is not None and pulled.writes
            for write in pulled.writes:
                memory[write.name][slice(None) if write.positions is None else write.positions] = write.values
            for name, tensor in load_file(tmp_path / "m" / "model.safetensors").items():
                assert (memory[name] == tensor.view(torch.int16).numpy().view(np.uint16).reshape(-1)).all()
    tied = load_file(tmp_path / "m" / "model.safetensors")
    assert torch.equal(tied["lm_head.weight"], tied["model.embed_tokens.weight"])
    assert b'"tie_word_embeddings": false' in (tmp_path / "m" / "config.json").read_bytes()
    await puller.close()


async def test_an_engine_that_reads_the_mirror_alone_is_told_no_changes(store: VersionStore, tmp_path: Path) -> None:
    walk, publisher = Walk(), Publisher(store, complete_every=100)
    puller = reader(store, tmp_path / "m", changes=False)
    for version in range(3):
        publisher.publish(version, walk.step(), FILES)
        pulled = await puller.pull()
        assert pulled.writes is None and pulled.version == version and pulled.hops == 1
        assert same(tmp_path / "m", walk.tensors)
    await puller.close()


async def test_a_step_costs_what_changed(store: VersionStore, tmp_path: Path) -> None:
    walk, publisher, puller = Walk(scale=64), Publisher(store, complete_every=100), reader(store, tmp_path / "m")
    publisher.publish(0, walk.tensors, FILES)
    complete = (await puller.pull()).spent.bytes
    publisher.publish(1, walk.step(1e-7), FILES)
    pulled = await puller.pull()
    assert 0 < pulled.spent.bytes < complete / 20
    publisher.publish(2, walk.tensors, FILES)  # nothing changed
    assert (await puller.pull()).spent.bytes < 5_000
    assert same(tmp_path / "m", walk.tensors)
    await puller.close()


async def test_slices_cost_their_share(store: VersionStore, tmp_path: Path) -> None:
    walk, publisher = Walk(scale=32), Publisher(store, slots=2, complete_every=100)
    publisher.publish(0, walk.tensors, FILES)
    spent = []
    for part in range(2):
        puller = reader(store, tmp_path / str(part), part=part, parts=2)
        spent.append((await puller.pull()).spent.bytes)
        await puller.close()
    puller = reader(store, tmp_path / "all")
    complete = (await puller.pull()).spent.bytes
    await puller.close()
    assert all(0.4 * complete < item < 0.55 * complete for item in spent)


async def test_a_damaged_mirror_is_mended(store: VersionStore, tmp_path: Path) -> None:
    walk, publisher, puller = Walk(), Publisher(store), reader(store, tmp_path / "m")
    publisher.publish(0, walk.tensors, FILES)
    await puller.pull()
    with (tmp_path / "m" / "model.safetensors").open("r+b") as file:
        file.seek(-40, os.SEEK_END)
        file.write(b"\x55")
    publisher.publish(1, walk.step(), FILES)
    pulled = await puller.pull()
    assert pulled.writes is None  # the engine may have loaded the damage: it takes everything
    assert same(tmp_path / "m", walk.tensors)
    await puller.close()


async def test_a_version_that_was_withdrawn_and_published_anew(store: VersionStore, tmp_path: Path) -> None:
    walk, publisher, puller = Walk(), Publisher(store), reader(store, tmp_path / "m")
    for version in range(3):
        publisher.publish(version, walk.step(), FILES)
    at_two = {name: tensor.clone() for name, tensor in walk.tensors.items()}
    publisher.publish(3, walk.step(), FILES)
    await puller.pull()
    store.withdraw(2)
    assert (await puller.pull()).version == 2  # back
    assert same(tmp_path / "m", at_two)
    other = Walk(seed=5)
    publisher.publish(3, other.tensors, FILES)
    assert (await puller.pull()).version == 3
    assert same(tmp_path / "m", other.tensors)
    assert (await puller.pull(2)).version == 2
    assert same(tmp_path / "m", at_two)
    with pytest.raises(NotFound, match="version 9 of the weights is not published"):
        await puller.pull(9)
    await puller.close()


async def test_collection_leaves_what_readers_need(store: VersionStore, tmp_path: Path) -> None:
    walk = Walk(scale=8)
    publisher, puller = Publisher(store, complete_every=4, keep=1), reader(store, tmp_path / "m")
    publisher.publish(0, walk.tensors, FILES)
    first = (await puller.pull()).digest
    for version in range(1, 12):
        publisher.publish(version, walk.step(1e-7), FILES)
    pulled: PulledVersion = await puller.pull()
    assert pulled.since == first and pulled.hops == 11 and pulled.writes is not None  # every step was still there
    assert same(tmp_path / "m", walk.tensors)
    publisher.publish(12, walk.step(1e-7), FILES)
    assert [ref.version for ref in store.versions()] == [8, 9, 10, 11, 12]
    late = reader(store, tmp_path / "late")
    await late.pull()
    assert same(tmp_path / "late", walk.tensors)
    content = sum(path.stat().st_size for path in store.directory.glob("chunks/??/*"))
    everything = sum((store.manifest(ref).total_bytes or 0) for ref in store.versions())
    assert content < everything + 200_000
    await late.close()
    await puller.close()


def test_a_reader_that_lets_go_while_readers_are_listed_is_passed_over(store: VersionStore) -> None:
    store.lease("stays", ReaderLease())
    (store.directory / "readers" / "went").symlink_to("nowhere")  # listed, and no longer there when it is read
    assert set(store.readers()) == {"stays"}


def test_weights_that_are_no_numbers_are_not_published(store: VersionStore) -> None:
    walk = Walk()
    walk.tensors["model.norm.weight"][3] = float("nan")
    with pytest.raises(Invalid, match=r"model\.norm\.weight is not finite"):
        Publisher(store).publish(0, walk.tensors, FILES)
    assert store.versions() == []


def test_a_publisher_that_was_replaced_cannot_publish(store: VersionStore) -> None:
    walk = Walk()
    old = Publisher(store, generation=1)
    old.publish(0, walk.tensors, FILES)
    Publisher(store, generation=2).publish(1, walk.step(), FILES)
    with pytest.raises(Conflict, match="version 1 comes from publisher 1, which was replaced"):
        old.publish(1, walk.step(), FILES)


def test_content_is_checked_and_names_are_digests(store: VersionStore) -> None:
    ref = store.put(b"some weights")
    assert store.get(ref) == b"some weights"
    store.path(ref.digest).write_bytes(b"some wEights")
    with pytest.raises(EngineFailed, match="were damaged"):
        store.get(ref)
    with pytest.raises(NotFound, match="has no weights"):
        store.get(ref)
    for name in ("../../etc/passwd", "a" * 63, "A" * 64, ""):
        with pytest.raises(Invalid, match="is no digest"):
            store.path(name)
    with pytest.raises(Invalid, match="is no name of a reader"):
        store.lease("../x", ReaderLease())
