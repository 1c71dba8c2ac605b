"""Who takes part: this process's number, how many there are, and sums over all of them."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ranks:
    """Example: ``Ranks(0, 1).alone``."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def alone(self) -> bool:
        return self.size == 1

    def sum(self, values: Tensor) -> Tensor:
        """Over all ranks, the same on each."""
        if self.alone:
            return values
        total = values.to(self.device)
        dist.all_reduce(total)
        return total.cpu()

    def barrier(self) -> None:
        if not self.alone:
            dist.barrier()


ALONE = Ranks()


def join(*, timeout: float = 600.0) -> Ranks:
    """Takes part in what torchrun started; outside of it, alone. NCCL for GPUs and gloo for everything else."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if "WORLD_SIZE" not in os.environ:
        return ALONE
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout))
    return Ranks(int(os.environ["RANK"]), size, device)


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
