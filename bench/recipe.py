"""Does the recipe learn? GRPO against an example's simulated twin, no sandboxes.

It begins with the policy that lies in the tree, or with `--fit` with one that is fitted anew for each seed.

With `--staleness 0 1 2` every seed learns once at each: a step is then taken on what was sampled so many steps before.
`wall_s` is what the run would take if sampler and trainer had a machine each: a batch is begun when the sampler is free
and the weights that it is sampled by are there, a step when the trainer is free and its batch is there (`Clocks`).
Sampling and steps are measured one after the other, in seconds of a processor, so that nothing disturbs them.
With `--tail 0 1.25` every seed learns without and with tail batching (rollout.decide.tail): time is then that of
decoding steps, `decoding_steps` how many passed until each batch was whole.
`--plot FILE.svg` draws the curves: mean over seeds, band from the least to the greatest.

With `--real` the same is asked of whole runs in real sandboxes, one after another (bench.harness.real_training):
`pagurus bench recipe --real --seeds 0 --staleness 0 1 2 --corrections decoupled --json`. Held-out episodes are then
played before and after a run only, and the curves are those of the batches' mean rewards.

What the twin does not cover: sandboxes, the engine's process, versions that change within an episode.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench.harness import command, real_training
from bench.harness.own_daemon import IMAGE
from examples import fit
from examples.fit import Example
from rollout.decide import tail
from rollout.decide.view import LeasePrompts, RolloutView, SchedulingRules
from rollout.engine.embedded.model import KVCache, Qwen3, load_model
from rollout.environments.shell import immediate
from rollout.environments.splits import HELD_OUT
from trainer.batches.sample import Sample
from trainer.config import TrainConfig
from trainer.learner import Learner
from trainer.models import policy
from trainer.models.scorer import Scorer
from trainer.objectives import build
from trainer.settings import ObjectiveSettings

LONGEST = 256  # tokens of an episode
SANDBOXES = 16  # at once
ACTION_TOKENS = TrainConfig(task=Path()).sampling.max_tokens


class Episode:
    """One twin, its environment and its tokens so far."""

    def __init__(self, example: Example, seed: int, tokenizer: Tokenizer):
        self.environment, self.twin, self.tokenizer = example.environment(), example.twin(), tokenizer
        first = immediate(self.environment.reset(self.twin, seed))
        self.tokens = self._encode(first.text)
        self.mask = [0] * len(self.tokens)
        self.logprobs = [0.0] * len(self.tokens)
        self.fed = 0  # tokens that the model has seen
        self.ended = 0  # by which decoding step of all
        self.action: list[int] = []
        self.reward, self.done = 0.0, False

    def take(self, token: int, logprob: float) -> None:
        """The policy's next token; a complete action is executed at once."""
        self.tokens.append(token)
        self.mask.append(1)
        self.logprobs.append(logprob)
        self.action.append(token)
        if token != policy.END_ID and len(self.action) < ACTION_TOKENS:
            return
        words = [item for item in self.action if item != policy.END_ID]
        self.action = []
        observation = immediate(self.environment.step(self.twin, self.tokenizer.decode(words)))
        observed = self._encode(observation.text)
        self.done = observation.done or len(self.tokens) + len(observed) + ACTION_TOKENS > LONGEST
        self.reward = observation.reward
        if not self.done:
            self.tokens += observed
            self.mask += [0] * len(observed)
            self.logprobs += [0.0] * len(observed)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


@torch.inference_mode()
def sample(
    example: Example, model: Qwen3, tokenizer: Tokenizer, seeds: Sequence[int], draw: torch.Generator
) -> list[Episode]:
    """Episodes for these seeds, decoded in lockstep at T = 1: one token of each at a time."""
    episodes = [Episode(example, seed, tokenizer) for seed in seeds]
    cache = KVCache(model.config, len(episodes), LONGEST + ACTION_TOKENS)
    rows = list(episodes)  # those that go on
    for step in itertools.count(1):
        if not rows:
            break
        fed = torch.tensor([episode.fed for episode in rows])
        tokens = torch.tensor([episode.tokens[episode.fed] for episode in rows])
        logprobs = torch.log_softmax(model.decode(tokens, fed, cache), dim=-1)
        drawn: Tensor = torch.multinomial(logprobs.exp(), 1, generator=draw)[:, 0]
        said = logprobs.gather(1, drawn[:, None])[:, 0].tolist()
        for row, token in reversed(list(enumerate(drawn.tolist()))):
            episode = rows[row]
            episode.fed += 1
            if episode.fed == len(episode.tokens):
                episode.take(token, said[row])
            if episode.done:
                episode.ended = step
                last = rows.pop()
                if last is not episode:  # its place is taken by the last one
                    cache.copy(len(rows), row, last.fed)
                    rows[row] = last
    return episodes


class Rounds:
    """What batches are made of: groups of the next prompts, or with `tail` those of a round."""

    def __init__(self, seed: int, config: TrainConfig, tail: float):
        self.rules = SchedulingRules(groups=config.groups, size=config.size, tail=tail)
        self.steps = 0  # of decoding, until each batch was whole
        self._fresh = itertools.count(1_000_000 * seed)
        self._deferred: list[int] = []

    def batch(self, play: Callable[[list[int]], list[Episode]]) -> list[Episode]:
        """`play`: episodes for these seeds."""
        lease = self._lease()
        prompts = [self._deferred.pop(0) if lease.deferred else next(self._fresh) for _ in range(lease.count)]
        members = tail.members(self.rules, deferred=lease.deferred)
        episodes = play([prompt for prompt in prompts for _ in range(members)])
        groups = [episodes[at : at + members] for at in range(0, len(episodes), members)]
        used = [sorted(group, key=lambda item: item.ended)[: self.rules.size] for group in groups]
        order = sorted(range(len(used)), key=lambda group: used[group][-1].ended)
        first, late = order[: self.rules.groups], order[self.rules.groups :]
        self._deferred += [prompts[group] for group in late]
        self.steps += used[first[-1]][-1].ended
        return [episode for group in sorted(first) for episode in used[group]]

    def _lease(self) -> LeasePrompts:
        if not self.rules.tail:
            return LeasePrompts(self.rules.groups)
        deferred = len(self._deferred)
        view = RolloutView(
            version=0, requested=True, training=False, running=[], buffered=[], queued=0, more=True, deferred=deferred
        )
        return tail.next_round(view, self.rules, bound=0)[0]


def learn(
    example: Example,
    seed: int,
    *,
    steps: int,
    held_out: int,
    fitted: bool,
    staleness: int = 1,
    factor: float = 0.0,
    every: int = 10,
    corrections: Sequence[str] = (),
) -> dict[str, Any]:
    """The whole recipe for one seed; rewards on held-out seeds by step."""
    torch.manual_seed(seed)
    config = TrainConfig(task=fit.DIRECTORY / example.name, seed=seed, steps=steps)
    began = time.process_time()
    start = example.start
    model, tokenizer = fresh_policy(example, seed) if fitted else (load_model(start), policy.load_tokenizer(start))
    fit_s = time.process_time() - began
    objective = build(ObjectiveSettings(corrections=list(corrections)))
    learner = Learner(Scorer(model), objective, config.optimiser)
    draw = torch.Generator().manual_seed(seed)
    rewards = {0: evaluate(example, model, tokenizer, held_out)}
    waiting: deque[list[Episode]] = deque()  # sampled by older weights
    clocks, walls, rounds = Clocks(), {0: 0.0}, Rounds(seed, config, factor)
    for step in range(steps):
        while len(waiting) <= staleness and step + len(waiting) < steps:
            began = time.process_time()
            waiting.append(rounds.batch(lambda seeds: sample(example, model, tokenizer, seeds, draw)))
            clocks.sampled(step, time.process_time() - began)
        began = time.process_time()
        update(learner, waiting.popleft(), config, step)
        walls[step + 1] = round(clocks.stepped(time.process_time() - began), 2)
        if (step + 1) % every == 0 or step + 1 == steps:
            rewards[step + 1] = evaluate(example, model, tokenizer, held_out)
            print(
                f"seed {seed}, staleness {staleness}, tail {factor}: held-out reward {rewards}",
                file=sys.stderr,
                flush=True,
            )
    return {
        "example": example.name,
        "seed": seed,
        "staleness": staleness,
        "tail": factor,
        "decoding_steps": rounds.steps,
        "fit_cpu_s": round(fit_s, 1) if fitted else None,
        "reward": rewards,
        "wall_s": walls,
        "before": rewards[0],
        "after": rewards[steps],
    }


class Clocks:
    """When sampler and trainer, on a machine each, are done with what took these seconds."""

    def __init__(self) -> None:
        self.sampler = 0.0  # is free again
        self.ready: deque[float] = deque()  # batches that were not trained on yet
        self.versions = [0.0]  # are there

    def sampled(self, version: int, seconds: float) -> None:
        """The next batch, by the weights of this version."""
        self.sampler = max(self.sampler, self.versions[version]) + seconds
        self.ready.append(self.sampler)

    def stepped(self, seconds: float) -> float:
        """The next step, on the oldest batch; when it was done."""
        self.versions.append(max(self.versions[-1], self.ready.popleft()) + seconds)
        return self.versions[-1]


def compared(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By staleness and tail batching: mean reward at the end, its distance to the synchronous runs of the same seeds,
    and the time as a share of theirs."""
    result = {}
    plain = {run["seed"]: run for run in runs if way(run) == (0, 0.0)}
    for item in sorted(set(map(way, runs))):
        mine = [run for run in runs if way(run) == item]
        line = {"after": sum(run["after"] for run in mine) / len(mine)}
        if both := [(run, plain[run["seed"]]) for run in mine if run["seed"] in plain]:
            line["minus_synchronous"] = sum(run["after"] - other["after"] for run, other in both) / len(both)
            line["wall_share"] = sum(took(run, item[1]) for run, _ in both) / sum(took(o, item[1]) for _, o in both)
        name = f"{item[0]}, tail {item[1]:g}" if item[1] else str(item[0])
        result[name] = {key: round(value, 4) for key, value in line.items()}
    return result


def way(run: dict[str, Any]) -> tuple[int, float]:
    return run["staleness"], run.get("tail", 0.0)


def took(run: dict[str, Any], tail: float) -> float:
    return run["decoding_steps"] if tail else max(run["wall_s"].values())


def read(path: Path) -> list[dict[str, Any]]:
    """The runs of a file with what this printed: JSON makes names of steps."""
    runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"]
    for run in runs:
        for name in run.keys() & {"reward", "batch", "wall_s"}:
            run[name] = {int(step): value for step, value in run[name].items()}
    return runs


def plot(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Held-out reward over wall time, or that of batches where they were recorded, one curve for each staleness."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    name = "batch" if all("batch" in run for run in runs) else "reward"
    for staleness in sorted({run["staleness"] for run in runs}):
        mine = [run for run in runs if run["staleness"] == staleness]
        steps = sorted(mine[0][name])
        rewards = [[run[name][step] for run in mine] for step in steps]
        walls = [sum(run["wall_s"][step] for run in mine) / len(mine) for step in steps]
        means = [sum(item) / len(item) for item in rewards]
        (line,) = axes.plot(walls, means, marker=".", label=f"staleness {staleness}, {len(mine)} seeds")
        axes.fill_between(
            walls, [min(item) for item in rewards], [max(item) for item in rewards], color=line.get_color(), alpha=0.12
        )
    if name == "batch":
        axes.set(xlabel="seconds since the run began", ylabel="mean reward of a batch", ylim=(0, 1))
    else:
        axes.set(xlabel="seconds, with a machine each for sampler and trainer", ylabel="held-out reward", ylim=(0, 1))
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    plt.close(figure)


def fresh_policy(example: Example, seed: int) -> tuple[Qwen3, Tokenizer]:
    """One that was fitted for this seed, as the one in the tree was."""
    with tempfile.TemporaryDirectory() as directory:
        model = policy.make(Path(directory), example.words, seed=seed, shape=example.shape)
        tokenizer = policy.load_tokenizer(Path(directory))
    fit.fit(model, tokenizer, example.demonstrate, seed=seed)
    return model, tokenizer


def update(learner: Learner, episodes: list[Episode], config: TrainConfig, step: int) -> None:
    batch = [
        Sample(
            tokens=episode.tokens,
            mask=episode.mask,
            logprobs=episode.logprobs,
            reward=episode.reward,
            group=str(number // config.size),
        )
        for number, episode in enumerate(episodes)
    ]
    learner.step(batch, rate=config.optimiser.rate_at(step, config.steps))


def evaluate(example: Example, model: Qwen3, tokenizer: Tokenizer, episodes: int) -> float:
    seeds = [HELD_OUT + i for i in range(episodes)]
    done = sample(example, model, tokenizer, seeds, torch.Generator().manual_seed(0))
    return sum(episode.reward for episode in done) / len(done)


def on_twins(options: argparse.Namespace) -> list[dict[str, Any]]:
    return [
        learn(
            Example.of(options.example),
            seed,
            steps=options.steps,
            held_out=options.held_out,
            fitted=options.fit,
            staleness=staleness,
            factor=factor,
            every=options.every,
            corrections=options.corrections,
        )
        for seed in options.seeds
        for staleness in options.staleness
        for factor in options.tail
    ]


def in_sandboxes(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All with the same number of sandboxes at once, which a run else chooses by the load that it finds."""
    with real_training.host(options.image) as host:
        return [
            real_training.learn(
                host,
                TrainConfig(
                    task=fit.DIRECTORY / options.example, seed=seed, steps=options.steps, held_out=options.held_out,
                    staleness=staleness, objective=ObjectiveSettings(corrections=options.corrections),
                    image=IMAGE, pace=options.pace,
                    concurrency=SANDBOXES,
                ),
            )
            for seed in options.seeds
            for staleness in options.staleness
        ]  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--example", choices=fit.EXAMPLES, default=fit.EXAMPLES[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=TrainConfig(task=Path()).steps)
    parser.add_argument("--held-out", type=int, default=256)
    parser.add_argument("--staleness", type=int, nargs="+", default=[1], help="steps between sampling and training")
    parser.add_argument(
        "--tail", type=float, nargs="+", default=[0.0], help="of rounds, on the twin; 0: no tail batching"
    )
    parser.add_argument("--corrections", nargs="+", default=[], help="for data of other policies: decoupled, tis, ...")
    parser.add_argument("--every", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--plot", type=Path, help="draw the curves to this file (.svg or .png)")
    parser.add_argument("--again", type=Path, nargs="+", help="figures that this printed before, instead of learning")
    parser.add_argument("--fit", action="store_true", help="fit a policy anew for each seed, which takes minutes")
    parser.add_argument("--real", action="store_true", help="in real sandboxes, whole runs of `pagurus train`")
    parser.add_argument("--image", default="debian", help="an image of this host, for real sandboxes")
    parser.add_argument("--pace", type=float, help="seconds of an answer, at least, in real sandboxes")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also a bench that is ended leaves nothing behind
    torch.set_num_threads(1)
    if options.again:
        runs = [run for path in options.again for run in read(path)]
    else:
        runs = (in_sandboxes if options.real else on_twins)(options)
    result = {
        "runs": runs,
        "before_max": max(run["before"] for run in runs),
        "after_min": min(run["after"] for run in runs),
        "by_staleness": compared(runs),
    }
    if options.plot is not None:
        plot(runs, options.plot)
    command.show(result, options)
    return 0
