"""What a trainer costs beside bare steps, and whether killing it changes the weights.

- `efficiency`: tokens per second of `Learner.step` over those of a bare loop (forward, log-softmax, policy gradient,
  clip, AdamW) with the same model and the same packed micro-batches, taken in turns within one run.
- `padding_share`: tokens that a model reads for nothing; beside it what padding to the longest would cost.
- `stream_hidden_share`: of the seconds of a step, those that were over when a long-tailed batch was complete.
- `decoding_alongside_stream`: seconds of 24 answers of an embedded engine on the same machine, alone over beside a
trainer
  that computes gradients of one group after another; in turns, the median of pairs.
- `peak_memory`: growth of the resident set of a fresh process over two steps, each saved and published as a run does,
  beside the estimate of `--dry-run`; `peak_memory_of_saves`: the same where micro-batches are so small that a save
  needs most.
- `kills`: times that a rank was killed by SIGKILL at a random instant, and whether the weights at the end are those of
  a run that was not (`identical`), bit by bit, from the recorded log of samples. The same for two ranks, of which any
  is killed and which become one in the second half: `ranks_to_one_difference`, the norm of what differs over that of
  the tensor, at most.

- `hosts` (`--hosts 3`, alone): ranks on hosts of their own, network namespaces behind links of 1 Gbit/s: how far the
  weights are from one rank's, what a killed host costs, bytes that a version moves over those that changed, and what a
  rank holds (PSS) over its shard, which is 18 bytes of each of its weights, 6 after loading alone (`--steps 0`), 4
  under adapters (`--lora 8`) (`--model 135m`, `1b`; the default is small); `peak_to_shard` is the largest resident
  set until then, files that are mapped included, and `peak_to_estimate` that over what `--dry-run` says.

What it does not cover: GPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.harness import aftermath, command, trainer_hosts
from rollout.engine.client import Sampling
from rollout.engine.embedded.model import ModelConfig, Qwen3, save_model
from rollout.engine.launch import embedded
from rollout.engine.supervisor import EngineSupervisor
from rollout.weights.store import VersionStore
from sandbox.paths import CHECKOUT
from trainer.batches.pack import pack
from trainer.batches.plan import plan
from trainer.batches.sample import Sample
from trainer.distributed.launch import Fleet
from trainer.distributed.watch import read
from trainer.distributed.worker import WorkPlan
from trainer.errors import RankLost
from trainer.estimate import estimate, ghostly
from trainer.learner import Learner
from trainer.machine import return_freed_memory
from trainer.models.load import Lora, published
from trainer.models.scorer import Scorer
from trainer.objectives import named
from trainer.resume import ResumeState, Saves, saves_in
from trainer.settings import OptimiserSettings
from trainer.weights import Publisher

CONFIG = ModelConfig(
    vocab_size=2000, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=2048,
)  # fmt: skip
LARGER = ModelConfig(
    vocab_size=4000, hidden_size=384, intermediate_size=1152, num_hidden_layers=8, num_attention_heads=6,
    num_key_value_heads=6, head_dim=64, max_position_embeddings=2048,
)  # fmt: skip
SMOL = ModelConfig(  # as SmolLM2-135M
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, head_dim=64, max_position_embeddings=2048,
)  # fmt: skip
LLAMA = ModelConfig(  # of a billion weights
    vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
    num_key_value_heads=4, head_dim=64, max_position_embeddings=2048,
)  # fmt: skip
SIZES = {"least": ModelConfig(vocab_size=300), "small": CONFIG, "135m": SMOL, "1b": LLAMA}
SERVED = CHECKOUT / "examples" / "fix_the_service" / "start"
BUDGET = 2048
LITTLE = 64  # tokens of a micro-batch that needs less memory than a save
TIMEOUT = 300.0  # seconds without a sign, on a machine that may be very busy: who is dead is known at once anyway
LIFE = 5  # steps, about, between two kills
BENCH = (sys.executable, "-m", "pagurus", "bench", "trainer")
PARTS = ("efficiency", "streaming", "decoding", "memory", "kills", "kills_of_ranks")
SIZE = 4  # trajectories of a group


def make_model(config: ModelConfig) -> Qwen3:
    model = Qwen3(config)
    model.initialise(0)
    return model


def make_samples(seed: int, *, groups: int, longest: int, vocabulary: int) -> list[Sample]:
    """Lengths with a long tail; the policy wrote every other stretch of 16 tokens."""
    rng = random.Random(seed)
    made = []
    for group in range(groups):
        for member in range(SIZE):
            length = min(longest, 24 + int(rng.lognormvariate(4.3, 0.8)))
            mask = [t // 16 % 2 for t in range(length)]
            tokens = [rng.randrange(1, vocabulary) for _ in range(length)]
            logs = [-7.5 * bit for bit in mask]
            made.append(Sample(tokens=tokens, mask=mask, logprobs=logs, reward=float(member % 2), group=str(group)))
    return made


def bare_loop(model: Qwen3, samples: Sequence[Sample]) -> Callable[[], None]:
    """What one would write without a trainer, for this model and these micro-batches."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5)
    scorer = Scorer(model)
    rounds = plan([len(sample.tokens) for sample in samples], budget=BUDGET, width=CONFIG.hidden_size)
    batches = [[samples[i] for i in one[0]] for one in rounds]
    total = sum(sample.sampled for sample in samples)

    def step() -> None:
        optimiser.zero_grad()
        for batch in batches:
            packed = pack(batch)
            advantage = torch.tensor([2 * sample.reward - 1 for sample in batch])[packed.sequence]
            logits = scorer.hidden(packed)[packed.predicting] @ model.head_weight.T
            new = torch.log_softmax(logits, -1).gather(-1, packed.targets[:, None])[:, 0]
            ((new - packed.engine).exp() * -advantage).sum().div(total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()

    return step


def efficiency(rounds: int) -> dict[str, Any]:
    samples = make_samples(1, groups=8, longest=1024, vocabulary=CONFIG.vocab_size)
    tokens = sum(len(sample.tokens) for sample in samples)
    learner = Learner(Scorer(make_model(CONFIG)), named("dapo"), OptimiserSettings(budget=BUDGET, rate=1e-5))
    bare = bare_loop(make_model(CONFIG), samples)
    ours, theirs = [], []
    padding = read_tokens = 0
    for number in range(rounds + 1):
        began = time.perf_counter()
        stats = learner.step(samples)
        middle = time.perf_counter()
        bare()
        if number:  # the first warms up
            ours.append(middle - began)
            theirs.append(time.perf_counter() - middle)
        padding += stats.padding_tokens
        read_tokens += stats.forward_tokens
    ratios = [bare_s / ours_s for bare_s, ours_s in zip(theirs, ours, strict=True)]
    lengths = [len(sample.tokens) for sample in samples]
    return {
        "tokens_per_s": round(tokens / statistics.median(ours)),
        "bare_tokens_per_s": round(tokens / statistics.median(theirs)),
        "efficiency": round(statistics.median(ratios), 3),
        "padding_share": round(padding / read_tokens, 4),
        "padding_share_if_padded": round(1 - sum(lengths) / (max(lengths) * len(lengths)), 3),
    }


def streaming() -> dict[str, Any]:
    """Groups come as a long-tailed rollout would give them: when the longest of their members is done.

    Three quarters of a rollout's groups are there after about a third of its time, which is set to three times the
    work of the step.
    """
    samples = make_samples(2, groups=16, longest=1024, vocabulary=CONFIG.vocab_size)
    learner = Learner(Scorer(make_model(CONFIG)), named("pooled"), OptimiserSettings(budget=BUDGET, rate=1e-5))
    learner.step(samples)
    alone = learner.step(samples).seconds
    groups = [samples[at : at + SIZE] for at in range(0, len(samples), SIZE)]
    durations = [max(len(sample.tokens) for sample in group) for group in groups]
    order = sorted(range(len(groups)), key=lambda i: durations[i])
    span = 3 * alone
    began = time.perf_counter()
    learner.begin()
    for place, index in enumerate(order):
        due = began + span * durations[index] / max(durations)
        time.sleep(max(0.0, due - time.perf_counter()))
        learner.feed(groups[index], last=place == len(order) - 1)
    complete = began + span
    stats = learner.finish()
    return {
        "stream_hidden_share": round(stats.hidden_s / stats.seconds, 3),
        "stream_step_after_batch_s": round(time.perf_counter() - complete, 3),
        "whole_step_s": round(alone, 3),
    }


async def decoding(pairs: int) -> dict[str, Any]:
    samples = make_samples(3, groups=16, longest=512, vocabulary=CONFIG.vocab_size)
    learner = Learner(Scorer(make_model(CONFIG)), named("pooled"), OptimiserSettings(budget=BUDGET, rate=1e-5))
    sampling = Sampling(max_tokens=200, ignore_eos=True)

    def stream(stop: threading.Event) -> None:
        while not stop.is_set():
            learner.begin()
            for at in range(0, len(samples), SIZE):
                learner.feed(samples[at : at + SIZE], last=at + SIZE >= len(samples))
            learner.finish()

    with aftermath.TemporaryDirectory("pagurus-decoding-") as home:
        async with EngineSupervisor(embedded(), SERVED, 0, log=Path(home) / "engine.log") as engine:

            async def decode() -> float:
                began = time.perf_counter()
                await asyncio.gather(*(engine.generate([11, 12, 13], sampling) for _ in range(24)))
                return time.perf_counter() - began

            await decode()  # warm
            ratios = []
            for _ in range(pairs):
                alone, stop = await decode(), threading.Event()
                streaming = asyncio.create_task(asyncio.to_thread(stream, stop))
                ratios.append(alone / await decode())
                stop.set()
                await streaming
    return {
        "decoding_beside_stream": round(statistics.median(ratios), 3),
        "decoding_pairs": [round(ratio, 3) for ratio in ratios],
    }


def memory(*, keep_freed: bool) -> dict[str, Any]:
    """In processes of their own, so that the resident set is that of the steps."""
    steps, saves = (memory_of(budget, keep_freed=keep_freed) for budget in (BUDGET, LITTLE))
    return steps | {name.replace("memory", "memory_of_saves"): saves[name] for name in saves if "memory" in name}


def memory_of(budget: int, *, keep_freed: bool) -> dict[str, Any]:
    ran = subprocess.run(
        [*BENCH, "--only-memory", str(budget), *(["--keep-freed"] if keep_freed else [])],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return result


def resident(name: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most. (`ru_maxrss` begins with what the parent had.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def measure_memory(budget: int) -> dict[str, Any]:
    longest = min(512, budget)
    samples = [
        Sample(tokens=[1 + t % 99 for t in range(longest)], mask=[0] + [1] * (longest - 1),
               logprobs=[-8.0] * longest, reward=float(number % 2), group=str(number // SIZE))
        for number in range(max(SIZE, 2 * budget // longest))
    ]  # fmt: skip
    with ghostly():
        expected = estimate(
            Qwen3(LARGER), budget=budget, longest=longest, tokens=2 * budget, recompute=False, flops=1e10
        )
    few = make_samples(0, groups=1, longest=64, vocabulary=CONFIG.vocab_size)
    with tempfile.TemporaryDirectory() as directory:
        live(CONFIG, few, budget=BUDGET, directory=Path(directory, "warm"))  # libraries load their code once
        ctypes.CDLL(None).malloc_trim(0)  # what that has freed is not there for what follows
        before = resident("VmRSS")
        live(LARGER, samples, budget=budget, directory=Path(directory, "run"))
        grown = resident("VmHWM") - before
    return {
        "peak_memory": grown,
        "peak_memory_estimate": expected.peak,
        "peak_memory_ratio": round(grown / expected.peak, 3),
        "parameters": expected.parameters,
    }


def live(config: ModelConfig, samples: Sequence[Sample], *, budget: int, directory: Path) -> None:
    """Two steps as the trainer of a run takes them, at a rate at which few words change in bf16."""
    learner = Learner(Scorer(make_model(config)), named("dapo"), OptimiserSettings(budget=budget, rate=1e-6))
    saves, publisher = Saves(directory / "resume"), Publisher(VersionStore(directory / "weights"))
    for step in range(2):
        learner.step(samples)
        saves.start_save(learner, ResumeState(step=step + 1))
        publisher.start(step, published(learner.scorer.model), {})
        saves.wait_saved()
        publisher.wait()
    publisher.close()


def killing(kills: int) -> dict[str, Any]:
    """A run on one rank that is killed, against one that is not, from the same log."""
    with tempfile.TemporaryDirectory() as directory:
        complete = killed(kill_plan(directory, "complete", kills), 0, ranks=1)
        alone = killed(kill_plan(directory, "alone", kills), kills, ranks=1)
    identical = complete.keys() == alone.keys() and all(torch.equal(complete[name], alone[name]) for name in complete)
    return {"kills": kills, "identical": identical}


def killing_ranks(kills: int) -> dict[str, Any]:
    """A run on two ranks, then one, of which any is killed, against one on one rank that is not."""
    with tempfile.TemporaryDirectory() as directory:
        complete = killed(kill_plan(directory, "complete", kills), 0, ranks=1)
        ranks = killed(kill_plan(directory, "ranks", kills), kills, ranks=2)
    difference = max(float((complete[name] - ranks[name]).norm() / complete[name].norm()) for name in complete)
    return {"kills_of_ranks": kills, "ranks_to_one_difference": difference}


def kill_plan(directory: str, name: str, kills: int) -> WorkPlan:
    base = Path(directory, "base")
    if not base.exists():
        save_model(make_model(ModelConfig(vocab_size=300)), base)
    steps = LIFE * (kills + 1)
    return WorkPlan(
        model=str(base), directory=str(Path(directory, name)), steps=steps, settings=OptimiserSettings(budget=256)
    )


def killed(made: WorkPlan, kills: int, *, ranks: int) -> dict[str, torch.Tensor]:
    """The weights after a run of which `kills` times one rank is killed at a random instant; the second half goes on
    with one rank."""
    rng = random.Random(3)
    fleet = Fleet(made, ranks=ranks, silent=TIMEOUT)
    for step in range(made.steps):
        fleet.log.write(step, make_samples(step, groups=2, longest=64, vocabulary=300))
    try:
        for life in range(kills):
            fleet.ranks = ranks if 2 * life < kills else 1
            fleet.start()
            saved = max((int(save.name.removeprefix("step-")) for save in saves_in(made.resume)), default=0)
            fleet.wait(min(made.steps, max(LIFE * life, saved) + rng.randrange(1, 4)))
            time.sleep(rng.random() * 0.1)
            os.kill(rng.choice(read(fleet.directory / "beats")).pid, signal.SIGKILL)
            try:
                fleet.wait(made.steps)
            except RankLost as lost:
                print(f"life {life}: {lost.message}", file=sys.stderr)
        fleet.ranks = 1
        fleet.start()
        fleet.wait(made.steps)
        return fleet.weights(made.steps)
    finally:
        fleet.stop()


def several_hosts(options: argparse.Namespace) -> dict[str, Any]:
    """What a rank holds is compared with a rank of the smallest model, which is all but torch itself."""
    trainer_hosts.need_tools()
    lora = Lora(rank=options.lora, alpha=2 * options.lora) if options.lora else None

    def measured(config: ModelConfig) -> dict[str, Any]:
        batches = [make_samples(step, groups=3, longest=64, vocabulary=config.vocab_size)
                   for step in range(options.steps)]  # fmt: skip
        chosen = {"budget": 256, "rate": options.rate, "library": options.transformers, "lora": lora}
        return trainer_hosts.measure(config, options.hosts, batches, **chosen)

    least = measured(SIZES["least"])
    if options.model == "least":
        return least
    result = measured(SIZES[options.model])
    shard = result["shard_bytes"] - least["shard_bytes"]
    for name, measure in (("held", "rank_pss"), ("peak", "rank_peak")):
        grown = max(result.pop(measure)) - max(least.pop(measure))
        result |= {f"{name}_bytes": grown, f"{name}_to_shard": round(grown / shard, 3)}
    expected = result["estimate_bytes"] - least["estimate_bytes"]
    return result | ({"peak_to_estimate": round(result["peak_bytes"] / expected, 3)} if options.steps else {})


def main(argv: list[str] | None = None) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--rounds", type=int, default=8, help="steps of each kind that are compared")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--hosts", type=int, help="measure a trainer on so many hosts instead")
    parser.add_argument("--model", choices=SIZES, default="small", help="of the hosts' trainer")
    parser.add_argument("--transformers", action="store_true", help="which defines that model, not Pagurus")
    parser.add_argument(
        "--lora", type=int, default=0, help="rank of adapters, of which alone the hosts' trainer learns"
    )
    parser.add_argument("--rate", default="1gbit", help="of each host's link")
    parser.add_argument(
        "--steps",
        type=int,
        choices=(0, 1, 2, 3, trainer_hosts.STEPS),
        default=trainer_hosts.STEPS,
        help="of the hosts' trainer; fewer: without a kill and a comparison; 0: memory after loading alone",
    )
    parser.add_argument("--only", choices=PARTS, help="one part, not all of them")
    parser.add_argument("--keep-freed", action="store_true", help="leave the C library as it is: what that saves")
    parser.add_argument("--only-memory", type=int, metavar="BUDGET", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if not options.keep_freed:
        return_freed_memory()  # as a trainer does
    if options.only_memory:
        print(json.dumps(measure_memory(options.only_memory)))
        return 0
    if options.hosts:
        command.show(several_hosts(options), options)
        return 0
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "efficiency": lambda: efficiency(options.rounds),
        "streaming": streaming,
        "decoding": lambda: asyncio.run(decoding(options.rounds)),
        "memory": lambda: memory(keep_freed=options.keep_freed),
        "kills": lambda: killing(options.kills) if options.kills else {},
        "kills_of_ranks": lambda: killing_ranks(options.kills) if options.kills else {},
    }
    result: dict[str, Any] = {}
    for name in [options.only] if options.only else PARTS:
        result |= parts[name]()
    command.show(result, options)
    return 0
