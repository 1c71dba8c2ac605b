"""How near the embedded engine is to what its device can do: ``pagurus bench engine --roofline``.

Decoding reads all weights and every sequence's keys and values once a step, and multiplies each weight with each
sequence: its floor is the longer of these two, at the rates that were measured in the same run. Reading prompts
multiplies each weight, but for the head, with each token. `decode_share` and `prefill_share`: floor over time taken.
Embeddings that are not also the head count as nothing; of a mixture of experts all weights count.
"""

from __future__ import annotations

import platform
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.harness import aftermath
from rollout.engine.embedded.core import Core, SamplingSequence

TRIES = 5


def best(act: Callable[[], object], device: str) -> float:
    """Seconds of the quickest try."""
    result = []
    for _ in range(TRIES):
        _wait(device)
        began = time.perf_counter()
        act()
        _wait(device)
        result.append(time.perf_counter() - began)
    return min(result)


def rates(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes per second of reading memory, FLOP per second of a product of matrices."""
    large = torch.ones((1 << 29) // dtype.itemsize, device=device, dtype=dtype)
    side = 2048 if device == "cpu" else 8192
    matrix = torch.randn(side, side, device=device, dtype=dtype)
    seconds = best(lambda: large.view(torch.int32).max(), device)
    return large.nbytes / seconds, 2 * side**3 / best(lambda: matrix @ matrix, device)


def measure(
    directory: Path, *, batch: int, prompt: int, output: int, device: str, dtype: str, threads: int, paged: bool
) -> dict[str, float | int | str]:
    torch.set_num_threads(threads)
    capacity = {"slots": batch, "retained": 0, "length": prompt + output + 1}
    core = Core(directory, version="0", device=device, dtype=dtype, paged=paged, **capacity)  # type: ignore[arg-type]
    weights = {item.data_ptr(): item for item in core.weights.values() if item.dim() == 2}
    embedding = next(iter(core.weights.values()))
    head = embedding.numel()
    multiplied = sum(item.numel() for item in weights.values()) - (0 if core.facts.tied else head)
    read, multiply = rates(device, embedding.dtype)
    draw = random.Random(0)
    for n in range(batch):
        tokens = [draw.randrange(core.facts.vocabulary) for _ in range(prompt)]
        core.add(SamplingSequence(str(n), tokens, output, seed=n))
    began = time.perf_counter()
    while not all(item.ready for item in core.scheduler.running) or core.scheduler.waiting:
        core.step()
    reading = time.perf_counter() - began
    steps, retained, began = 0, 0, time.perf_counter()
    while not core.scheduler.idle:
        retained += sum(len(item.tokens) for item in core.scheduler.running)
        core.step()
        steps += 1
    decoding = time.perf_counter() - began
    decoded = core.statistics.generated_tokens - batch
    memory = (steps * multiplied * embedding.itemsize + retained * core.cache.token_bytes) / read
    products = 2 * multiplied * decoded / multiply
    prefill = 2 * (multiplied - head) * batch * prompt / multiply
    return {
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else _processor(),
        "model": directory.name, "cache": type(core.cache).__name__.lower(), "dtype": dtype, "threads": threads,
        "batch": batch, "prompt": prompt, "output": output,
        "read_gb_s": round(read / 1e9, 1), "matmul_gflop_s": round(multiply / 1e9),
        "decode_tokens_per_s": round(decoded / decoding, 1), "decode_floor_memory_s": round(memory, 3),
        "decode_floor_products_s": round(products, 3), "decode_s": round(decoding, 3),
        "decode_share": round(max(memory, products) / decoding, 3),
        "prefill_tokens_per_s": round(batch * prompt / reading), "prefill_share": round(prefill / reading, 3),
    }  # fmt: skip


def small(directory: Path) -> Path:
    """The demo's model with random weights."""
    from rollout.engine.embedded.model import ModelConfig, Qwen3, save_model

    model = Qwen3(ModelConfig(vocab_size=320))
    model.initialise(0)
    save_model(model, directory)
    return directory


def main(directory: Path | None, **options: int | str | bool) -> dict[str, float | int | str]:
    with aftermath.TemporaryDirectory("pagurus-roofline-") as root:
        return measure(directory or small(Path(root) / "small"), **options)  # type: ignore[arg-type]


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())
