"""An embedded engine that samples for sixteen requests while it takes versions of its weights."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench.harness.relays import free_port
from rollout.engine.client import EngineClient, Sampling, wait_healthy
from rollout.engine.embedded.model import ModelConfig, Qwen3
from rollout.weights.store import VersionStore
from trainer.weights import Publisher

LARGER = ModelConfig(
    vocab_size=4000, hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, eos_token_id=0,
)  # fmt: skip
WINDOW = 3.0  # seconds


async def engine(root: Path, windows: int) -> dict[str, Any]:
    """What an engine loses of its throughput while it takes versions."""
    store = VersionStore(root / "engine-weights")
    model = Qwen3(LARGER)
    model.initialise(0)
    publisher = Publisher(store, complete_every=1000, keep=1000)
    files = {"config.json": json.dumps(LARGER.to_json()).encode()}
    publisher.publish(0, model.state_dict(), files)
    for version in range(1, windows * 3 + 1):  # made before: a trainer is on another host
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=3e-6)
        publisher.publish(version, model.state_dict(), files)
    publisher.close()
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollout.engine.embedded.server", "--model", root / "engine-mirror", "--port", str(port),
        "--weights", store.directory, "--at", "0", "--length", "4096", "--slots", "16",
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with EngineClient(f"http://127.0.0.1:{port}") as client:
            await asyncio.wait_for(wait_healthy(client), 120)
            return await _alternate(client, windows)
    finally:
        process.kill()
        await process.wait()


async def _alternate(client: EngineClient, windows: int) -> dict[str, Any]:
    sampling = Sampling(max_tokens=400, ignore_eos=True)

    async def request(number: int) -> None:
        while True:
            await client.generate([5, 6 + number], sampling)

    asking = [asyncio.create_task(request(number)) for number in range(16)]
    await client.pull(0)  # the process that pulls has started
    await asyncio.sleep(WINDOW)
    version, ratios, pauses, lags = 0, [], [], []
    for _ in range(windows):
        alone, _ = await _window(client, None)
        alongside, taken = await _window(client, version)
        version += len(taken)
        ratios.append(alongside / alone)
        pauses += [pause for pause, _ in taken]
        lags += [lag for _, lag in taken]
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    return {
        "throughput_ratio": rounded(statistics.median(ratios)),
        "ratio_quartiles": [rounded(item) for item in statistics.quantiles(ratios, n=4)[::2]],
        "versions_taken": version,
        "pause_ms": rounded(1000 * statistics.median(pauses)),
        "pause_ms_worst": rounded(1000 * max(pauses)),
        "take_s": rounded(statistics.median(lags)),
    }


async def _window(client: EngineClient, version: int | None) -> tuple[float, list[tuple[float, float]]]:
    """Tokens a second of one window; in it, unless `version` is None, a version a second is taken after that one."""
    before, began = (await client.statistics()).generated_tokens, time.monotonic()
    taken: list[tuple[float, float]] = []
    while version is not None and time.monotonic() < began + WINDOW - 0.5 and len(taken) < 3:
        started = time.monotonic()
        await client.pull(version + len(taken) + 1)
        applied = await client.apply(version + len(taken) + 1, recompute=False)
        taken.append((applied.paused_s, time.monotonic() - started))
        await asyncio.sleep(max(0.0, started + 1.0 - time.monotonic()))
    await asyncio.sleep(max(0.0, began + WINDOW - time.monotonic()))
    tokens = (await client.statistics()).generated_tokens - before
    return tokens / (time.monotonic() - began), taken


def rounded(value: float) -> float:
    return float(f"{value:.3g}")
