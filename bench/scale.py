"""Does the arithmetic of plans hold here? Parts of `pagurus simulate plan.toml` against what runs on this CPU.

Each part is a predicted and a measured figure and `ratio`, predicted over measured; `off` lists those that miss by more
than 10 %. Seconds are those of one thread's processor time, so that other work disturbs them least; rates of this
machine (products of matrices, copies) are measured in the same run.

- `bytes`: what 2 ranks exchange by gloo in a step of the trainer (root: a network namespace counts them). Gloo sends a
  reduce-scatter as an all-reduce, twice the bytes that a plan has for NCCL: that is added to the prediction.
- `version`: bytes of a published version of SmolLM2-135M after an AdamW step (`make setup-models`), by the share that
  changed; `image`: all of it. The bytes of a value are constants of plans, measured before with the same model.
- `passes`: forward and backward of a model of 8 layers of width 384, by the FLOP share that one of 4 layers of width
  512 reached; `passes_of_peak`: that share.
- `update`: the optimiser's step, by what it moves, at the rate of a copy.
- `prefill`: an embedded engine of 80 million parameters on 16 prompts of 128 tokens, by the share that it reached on 8
  of 96; `decode`: a step of 16 answers, by the line through those of 8 and of 32, as simulated engines have it;
  `decode_of_floor`: reading weights and cache once, over the step. A CPU multiplies few rows slower than it reads them.

Memory and FLOP need no tolerance: tests/coordinator/simulate/test_scale.py compares them exactly. `pagurus bench
scheduling` compares schedules with live runs.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from bench.harness import aftermath, command, counted_ranks
from bench.sync import MODEL, policy_step, state_of
from bench.trainer import make_model, make_samples
from coordinator.simulate.scale import timing, traffic
from coordinator.simulate.scale.plan import PoolLayout, ScalePlan, TrainerLayout, TrajectoryPlan
from coordinator.simulate.scale.references import CHANGE, GPUS, IMAGE, GpuKind
from coordinator.simulate.scale.shapes import BF16, FP32, from_config
from coordinator.simulate.scale.trajectories import TrajectoryMeans
from rollout.engine.embedded.core import Core, SamplingSequence
from rollout.engine.embedded.model import ModelConfig, save_model
from rollout.weights.store import VersionStore
from trainer.batches.pack import pack
from trainer.learner import Learner
from trainer.machine import processor
from trainer.models.scorer import Scorer
from trainer.objectives import named
from trainer.settings import OptimiserSettings
from trainer.weights import Publisher

MEASURED = ModelConfig(
    vocab_size=4000, hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=8, head_dim=64, max_position_embeddings=2048,
)  # fmt: skip
PREDICTED = counted_ranks.CONFIG
SERVED = ModelConfig(  # so large that a step is longer than what starts it
    vocab_size=4000, hidden_size=1024, intermediate_size=3072, num_hidden_layers=6, num_attention_heads=16,
    num_key_value_heads=8, head_dim=64, max_position_embeddings=2048,
)  # fmt: skip
LIMIT = 0.1  # of which a prediction may miss
TRIES = 5
SLOTS, PROMPTS, OUTPUT = (8, 32, 16), (96, 96, 128), 16
VERSIONS = 6
FLOORS = ("passes_of_peak", "decode_of_floor")  # no predictions: what parts would take at measured peaks
Figures = dict[str, Any]


def rounds(*acts: Callable[[], object]) -> list[list[float]]:
    """Seconds of processor time of each, in turns; the first round warms up. What a round has is compared within it."""
    rows = []
    for _ in range(TRIES + 1):
        row = []
        for act in acts:
            began = time.process_time()
            act()
            row.append(time.process_time() - began)
        rows.append(row)
    return rows[1:]


def machine() -> GpuKind:
    """This CPU as if it were a GPU: one thread's FLOP in fp32, bytes read and written by a copy."""
    matrix, large = torch.randn(1024, 1024), torch.randn(1 << 26)
    target = torch.empty_like(large)
    rows = rounds(lambda: matrix @ matrix, lambda: target.copy_(large))
    multiply, copy = (min(column) for column in zip(*rows, strict=True))
    rates = {"flops": 2 * 1024**3 / multiply, "bandwidth": 2 * large.nbytes / copy, "reached": 1.0, "prefill": 1.0}
    return msgspec.structs.replace(GPUS["H20"], **rates)


def planned(config: ModelConfig, kind: GpuKind, *, gpus: int = 1, micro: int = 1024) -> ScalePlan:
    return ScalePlan(
        name="here",
        model="here",
        trainer=TrainerLayout(gpu="here", gpus=gpus, micro_batch=micro, bf16=False, recompute=False, reached=1.0),
        pools=[PoolLayout(gpu="here", gpus=1)],
        workload=TrajectoryPlan(groups=counted_ranks.COUNT // 4 * gpus, size=4, in_flight=1),
        gpus={"here": kind},
        models={"here": from_config(config.to_json())},
    )


def compared(predicted: Sequence[float], measured: Sequence[float], **more: float) -> Figures:
    """Medians over rounds; `ratio` is that of the rounds' ratios."""
    ratio = statistics.median(one / other for one, other in zip(predicted, measured, strict=True))
    said = {"predicted": statistics.median(predicted), "measured": statistics.median(measured), **more}
    return {**{name: round(value, 4) for name, value in said.items()}, "ratio": round(ratio, 3)}


# ---------------------------------------------------------------------- trainer


def exchanged() -> Figures:
    ranks, length = 2, counted_ranks.LENGTH
    counted = counted_ranks.counted(ranks)
    plan = planned(counted_ranks.CONFIG, GPUS["H20"], gpus=ranks, micro=length * counted_ranks.COUNT // 2)
    means = TrajectoryMeans(turns=1, read=1, written=length - 1, past=0, context=0, tools_s=0, longest=length)
    link = sum((item for item in traffic.training(plan, means).values()), traffic.LinkBytes())
    again = FP32 * plan.shape.parameters * (1 - 1 / ranks) * counted["micro_batches"]
    return compared([ranks * (link.nvlink + again) / 1e6], [counted["bytes"] / 1e6], nccl_mb=ranks * link.nvlink / 1e6)


class TrainedModel:
    """Passes and updates of one model."""

    def __init__(self, config: ModelConfig):
        samples = make_samples(1, groups=1, longest=512, vocabulary=config.vocab_size)
        self.learner = Learner(Scorer(make_model(config)), named("dapo"), OptimiserSettings(budget=4096, rate=1e-5))
        self.packed, shape = pack(samples), from_config(config.to_json())
        tokens, sampled = len(self.packed.tokens), len(self.packed.targets)
        past = sum(length**2 for length in self.packed.lengths) / tokens / 2
        self.flop = shape.forward(tokens, past, sampled)
        self.flop += shape.backward(tokens, past, sampled, micro=sampled, recompute=False)

    def passes(self) -> None:
        self.learner.scorer(self.packed).new.sum().backward()

    def update(self) -> None:
        for parameter in self.learner.trained:
            parameter.grad = self.gradients[parameter]
        self.learner._update(1.0)

    def keep_gradients(self) -> None:
        self.gradients = {parameter: parameter.grad for parameter in self.learner.trained}


def training(kind: GpuKind) -> Figures:
    calibrating, model = TrainedModel(MEASURED), TrainedModel(PREDICTED)
    first, second = zip(*rounds(calibrating.passes, model.passes), strict=True)
    model.keep_gradients()
    large = torch.randn(1 << 26)
    target = torch.empty_like(large)
    updates, copies = zip(*rounds(model.update, lambda: target.copy_(large)), strict=True)
    rates = [msgspec.structs.replace(kind, bandwidth=2 * large.nbytes / copy) for copy in copies]
    return {
        "passes": compared([seconds * model.flop / calibrating.flop for seconds in first], second),
        "passes_of_peak": compared([model.flop / kind.flops] * len(second), second),
        "update": compared([timing.update(planned(PREDICTED, rate)) for rate in rates], updates),
    }


# ---------------------------------------------------------------------- publication


def versions(root: Path) -> Figures:
    """Published bytes of a real model after a real step, in MB."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    text = "\n".join(path.read_text() for path in sorted(Path(__file__).parent.parent.glob("docs/*.md")))
    tokens = torch.tensor(AutoTokenizer.from_pretrained(MODEL)(text).input_ids[: VERSIONS * 4 * 129])
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0)
    publisher = Publisher(VersionStore(root / "weights"), complete_every=1000)
    publisher.publish(0, state_of(model), {})
    image = publisher.seconds.total_bytes
    for version, batch in enumerate(tokens.view(VERSIONS, 4, 129), 1):
        policy_step(model, [optimiser], batch)
        publisher.publish(version, state_of(model), {})
    publisher.close()
    spent = publisher.seconds
    share = spent.changed / spent.words
    return {
        "version": compared([CHANGE[0] * share * spent.words / 1e6], [spent.bytes / 1e6], changed_share=share),
        "image": compared([IMAGE[0] * spent.words / 1e6], [image / 1e6]),
    }


# ---------------------------------------------------------------------- engine


def played(core: Core, *, prompt: int, number: int) -> tuple[float, float]:
    """Seconds for reading the prompts of all slots, and of the mean decoding step."""
    for n in range(core.scheduler.slots):
        tokens = [1 + (n * 31 + t + number) % 3000 for t in range(prompt)]
        core.add(SamplingSequence(f"{number} {n}", tokens, OUTPUT, seed=n))
    began = time.process_time()
    while not all(item.ready for item in core.scheduler.running) or core.scheduler.waiting:
        core.step()
    middle, count = time.process_time(), 0
    while not core.scheduler.idle:
        core.step()
        count += 1
    return middle - began, (time.process_time() - middle) / count


def engine(root: Path, kind: GpuKind) -> Figures:
    """The embedded engine computes in fp32 and keeps its cache so: twice the bytes of a plan's."""
    save_model(make_model(SERVED), root)
    plan = planned(SERVED, msgspec.structs.replace(kind, bandwidth=kind.bandwidth * BF16 / FP32))
    pool, length = plan.pools[0], max(PROMPTS) + OUTPUT + 1
    cores = [Core(root, version="0", slots=slots, retained=0, length=length) for slots in SLOTS]
    rows = [
        [played(core, prompt=prompt, number=number) for core, prompt in zip(cores, PROMPTS, strict=True)]
        for number in range(TRIES)
    ]
    floors = [
        slots * prompt / timing.prefill(plan, pool, prompt / 2) for slots, prompt in zip(SLOTS, PROMPTS, strict=True)
    ]
    between = (SLOTS[2] - SLOTS[0]) / (SLOTS[1] - SLOTS[0])
    read, decode = ([[item[part] for item in row] for row in rows] for part in (0, 1))
    floor = timing.decoding_step(plan, pool, SLOTS[2], PROMPTS[2] + OUTPUT / 2)
    return {
        "prefill": compared([row[0] * floors[2] / floors[0] for row in read], [row[2] for row in read]),
        "decode": compared([row[0] + between * (row[1] - row[0]) for row in decode], [row[2] for row in decode]),
        "decode_of_floor": compared([floor] * len(decode), [row[2] for row in decode]),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = command.parser(__name__, __doc__)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    kind = machine()
    parts: Figures = {}
    with aftermath.TemporaryDirectory("pagurus-scale-") as root:
        if os.geteuid() == 0:
            parts["bytes"] = exchanged()
        parts |= training(kind)
        if (MODEL / "config.json").exists():
            parts |= versions(Path(root))
        parts |= engine(Path(root) / "model", kind)
    metrics = {
        "cpu": processor(),
        "load": round(os.getloadavg()[0], 1),
        "matmul_gflop_s": round(kind.flops / 1e9, 1),
        "copy_gb_s": round(kind.bandwidth / 1e9, 1),
        **parts,
        "off": [name for name, item in parts.items() if abs(item["ratio"] - 1) > LIMIT and name not in FLOORS],
        "left_out": [name for name in ("bytes", "version") if name not in parts],
    }
    command.show(metrics, options)
    return 0
