"""What a GPU host reaches: engine, trainer, changes of weights, collectives, and a training of some minutes.

::

    pagurus bench gpu --model FOLDER --json                # an hour of training (--minutes 10: less)
    pagurus bench gpu --parts engine,trainer --model FOLDER --json

FOLDER is a local Hugging Face folder of 0.5 to 4 billion parameters. Without a GPU everything runs in small on the CPU,
which shows that the command works and nothing of a GPU: `small` is true then.

- `engine`: the embedded engine against what the device does at best (bench/harness/roofline.py).
- `trainer`: steps of `Learner` in bf16; `mfu`: FLOP of the model over those of a product of matrices in the same run,
  `share` with what is computed again; `peak_gib`: memory that torch took at most.
- `delta`: changes of random weights of the model's size, found, encoded and applied (bench.sync, `large`).
- `collectives`: NCCL among all GPUs of the host; on a CPU gloo between two processes.
- `training`: `pagurus train` on products of numbers for `--minutes` (60; on a CPU 1 on FrozenLake with its own policy),
  evaluated before and after; it needs neither root nor sandboxes. `--task FOLDER` or a .toml file for another one, on
  the daemon that runs here.

`missed` says which parts have no figures, and why. A part that fails does not end the others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.harness import aftermath, collectives, command, products, roofline
from bench.harness.timed_training import train_for
from bench.sync import large
from coordinator.simulate.scale.shapes import from_config
from rollout.engine.client import Sampling
from rollout.plan import PoolPlan
from sandbox.errors import PagurusError
from sandbox.paths import CHECKOUT
from sandbox.testing import FakeHost
from trainer.batches.sample import Sample
from trainer.config import TrainConfig, gather
from trainer.distributed.ranks import here
from trainer.distributed.shard import shard
from trainer.learner import Learner
from trainer.machine import processor
from trainer.models.load import load
from trainer.models.scorer import Scorer
from trainer.objectives import named
from trainer.settings import ObjectiveSettings, OptimiserSettings

PARTS = ("engine", "trainer", "delta", "collectives", "training")
LAKE = CHECKOUT / "examples" / "frozen_lake"
UNLIMITED = 1_000_000  # steps
LENGTH, BUDGET = 2048, 8192  # tokens of a trajectory and of a micro-batch; on a CPU an eighth
Figures = dict[str, Any]


def engine(options: argparse.Namespace) -> Figures:
    size = {"batch": 64, "prompt": 512, "output": 256} if options.gpu else {"batch": 8, "prompt": 32, "output": 32}
    kind = {"device": "cuda", "dtype": "bfloat16"} if options.gpu else {"device": "cpu", "dtype": "float32"}
    return roofline.main(options.model, **size, **kind, threads=torch.get_num_threads(), paged=options.gpu)


def trainer(options: argparse.Namespace) -> Figures:
    """Three steps on two micro-batches each; the first is not counted."""
    length, budget = (LENGTH, BUDGET) if options.gpu else (LENGTH // 8, BUDGET // 8)
    with aftermath.TemporaryDirectory("pagurus-gpu-") as root:
        directory = options.model or roofline.small(Path(root) / "small")
        shape = from_config(json.loads((directory / "config.json").read_bytes()))
        ranks = here()
        scorer = shard(Scorer(load(directory), bf16=options.gpu, recompute=options.gpu), ranks)
    learner = Learner(scorer, named("dapo"), OptimiserSettings(budget=budget, rate=1e-6), ranks=ranks)
    count = 2 * budget // length
    samples = [
        Sample(
            tokens=[1 + (31 * n + 7 * t) % min(999, shape.vocabulary - 1) for t in range(length)],
            mask=[0] + [1] * (length - 1), logprobs=[-8.0] * length, reward=float(n % 2), group=str(n // 4),
        )
        for n in range(count)
    ]  # fmt: skip
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        learner.step(samples)
        roofline._wait(str(ranks.device))
        seconds.append(time.perf_counter() - began)
    _, peak = roofline.rates(str(ranks.device), torch.bfloat16 if options.gpu else torch.float32)
    tokens, past, sampled = count * length, length / 2, count * (length - 1)
    forward = shape.forward(tokens, past, sampled)
    backward = shape.backward(tokens, past, sampled, micro=sampled / 2, recompute=options.gpu)
    took = min(seconds[1:])
    return {
        "parameters": shape.parameters,
        "tokens_per_s": round(tokens / took, 1),
        "step_s": round(took, 3),
        "mfu": round(3 * forward / took / peak, 3),
        "share": round((forward + backward) / took / peak, 3),
        "matmul_tflop_s": round(peak / 1e12, 3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / (1 << 30), 2) if options.gpu else None,
    }


def delta(options: argparse.Namespace) -> Figures:
    billions = 0.02
    if options.gpu:
        shape = from_config(json.loads((options.model / "config.json").read_bytes()))
        billions = shape.parameters / 1e9
    with aftermath.TemporaryDirectory("pagurus-gpu-") as root:
        return asyncio.run(large(Path(root), torch.device("cuda" if options.gpu else "cpu"), billions, 3))


def exchanged(options: argparse.Namespace) -> Figures:
    if not options.gpu:
        return {"backend": "gloo", "ranks": 2, **collectives.measured(2, 16)}
    gpus = torch.cuda.device_count()
    if gpus < 2:
        raise RuntimeError("one GPU: NCCL needs two")
    return {"backend": "nccl", "ranks": gpus, **collectives.measured(gpus, 1024)}


def training(options: argparse.Namespace) -> Figures:
    seconds = 60.0 * (options.minutes or (60.0 if options.gpu else 1.0))
    if options.task is not None:
        return train_for(gather(options.task, {"steps": UNLIMITED, **_policy(options)}), seconds)
    if options.gpu:
        config = TrainConfig(
            task=Path(products.__file__), model=options.model, steps=UNLIMITED, groups=16, size=8, concurrency=128,
            held_out=128, pace=0.0, staleness=1, max_length=512, bf16=True, recompute=True, trackers=(),
            pool=PoolPlan(slots=128, dtype="bfloat16"),
            sampling=Sampling(max_tokens=384), objective=ObjectiveSettings(preset="dapo"),
            optimiser=OptimiserSettings(rate=2e-6, schedule="constant", budget=BUDGET),
        )  # fmt: skip
    else:
        config = gather(LAKE, {"steps": UNLIMITED, "held_out": 64, "pace": 0.0})

    async def alone() -> Figures:
        async with FakeHost() as fake:  # stands for the daemon: no sandbox is made
            return await asyncio.to_thread(train_for, config, seconds, {"PAGURUS_HOST": fake.address})

    return {"minutes": round(seconds / 60, 2), "task": config.task.name, **asyncio.run(alone())}


def _policy(options: argparse.Namespace) -> dict[str, Any]:
    return {"model": str(options.model), "bf16": options.gpu} if options.model else {}


ACTS: dict[str, Callable[[argparse.Namespace], Figures]] = {
    "engine": engine, "trainer": trainer, "delta": delta, "collectives": exchanged, "training": training
}  # fmt: skip


def described(options: argparse.Namespace) -> Figures:
    """What all of it ran on."""
    if not options.gpu:
        return {"device": processor(), "small": True, "said": "a CPU in small: no figure here is one of a GPU"}
    return {
        "device": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "memory_gib": round(torch.cuda.get_device_properties(0).total_memory / (1 << 30), 1),
        "small": False,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; a GPU needs one")
    parser.add_argument("--minutes", type=float, help="of training; 60, on a CPU 1")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--task", type=Path, help="what is trained on instead, on the daemon of this host")
    options = parser.parse_args(arguments)
    options.gpu = torch.cuda.is_available()
    chosen = options.parts.split(",")
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    if options.gpu and (options.model is None or not (options.model / "config.json").exists()):
        parser.error("name a folder with a model of 0.5 to 4 billion parameters: --model FOLDER")
    if not options.gpu:
        torch.set_num_threads(1)
    result: Figures = {**described(options), "load": round(os.getloadavg()[0], 1)}
    result["model"] = options.model.name if options.model else None
    missed = {name: "not chosen" for name in PARTS if name not in chosen}
    for name in (part for part in PARTS if part in chosen):
        try:
            result[name] = ACTS[name](options)
        except (PagurusError, RuntimeError, OSError, ValueError, torch.OutOfMemoryError) as error:
            missed[name] = f"{type(error).__name__}: {error}"[:500]
        print(f"{name}: {result.get(name, missed.get(name))}", file=sys.stderr, flush=True)
        if options.gpu:
            torch.cuda.empty_cache()
    command.show(result | {"missed": missed}, options)
    return 0
