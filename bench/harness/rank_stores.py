"""Trainer ranks as processes of their own, each with a store of its own that a server of its own gives out."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rollout.weights.layout import rank_rows
from rollout.weights.store import VersionStore
from trainer.distributed.ranks import Ranks
from trainer.weights import Publisher

Weights = Callable[[int], Mapping[str, Tensor]]  # of a version, whole


def store_of_rank(root: Path, rank: int) -> Path:
    return root / f"rank-{rank}"


def rows(tensors: Mapping[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """What FSDP2 leaves on this rank."""
    return {name: tensor[slice(*rank_rows(len(tensor), rank, ranks))] for name, tensor in tensors.items()}


def _publish(rank: int, ranks: int, root: Path, weights: Weights, versions: int, files: Mapping[str, bytes]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=ranks)
    store = VersionStore(store_of_rank(root, rank))
    publisher = Publisher(
        store, ranks=Ranks(rank, ranks), slots=ranks, complete_every=versions + 1, keep=versions, apart=True
    )
    for version in range(versions):
        tensors = weights(version)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        publisher.start(version, rows(tensors, rank, ranks), files, shapes=shapes)
        publisher.wait()
    publisher.close()
    dist.destroy_process_group()


def publish(root: Path, weights: Weights, *, versions: int, ranks: int, files: Mapping[str, bytes]) -> None:
    """`versions` versions, published by `ranks` processes. `weights` and what it holds must be picklable."""
    root.mkdir(parents=True, exist_ok=True)  # else the ranks wait for their rendezvous in it
    context = multiprocessing.get_context("spawn")
    started = [
        context.Process(target=_publish, args=(rank, ranks, root, weights, versions, files)) for rank in range(ranks)
    ]
    for process in started:
        process.start()
    deadline = time.monotonic() + 900
    for process in started:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()  # one that waits for ever
    if any(process.exitcode != 0 for process in started):
        raise RuntimeError(f"ranks ended with {[process.exitcode for process in started]}")
