"""Two trainer ranks publish what each of them holds; readers of every kind get the whole, or their part of it."""

from __future__ import annotations

import asyncio
import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rollout.weights.layout import rank_rows
from rollout.weights.mirror import Mirror
from rollout.weights.puller import Puller
from rollout.weights.relay import Relay
from rollout.weights.source import DirectorySource, HttpSource, source_of
from rollout.weights.store import VersionStore
from rollout.weights.versions import Ref
from sandbox.errors import NotFound
from tests.rollout.weights.test_relay import served
from tests.support.weights import FILES, Walk, same
from trainer.distributed.ranks import Ranks
from trainer.weights import Publisher

VERSIONS, RESTART = 6, 3


def rows(tensors: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """What FSDP2 leaves on this rank: rows of each tensor."""
    return {name: tensor[slice(*rank_rows(len(tensor), rank, 2))] for name, tensor in tensors.items()}


def publish(rank: int, directory: Path, apart: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=2)
    store = VersionStore(directory / (f"weights-{rank}" if apart else "weights"))
    walk = Walk(scale=8)
    shapes = {name: tensor.shape for name, tensor in walk.tensors.items()}
    publisher = Publisher(store, ranks=Ranks(rank, 2), slots=2, complete_every=100, keep=2, apart=apart)
    for version in range(VERSIONS):
        if version == RESTART:
            publisher.close()
            publisher = Publisher(store, ranks=Ranks(rank, 2), slots=2, complete_every=100, keep=2, apart=apart)
            assert publisher.resume(rows(walk.tensors, rank), shapes)
        publisher.start(version, rows(walk.step(1e-7), rank), FILES, shapes=shapes)
        assert (ref := publisher.wait()) is not None and ref.version == version
    publisher.close()
    dist.destroy_process_group()


def published(directory: Path, *, apart: bool) -> Walk:
    """By two processes; the weights of the last version."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=publish, args=(rank, directory, apart)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    for process in ranks:
        process.kill()  # one that waits for ever
    assert [process.exitcode for process in ranks] == [0, 0]
    walk = Walk(scale=8)
    for _ in range(VERSIONS):
        walk.step(1e-7)
    return walk


async def test_two_ranks_publish_and_two_slices_read(tmp_path: Path) -> None:
    walk, store = await asyncio.to_thread(published, tmp_path, apart=False), VersionStore(tmp_path / "weights")
    assert [ref.version for ref in store.versions()][-1] == VERSIONS - 1
    changes = [store.manifest(ref).complete is None for ref in store.versions()]
    assert changes[-2:] == [True, True]  # they went on after the restart
    fetched = []
    for part, parts in ((0, 1), (0, 2), (1, 2)):
        puller = Puller(DirectorySource(store), Mirror(tmp_path / f"{part}-{parts}", part=part, parts=parts), name="p")
        fetched.append((await puller.pull()).spent.bytes)
        assert same(tmp_path / f"{part}-{parts}", walk.tensors, part=part, parts=parts)
        await puller.close()
    assert all(0.4 * fetched[0] < item < 0.6 * fetched[0] for item in fetched[1:])


async def test_each_rank_serves_what_it_wrote(tmp_path: Path) -> None:
    """No folder is shared: a relay brings each chunk from the rank that has it, for readers of slices."""
    walk = await asyncio.to_thread(published, tmp_path, apart=True)
    stores = [VersionStore(tmp_path / f"weights-{rank}") for rank in range(2)]
    listed = [[ref.version for ref in store.versions()] for store in stores]
    assert listed[0] == listed[1] and listed[0][-1] == VERSIONS - 1
    contents = [{path.name for path in (store.directory / "chunks").glob("??/*")} for store in stores]
    assert contents[0] - contents[1] and contents[1] - contents[0]
    async with served(Relay(stores[0]).application()) as first, served(Relay(stores[1]).application()) as second:
        relay = Relay(VersionStore(tmp_path / "relay"), source_of(f"{first},{second}"))
        async with served(relay.application()) as near:
            fetched = []
            for part, parts in ((0, 1), (0, 2), (1, 2)):
                mirror = Mirror(tmp_path / f"{part}-{parts}", part=part, parts=parts)
                puller = Puller(HttpSource(near), mirror, name=f"p{part}{parts}")
                fetched.append((await puller.pull()).spent.bytes)
                assert same(tmp_path / f"{part}-{parts}", walk.tensors, part=part, parts=parts)
                await puller.close()
            assert all(0.4 * fetched[0] < item < 0.6 * fetched[0] for item in fetched[1:])
            assert set(stores[0].readers()) == set(stores[1].readers()) == {"p01", "p02", "p12"}
            missing = HttpSource(near)
            with pytest.raises(NotFound, match="no weights"):
                await missing.chunk(Ref("0" * 64, 10))
            await missing.close()
        assert relay.upstream is not None
        await relay.upstream.close()
