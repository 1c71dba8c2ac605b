"""Who takes part: this process's number, how many there are, what they share, and sums over all of them."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.distributed.mesh import MeshLayout


@dataclass(frozen=True, slots=True)
class RankMeshes:
    """The groups of ranks that exchange something: views of the same ranks, see `MeshLayout`."""

    dense: DeviceMesh  # replicate, shard, tensor
    experts: DeviceMesh  # replicate, shard, expert
    batches: DeviceMesh  # batch, context, tensor


@dataclass(frozen=True, slots=True)
class Ranks:
    """Example: ``Ranks(0, 1).alone``. Without `meshes` each rank computes a micro-batch of its own."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    layout: MeshLayout | None = None
    meshes: RankMeshes | None = None

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def batches(self) -> int:
        """Micro-batches that are computed at the same time."""
        return self.size if self.layout is None else self.layout.batches

    @property
    def batch(self) -> int:
        """Which one of them this rank works on, maybe with others."""
        return self.rank if self.layout is None else self.layout.batch_of(self.rank)

    @property
    def context(self) -> int:
        """Ranks that share the tokens of each micro-batch."""
        return 1 if self.layout is None else self.layout.context

    @property
    def averaged(self) -> int:
        """Ranks over whose gradients sharding takes the mean."""
        return self.size if self.layout is None else self.layout.averaged

    def sum(self, values: Tensor) -> Tensor:
        """Over micro-batches of the same time, the same on each rank."""
        if self.alone:
            return values
        total = values.to(self.device)
        dist.all_reduce(total, group=None if self.meshes is None else self.meshes.batches.get_group("batch"))
        return total.cpu()

    def any(self, flag: bool) -> bool:
        """Whether it is set on some rank."""
        if self.alone:
            return flag
        total = torch.tensor([float(flag)], device=self.device)
        dist.all_reduce(total)
        return bool(total.item())

    def barrier(self) -> None:
        if not self.alone:
            dist.barrier()


ALONE = Ranks()


def join(*, timeout: float = 600.0, **sizes: int) -> Ranks:
    """Takes part in what torchrun started; outside of it, alone. NCCL for GPUs and gloo for everything else.

    `sizes`: of the mesh, as `MeshSettings` has them. Raises Invalid where they do not make up the ranks.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    layout = MeshLayout(ranks=size, **sizes)
    if "WORLD_SIZE" not in os.environ:
        return ALONE
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout))
    return Ranks(int(os.environ["RANK"]), size, device, layout, make_meshes(device, layout))


def make_meshes(device: torch.device, layout: MeshLayout) -> RankMeshes:
    """All ranks call it."""
    return RankMeshes(
        init_device_mesh(device.type, layout.dense_sizes, mesh_dim_names=("replicate", "shard", "tensor")),
        init_device_mesh(device.type, layout.expert_sizes, mesh_dim_names=("replicate", "shard", "expert")),
        init_device_mesh(device.type, layout.batch_sizes, mesh_dim_names=("batch", "context", "tensor")),
    )


def here(*, offload: bool = False) -> Ranks:
    """This process alone, on its GPU where there is one. `offload`: as a group of one, which FSDP asks for."""
    if not torch.cuda.is_available():
        return ALONE
    if offload and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    return Ranks(device=torch.device("cuda", torch.cuda.current_device()))


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
