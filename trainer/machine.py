"""The machine that a run finds: its cores, and how many of them others keep busy. Blocks while it measures."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.decide.engines import device_memory
from rollout.decide.engines import devices as decide
from rollout.engine import gpus

if TYPE_CHECKING:
    from trainer.config import TrainConfig

MEASURED = 0.5  # seconds
MODEL = "model name"
VLLM_RESERVES = 0.9  # of a GPU's memory, unless its option gpu_memory_utilization says so
M_MMAP_THRESHOLD = -3  # of glibc's mallopt
MAPPED = 1 << 20  # bytes; blocks from this size on are mapped one by one


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


def busy(seconds: float = MEASURED) -> float:
    """Cores that others keep busy now; this process sleeps during it."""
    before = _ticks()
    time.sleep(seconds)
    after = _ticks()
    total, idle = after[0] - before[0], after[1] - before[1]
    return cores() * (1 - idle / total) if total > 0 else 0.0


def processor() -> str:
    """Its name, as the kernel has it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == MODEL:
            return value.strip()
    return "unknown"


def devices(config: TrainConfig, start: Path) -> tuple[decide.DevicePlacement, device_memory.Demand | None]:
    """Which GPUs of this machine the parts of a run of the policy `start` have, and what they take of each; None where
    all compute on CPUs. Raises Invalid where there are too few, or where one has too little memory."""
    existing = gpus.visible()
    placement = decide.place(
        existing,
        ranks=config.ranks // config.hosts.count,
        engines=0 if config.pool.urls else config.pool.engines,
        parallel=config.pool.parallel,
        taking_turns=config.handover,
        small=config.engine == "embedded",
        trainer=config.gpus,
        servers=config.pool.gpus,
        evaluation=config.evaluation.background,
    )
    if not placement.ranks:
        return placement, None
    needed = demand(config, start)
    device_memory.need_memory(placement, existing, needed, ranks=config.ranks, parallel=config.pool.parallel)
    return placement, needed


def resized(config: TrainConfig, placement: decide.DevicePlacement, start: Path) -> decide.DevicePlacement:
    """The placement of a run that is resumed with another number of ranks, `config.ranks`. Raises Invalid where it does
    not fit."""
    existing = gpus.visible()
    ranks = config.ranks // config.hosts.count
    changed = decide.resized(placement, existing, ranks=ranks, taking_turns=config.handover)
    if changed.ranks:
        needed = demand(config, start)
        device_memory.need_memory(changed, existing, needed, ranks=config.ranks, parallel=config.pool.parallel)
    return changed


def demand(config: TrainConfig, start: Path) -> device_memory.Demand:
    """What parts of a run take at least of each of their GPUs. Makes the model without memory."""
    from trainer import estimate  # with torch
    from trainer.models.load import Lora, empty
    from trainer.objectives import build

    with estimate.ghostly():
        model = empty(start, lora=Lora(rank=config.lora) if config.lora else None)
    total = sum(parameter.numel() for parameter in model.parameters())
    sharers = config.ranks // config.mesh.replicate
    rank = 0 if config.offload else estimate.resident(model, ranks=sharers, optimiser=config.optimiser.kind)
    if build(config.objective).kl is not None and not config.offload:
        rank += estimate.FP32 * total // sharers  # of the reference model
    pool = config.pool
    options = {name.replace("-", "_"): value for name, value in pool.options.items()}
    half = pool.dtype in ("bfloat16", "float16") or (pool.dtype == "auto" and config.engine == "vllm")
    server = (estimate.BF16 if half else estimate.FP32) * total // pool.parallel
    if config.engine != "vllm":
        return device_memory.Demand(rank=rank, server=server)
    smaller = {"quantization", "cpu_offload_gb", "pipeline_parallel_size"} & options.keys()
    reserved = 0.0 if "kv_cache_memory_bytes" in options else options.get("gpu_memory_utilization", VLLM_RESERVES)
    return device_memory.Demand(rank=rank, server=0 if smaller else server, reserved=float(reserved))


def use(uuids: Sequence[str]) -> None:
    """This process and its children see these GPUs only. Before CUDA is first used."""
    if uuids:
        os.environ.update(gpus.environment(uuids, gpus.visible()))


def return_freed_memory() -> bool:
    """Large blocks go back to the system when they are freed, in this process. Else glibc raises its own threshold and
    keeps what was freed between micro-batches: a peak of 1.13 to 1.43 of what the tensors need was seen.

    Whether the C library knows that; others than glibc may not.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(M_MMAP_THRESHOLD, MAPPED))


def trim_memory() -> None:
    """What was freed in small blocks goes back to the system too. After a step and its save this was 0.5 GB of a rank
    of 67 million weights, which held 1.6 times its tensors with it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _ticks() -> tuple[int, int]:
    """Ticks of all cores since the start: all of them, and the idle ones."""
    fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(fields), fields[3] + fields[4]
