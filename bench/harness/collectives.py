"""How fast ranks exchange: NCCL among the GPUs of a machine, gloo among processes on a CPU.

``torchrun -m bench.harness.collectives MEGABYTES`` prints, as JSON, for each collective the bytes that a rank receives
a second: of an all-gather and a reduce-scatter (n - 1) / n of the buffer, of an all-reduce twice that, of a broadcast
all of it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from bench.harness import rank_output
from trainer.distributed.ranks import Ranks, join, leave

TRIES = 5


def measured(ranks: int, megabytes: int) -> dict[str, float]:
    """GB a second and rank."""
    return rank_output.run(__name__, ranks, str(megabytes))


def main(megabytes: int) -> None:
    ranks = join()
    size = megabytes * (1 << 20) // 4 // ranks.size * ranks.size
    buffer = torch.ones(size, device=ranks.device)
    part = buffer.chunk(ranks.size)[ranks.rank].clone()
    share = (ranks.size - 1) / ranks.size
    acts: dict[str, tuple[Callable[[], object], float]] = {
        "all_gather": (lambda: dist.all_gather_into_tensor(buffer, part), share),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(part, buffer), share),
        "all_reduce": (lambda: dist.all_reduce(buffer), 2 * share),
        "broadcast": (lambda: dist.broadcast(buffer, 0), 1.0),
    }
    rates = {f"{name}_gb_s": times * 4 * size / quickest(act, ranks) / 1e9 for name, (act, times) in acts.items()}
    if ranks.rank == 0:
        print(json.dumps({name: round(rate, 2) for name, rate in rates.items()}), flush=True)
    leave()


def quickest(act: Callable[[], object], ranks: Ranks) -> float:
    """Seconds of the quickest try, by this rank's clock."""
    took = []
    for _ in range(TRIES + 1):
        dist.barrier()
        began = time.perf_counter()
        act()
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)
        took.append(time.perf_counter() - began)
    return min(took[1:])


if __name__ == "__main__":
    main(int(sys.argv[1]))
