"""Ranks of a trainer in a network of their own, in which every byte that they exchange is counted.

``python -m bench.harness.counted_ranks RANKS`` prints, as JSON, the bytes that crossed the loopback in one step, the
micro-batches of a rank and the model's weights. TCP's headers are counted as well.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist

from bench.harness import rank_output
from rollout.engine.embedded.model import ModelConfig, Qwen3
from trainer.batches.sample import Sample
from trainer.distributed.ranks import join, leave
from trainer.distributed.shard import shard
from trainer.learner import Learner
from trainer.models.scorer import Scorer
from trainer.objectives import named
from trainer.settings import OptimiserSettings

CONFIG = ModelConfig(
    vocab_size=4000, hidden_size=384, intermediate_size=1152, num_hidden_layers=8, num_attention_heads=6,
    num_key_value_heads=6, head_dim=64, max_position_embeddings=2048,
)  # fmt: skip
LENGTH, COUNT = 128, 8  # tokens of a trajectory, trajectories of a rank


def counted(ranks: int) -> dict[str, int]:
    """One step of so many ranks. Needs root: the network is a namespace."""
    around = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
    return rank_output.run(__name__, ranks, around=around, GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1")


def received() -> int:
    """Bytes of the loopback so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == "lo":
            return int(fields.split()[0])
    raise RuntimeError("there is no loopback")


def main() -> None:
    ranks = join()
    model = Qwen3(CONFIG)
    model.initialise(0)
    weights = sum(item.numel() for item in model.parameters())
    learner = Learner(
        shard(Scorer(model), ranks), named("dapo"), OptimiserSettings(budget=LENGTH * COUNT // 2), ranks=ranks
    )
    samples = [
        Sample(
            tokens=[1 + (n * 7 + t) % 999 for t in range(LENGTH)], mask=[0] + [1] * (LENGTH - 1),
            logprobs=[-8.0] * LENGTH, reward=float(n % 2), group=str(n // 4),
        )
        for n in range(COUNT * ranks.size)
    ]  # fmt: skip
    micro = [0]
    learner.on_micro_batch = lambda: micro.append(micro.pop() + 1)
    learner.step(samples)  # which also makes connections
    micro[0] = 0
    dist.barrier()
    before = received()
    learner.step(samples)
    dist.barrier()
    if ranks.rank == 0:
        print(json.dumps({"bytes": received() - before, "micro_batches": micro[0], "weights": weights}), flush=True)
    dist.barrier()
    leave()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
