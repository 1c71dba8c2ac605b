"""Two trainer ranks publish what each of them holds; readers of every kind get the whole, or their part of it."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rollout.weights.layout import rank_rows
from rollout.weights.mirror import Mirror
from rollout.weights.puller import Puller
from rollout.weights.source import FolderSource
from rollout.weights.store import VersionStore
from tests.support.weights import FILES, Walk, same
from trainer.distributed.ranks import Ranks
from trainer.weights import Publisher

VERSIONS, RESTART = 6, 3


def rows(tensors: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """What FSDP2 leaves on this rank: rows of each tensor."""
    return {name: tensor[slice(*rank_rows(len(tensor), rank, 2))] for name, tensor in tensors.items()}


def publish(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    store = VersionStore(folder / "weights")
    walk = Walk(scale=8)
    shapes = {name: tensor.shape for name, tensor in walk.tensors.items()}
    publisher = Publisher(store, ranks=Ranks(rank, 2), slots=2, whole_every=100)
    for version in range(VERSIONS):
        if version == RESTART:
            publisher.close()
            publisher = Publisher(store, ranks=Ranks(rank, 2), slots=2, whole_every=100)
            assert publisher.resume(rows(walk.tensors, rank), shapes)
        publisher.start(version, rows(walk.step(1e-7), rank), FILES, shapes=shapes)
        assert (ref := publisher.wait()) is not None and ref.version == version
    publisher.close()
    dist.destroy_process_group()


async def test_two_ranks_publish_and_two_slices_read(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=publish, args=(rank, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    for process in ranks:
        process.kill()  # one that waits for ever
    assert [process.exitcode for process in ranks] == [0, 0]
    store, walk = VersionStore(tmp_path / "weights"), Walk(scale=8)
    assert [ref.version for ref in store.versions()] == list(range(VERSIONS))
    assert (
        sum(store.manifest(ref).whole is not None for ref in store.versions()) == 1
    )  # changes went on after the restart
    for _ in range(VERSIONS):
        walk.step(1e-7)
    fetched = []
    for part, parts in ((0, 1), (0, 2), (1, 2)):
        puller = Puller(FolderSource(store), Mirror(tmp_path / f"{part}-{parts}", part=part, parts=parts), name="p")
        fetched.append((await puller.pull()).spent.bytes)
        assert same(tmp_path / f"{part}-{parts}", walk.tensors, part=part, parts=parts)
        await puller.close()
    assert all(0.4 * fetched[0] < each < 0.6 * fetched[0] for each in fetched[1:])
