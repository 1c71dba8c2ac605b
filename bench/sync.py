"""Weights from a trainer to its engines: what a version costs, and whether it always arrives as it was.

::

    pagurus bench sync [--json] [--parts delta,slices,link,engine,versions,kills] [--model FOLDER]
    pagurus bench sync --parts large [--device cuda] [--parameters 1.2]

delta     SmolLM2-135M (``make setup-models``) under real optimiser steps, published in bfloat16. By optimiser and rate:
          `changed_share` of the 16-bit words, `bytes_ratio` of a step to all bytes; `encode_mb_s` of weights compared,
          encoded and hashed; `pull_ms` (fetch, write into the mirror, check), `pause_ms` (writing the changes into the
          weights of an engine in float32 and in bfloat16) and `reload_ms` (loading all of the folder), interleaved.
slices    two trainer ranks publish, each into a store that a server of its own gives out; two tensor-parallel readers
          take their parts from one relay over HTTP: `slice_shares` of the whole, and of a step, that each fetched, and
          whether each has exactly its part (`slices_identical`).
link      eight readers over one line of 1 Gbit/s and 20 ms: whole images straight from the origin, whole images
          through a relay, steps through a relay. `slow_link_copies`, `complete_time_ratio`, `step_time_ratio`. Readers
          fetch and check content; they do not write it, since eight hosts would not share two cores for that.
engine    an embedded engine of 14 million parameters samples for 16 requests at once; in every other window of time it
          pulls and applies a version a second: `throughput_ratio` of these windows to the others (median of pairs),
          `pause_ms` (nothing is sampled) and `take_s` (to fetch, check and apply). The cache is kept, so that
          what is counted is the taking alone.
versions  200 versions of a small model by HTTP, with skipped versions, readers, publishers and relays that are
          killed, and flipped bytes in the relay's cache: `bit_identical`.
kills     200 times a publisher, a relay or a reader is killed at a random instant: after each the store lists whole
          versions, and the reader has one of them bit for bit: `torn` is 0.
large     only when named: random weights of a billion and more on a device, of which 0.7 % of the words change,
          published and applied. `compare_gb_s` (finding and picking out changes) and `apply_gb_s` (writing them) count
          the bytes of all weights; `copy_gb_s` is what the device's memory gives in the same run.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from bench.harness import aftermath, command, engine_updates
from bench.harness import weight_faults as weights
from bench.harness.engine_updates import rounded
from bench.harness.rank_stores import publish, store_of_rank
from bench.harness.relays import forked, free_port, listening, relay_process
from bench.harness.slow_link import slow_link
from rollout.engine.embedded.apply import prepare
from rollout.weights.layout import axis
from rollout.weights.mirror import Mirror
from rollout.weights.puller import Puller
from rollout.weights.source import DirectorySource, HttpSource
from rollout.weights.store import VersionStore
from rollout.weights.versions import VersionRef
from sandbox.paths import prefix
from trainer.weights import Publisher, picked_out

MODEL = prefix() / "models" / "SmolLM2-135M-Instruct"
READERS, BITS, DELAY = 8, 1e9, 0.020
FILES = {"config.json": b"{}"}
Metrics = dict[str, Any]


def sealed(store: VersionStore, directory: Path, name: str = "reader") -> Puller:
    return Puller(DirectorySource(store), Mirror(directory), name=name)


# ---------------------------------------------------------------------- delta


def optimisers(model: nn.Module) -> dict[str, Callable[[], list[torch.optim.Optimizer]]]:
    """By name: the update of a weight has about the size of the rate with each of them."""
    matrices = [item for name, item in model.named_parameters() if item.ndim == 2 and "embed" not in name]
    others = [item for name, item in model.named_parameters() if item.ndim != 2 or "embed" in name]

    def adamw(rate: float, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)

    def muon() -> list[torch.optim.Optimizer]:
        muon = torch.optim.Muon(matrices, lr=1e-6, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        return [muon, adamw(1e-6, others)]

    return {
        "adamw 1e-6": lambda: [adamw(1e-6, [*model.parameters()])],
        "adamw 1e-5": lambda: [adamw(1e-5, [*model.parameters()])],
        "muon 1e-6": muon,
    }


def policy_step(model: nn.Module, optimisers: list[torch.optim.Optimizer], batch: Tensor) -> None:
    """One step of REINFORCE: half of the trajectories [B, T] were good, half were bad."""
    logprobs = torch.log_softmax(model(batch[:, :-1]).logits.float(), dim=-1)
    taken = logprobs.gather(2, batch[:, 1:, None])[..., 0]
    advantage = torch.tensor([1.0, -1.0]).repeat(len(batch) // 2)
    (-(advantage[:, None] * taken).mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimiser in optimisers:
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    state = dict(model.state_dict())
    if model.config.tie_word_embeddings:  # type: ignore[union-attr]
        state.pop("lm_head.weight", None)
    return state


async def delta(directory: Path, root: Path, rounds: int) -> Metrics:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = "\n".join(path.read_text() for path in sorted(Path(__file__).parent.parent.glob("docs/*.md")))
    ids = AutoTokenizer.from_pretrained(directory)(text, return_tensors="pt").input_ids[0]
    result: Metrics = {}
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for number, name in enumerate(optimisers(model)):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        store = VersionStore(root / f"store{number}")
        publisher, puller = Publisher(store, complete_every=1000), sealed(store, root / f"mirror{number}")
        publisher.publish(0, state_of(model), FILES)
        await puller.pull()
        engines = {dtype: {key: value.to(dtype, copy=True) for key, value in state_of(model).items()}
                   for dtype in (torch.float32, torch.bfloat16)}  # fmt: skip
        for engine in engines.values():  # as the mirror has them
            for key, value in load_file(root / f"mirror{number}" / "model.safetensors").items():
                engine[key].copy_(value)
        optimise = optimisers(model)[name]()
        rows: list[Metrics] = []
        for step in range(1, rounds + 3):  # of which the first two warm the optimiser up
            start = torch.randint(0, len(ids) - 129, (4,))
            policy_step(model, optimise, torch.stack([ids[at : at + 128] for at in start.tolist()]))
            publisher.publish(step, state_of(model), FILES)
            row = await follow(puller, engines, root / f"mirror{number}")
            spent = publisher.seconds
            size = spent.words * 2
            row |= {
                "changed_share": spent.changed / spent.words,
                "bytes_ratio": row.pop("bytes") / size,
                "encode_mb_s": size / 1e6 / spent.encode_s,
                "copy_ms": spent.copy_s * 1000,
            }
            if step > 2:
                rows.append(row)
        result[name] = {key: rounded(statistics.median(row[key] for row in rows)) for key in rows[0]}
        await puller.close()
        publisher.close()
    return result


async def follow(puller: Puller, engines: dict[torch.dtype, dict[str, Tensor]], mirror: Path) -> Metrics:
    """Pull the newest version and bring engines of both dtypes to it; beside it, what a full reload takes."""
    began = time.perf_counter()
    pulled = await puller.pull()
    row: Metrics = {"pull_ms": (time.perf_counter() - began) * 1000, "bytes": pulled.spent.bytes}
    assert pulled.writes is not None
    dtypes = dict.fromkeys(engines[torch.float32], "BF16")
    for dtype, engine in engines.items():
        label = "" if dtype == torch.float32 else "_bf16"
        began = time.perf_counter()
        ready = prepare(engine, dtypes, pulled.writes)
        row[f"prepare{label}_ms"] = (time.perf_counter() - began) * 1000
        began = time.perf_counter()
        ready.apply()
        row[f"pause{label}_ms"] = (time.perf_counter() - began) * 1000
        began = time.perf_counter()
        complete = load_file(mirror / "model.safetensors")
        other = {key: torch.empty_like(value) for key, value in engine.items()}
        allocated = time.perf_counter() - began
        began = time.perf_counter() - allocated / 2
        for key, value in complete.items():
            other[key].copy_(value)
        row[f"reload{label}_ms"] = (time.perf_counter() - began) * 1000
        if any(not torch.equal(engine[key], other[key]) for key in other):
            raise SystemExit("the engine's weights differ from the published ones")
    return row


# ---------------------------------------------------------------------- slices


@dataclass(frozen=True)
class Drifting:
    """A model folder, whose weights move a little from version to version."""

    directory: Path

    def __call__(self, version: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(0)
        tensors = load_file(self.directory / "model.safetensors")
        return {
            name: (tensor.float() + version * 1e-6 * torch.randn(tensor.shape, generator=random)).bfloat16()
            for name, tensor in tensors.items()
        }


def sliced(tensors: dict[str, Tensor], part: int, parts: int) -> dict[str, Tensor]:
    """What a tensor-parallel rank has of them."""
    result = {}
    for name, tensor in tensors.items():
        along = axis(name, tuple(tensor.shape))
        result[name] = tensor if along is None or tensor.shape[along] % parts else tensor.chunk(parts, along)[part]
    return result


async def slices(directory: Path, root: Path) -> Metrics:
    """Two ranks publish, each into a store of its own; two tensor-parallel readers take their parts from one relay."""
    drifting, ports, near = Drifting(directory), [free_port() for _ in range(2)], free_port()
    await asyncio.to_thread(publish, root / "ranks", drifting, versions=2, ranks=2, files=FILES)
    upstream = ",".join(f"http://127.0.0.1:{port}" for port in ports)
    spent: dict[str, list[int]] = {"complete": [], "step": []}
    identical = True
    with ExitStack() as servers:
        for rank, port in enumerate(ports):
            servers.enter_context(forked(relay_process(store_of_rank(root / "ranks", rank), port)))
            await listening(port)
        servers.enter_context(forked(relay_process(root / "ranks-relay", near, upstream)))
        await listening(near)
        for part, parts in ((0, 1), (0, 2), (1, 2)):
            mirror = Mirror(root / f"part{part}{parts}", part=part, parts=parts)
            puller = Puller(HttpSource(f"http://127.0.0.1:{near}"), mirror, name=f"p{part}{parts}")
            for version, way in enumerate(spent):
                spent[way].append((await puller.pull(version)).spent.bytes)
                expected = sliced(drifting(version), part, parts)
                got = load_file(mirror.directory / "model.safetensors")
                same = (
                    torch.equal(got[name].view(torch.int16), item.view(torch.int16)) for name, item in expected.items()
                )
                identical = identical and got.keys() == expected.keys() and all(same)
            await puller.close()
        fetched = await fetched_bytes(f"http://127.0.0.1:{near}")
    return {
        "slice_shares": [rounded(item / spent["complete"][0]) for item in spent["complete"][1:]],
        "slice_shares_of_a_step": [rounded(item / spent["step"][0]) for item in spent["step"][1:]],
        "slices_identical": identical,
        "relay_copies": rounded(fetched / (spent["complete"][0] + spent["step"][0])),
    }


# ---------------------------------------------------------------------- link


class Sink:
    """A reader's host without its mirror: fetches a version and checks the hashes of its content."""

    def __init__(self, url: str):
        self.source = HttpSource(url)

    async def fetch(self, store: VersionStore, ref: VersionRef, *, complete: bool) -> None:
        manifest = store.manifest(ref)
        refs = [item for item in (manifest.complete if complete else manifest.steps) or [] if item is not None]
        await self.source.chunk(ref.manifest)
        slots = asyncio.Semaphore(4)

        async def one(number: int) -> None:
            async with slots:
                await self.source.chunk(refs[number])

        await asyncio.gather(*(one(number) for number in range(len(refs))))


async def link(directory: Path, root: Path) -> Metrics:
    tensors = load_file(directory / "model.safetensors")
    store = VersionStore(root / "origin")
    publisher = Publisher(store)
    refs = [publisher.publish(0, tensors, FILES)]
    for version in (1, 2, 3):  # changes of the share that an optimiser at 1e-6 makes
        for tensor in tensors.values():
            tensor += torch.randn_like(tensor) * 1e-6
        refs.append(publisher.publish(version, tensors, FILES))
    publisher.close()
    size = store.manifest(refs[0]).total_bytes or 0
    origin, near = free_port(), free_port()
    times: dict[str, float] = {}
    with forked(relay_process(store.directory, origin)), slow_link(origin, bits_s=BITS, delay=DELAY) as far:
        await listening(origin)
        times["direct"] = await together(f"http://127.0.0.1:{far}", store, refs[0], complete=True)
        with forked(relay_process(root / "relay", near, f"http://127.0.0.1:{far}")):
            await listening(near)
            url = f"http://127.0.0.1:{near}"
            times["complete"] = await together(url, store, refs[0], complete=True)
            before = await fetched_bytes(url)
            steps = [await together(url, store, ref, complete=False) for ref in refs[1:]]
            times["step"] = statistics.median(steps)
    return {
        "whole_mb": rounded(size / 1e6),
        "step_mb": rounded((store.manifest(refs[1]).step_bytes or 0) / 1e6),
        "slow_link_copies": rounded(before / size),
        "direct_s": rounded(times["direct"]),
        "whole_s": rounded(times["complete"]),
        "step_s": rounded(times["step"]),
        "whole_time_ratio": rounded(times["complete"] / times["direct"]),
        "step_time_ratio": rounded(times["step"] / times["direct"]),
    }


async def together(url: str, store: VersionStore, ref: VersionRef, *, complete: bool) -> float:
    sinks = [Sink(url) for _ in range(READERS)]
    began = time.perf_counter()
    await asyncio.gather(*(sink.fetch(store, ref, complete=complete) for sink in sinks))
    took = time.perf_counter() - began
    for sink in sinks:
        await sink.source.close()
    return took


async def fetched_bytes(url: str) -> int:
    """Bytes that a relay brought over the slow link."""
    source = HttpSource(url)
    got = json.loads(await source.read("/statistics"))
    await source.close()
    return int(got["fetched_bytes"])


# ---------------------------------------------------------------------- large


def transformer(parameters: float, device: torch.device) -> dict[str, Tensor]:
    """Random weights in bfloat16, in the shapes of Qwen3-1.7B with as many layers as make so many billions."""
    width, inner = 2048, 6144
    layer = {"q": (width, width), "k": (1024, width), "v": (1024, width), "o": (width, width)}
    layer |= {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    shapes = {"embed": (151_936, width)} if parameters >= 0.5 else {}
    left = parameters * 1e9 - sum(rows * columns for rows, columns in shapes.values())
    layers = max(1, round(left / sum(rows * columns for rows, columns in layer.values())))
    shapes |= {f"layers.{number}.{name}": shape for number in range(layers) for name, shape in layer.items()}
    return {name: torch.randn(shape, dtype=torch.bfloat16, device=device) * 0.02 for name, shape in shapes.items()}


async def large(root: Path, device: torch.device, parameters: float, rounds: int) -> Metrics:
    weights = transformer(parameters, device)
    size = sum(tensor.numel() for tensor in weights.values()) * 2 / 1e9
    store = VersionStore(root / "large")
    publisher, puller = Publisher(store, complete_every=1000), sealed(store, root / "large-mirror")
    publisher.publish(0, weights, FILES)
    await puller.pull()
    engine = {name: tensor.clone() for name, tensor in weights.items()}
    rows: list[Metrics] = []
    for version in range(1, rounds + 1):
        pairs = [(tensor.clone(), tensor) for tensor in weights.values()]
        for tensor in weights.values():
            words = tensor.view(torch.int16).view(-1)
            words[torch.rand(len(words), device=device) < 0.007] ^= 1
        began = _now(device)
        for old, new in pairs:
            old.copy_(new)
        copied = _now(device) - began
        for old, _ in pairs:  # something else again
            old.view(torch.int16).view(-1)[::143] ^= 1
        began = _now(device)
        for old, new in pairs:
            picked_out(new, old)
        compared = _now(device) - began
        publisher.publish(version, weights, FILES)
        writes = (await puller.pull()).writes
        assert writes is not None
        ready = prepare(engine, dict.fromkeys(engine, "BF16"), writes)
        began = _now(device)
        ready.apply()
        applied = _now(device) - began
        if any(not torch.equal(engine[name].view(torch.int16), weights[name].view(torch.int16)) for name in weights):
            raise SystemExit("the engine's weights differ from the published ones")
        spent = publisher.seconds
        rows.append(
            {
                "copy_gb_s": 2 * size / copied,  # read and written
                "compare_gb_s": 2 * size / compared,  # both versions are read
                "encode_gb_s": size / spent.encode_s,  # compared, compressed, hashed on the host and stored
                "apply_gb_s": size / applied,
                "apply_ms": applied * 1000,
                "bytes_ratio": spent.bytes / size / 1e9,
            }
        )
    await puller.close()
    publisher.close()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    medians = {key: rounded(statistics.median(row[key] for row in rows)) for key in rows[0]}
    return {"device": name, "parameters": rounded(size / 2), **medians}


def _now(device: torch.device) -> float:
    """Seconds, once the device has done all that it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


PARTS = ("delta", "slices", "link", "engine", "versions", "kills")  # unasked


def main(arguments: list[str] | None = None) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--model", type=Path, default=MODEL, help="Hugging Face folder")
    parser.add_argument("--rounds", type=int, default=5, help="measured optimiser steps of each kind")
    parser.add_argument("--versions", type=int, default=200)
    parser.add_argument("--windows", type=int, default=20, help="pairs of windows of the engine part")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="of the large part")
    parser.add_argument("--parameters", type=float, default=1.2, help="of the large part, in billions")
    parser.add_argument("--trials", type=int, default=200, help="kills")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    chosen = options.parts.split(",")
    if {"delta", "slices", "link"} & set(chosen) and not (options.model / "config.json").exists():
        parser.error(f"no model in {options.model}: run `make setup-models`, or name one with --model")
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    result: Metrics = {}
    memory = Path("/dev/shm")
    with aftermath.TemporaryDirectory("pagurus-sync-", memory if memory.exists() else None) as place:
        root = Path(place)
        acts: dict[str, Callable[[], Any]] = {
            "kills": lambda: weights.kills(root, options.trials, options.seed),
            "versions": lambda: weights.versions(root, options.versions, options.seed),
            "slices": lambda: slices(options.model, root),
            "link": lambda: link(options.model, root),
            "engine": lambda: engine_updates.engine(root, options.windows),
            "delta": lambda: delta(options.model, root, options.rounds),
            "large": lambda: large(root, options.device, options.parameters, options.rounds),
        }
        for part, act in acts.items():  # those that fork come before torch has made threads
            if part in chosen:
                result[part] = asyncio.run(act())
                print(f"{part}: {json.dumps(result[part], indent=1)}", file=sys.stderr)
    command.show(result, options)
    return 0
