"""Does the recipe learn? GRPO against the simulated twin, no sandboxes: ``pagurus bench recipe --json``.

It begins with the policy that lies in the tree, or with `--fit` with one that is fitted anew for each seed.

With `--staleness 0 1 2` every seed learns once at each: a step is then taken on what was sampled so many steps before.
`wall_s` is what the run would take if sampler and trainer had a machine each: at staleness 0 they take turns, else both
work at once and the slower one decides. Sampling and steps are measured one after the other, so that they do not
disturb each other. `--plot FILE.svg` draws the curves: mean over seeds, band from the least to the greatest.

Owns: a lockstep sampler over many twins, and the figures of docs/training.md. Does not own: the recipe (trainer).
What it does not cover: sandboxes, the engine's process, versions that change within an episode.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from examples.fix_the_service import WORDS, FixTheService, fit
from examples.fix_the_service.twin import Twin, immediate
from rollout.engine.embedded.model import KVCache, Qwen3, load_model
from rollout.environments.mixture import HELD_OUT
from trainer.batches.sample import Sample
from trainer.config import Config
from trainer.learner import Learner, Settings, learning_rate
from trainer.models import policy
from trainer.models.scorer import Scorer
from trainer.objectives import named

LONGEST = 256  # tokens of an episode
ACTION_TOKENS = Config(task=Path()).max_tokens


class Episode:
    """One twin, its environment and its tokens so far."""

    def __init__(self, seed: int, tokenizer: Tokenizer):
        self.environment, self.twin, self.tokenizer = FixTheService(), Twin(), tokenizer
        first = immediate(self.environment.reset(self.twin, seed))
        self.tokens = self._encode(first.text)
        self.mask = [0] * len(self.tokens)
        self.logprobs = [0.0] * len(self.tokens)
        self.fed = 0  # tokens that the model has seen
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
        words = [each for each in self.action if each != policy.END_ID]
        self.action = []
        observation = immediate(self.environment.step(self.twin, self.tokenizer.decode(words)))
        seen = self._encode(observation.text)
        self.done = observation.done or len(self.tokens) + len(seen) + ACTION_TOKENS > LONGEST
        self.reward = observation.reward
        if not self.done:
            self.tokens += seen
            self.mask += [0] * len(seen)
            self.logprobs += [0.0] * len(seen)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


@torch.inference_mode()
def sample(model: Qwen3, tokenizer: Tokenizer, seeds: Sequence[int], draw: torch.Generator) -> list[Episode]:
    """Episodes for these seeds, decoded in lockstep at T = 1: one token of each at a time."""
    episodes = [Episode(seed, tokenizer) for seed in seeds]
    cache = KVCache(model.config, len(episodes), LONGEST + ACTION_TOKENS)
    while not all(episode.done for episode in episodes):
        fed = [min(episode.fed, len(episode.tokens) - 1) for episode in episodes]
        tokens = torch.tensor([episode.tokens[at] for episode, at in zip(episodes, fed, strict=True)])
        logprobs = torch.log_softmax(model.decode(tokens, torch.tensor(fed), cache), dim=-1)
        drawn: Tensor = torch.multinomial(logprobs.exp(), 1, generator=draw)[:, 0]
        for row, episode in enumerate(episodes):
            if episode.done:
                continue
            episode.fed += 1
            if episode.fed == len(episode.tokens):
                token = int(drawn[row])
                episode.take(token, float(logprobs[row, token]))
    return episodes


def learn(seed: int, *, steps: int, held_out: int, fitted: bool, staleness: int = 1, every: int = 10) -> dict[str, Any]:
    """The whole recipe for one seed; rewards on held-out seeds by step."""
    torch.manual_seed(seed)
    config = Config(task=Path("examples/fix_the_service"), seed=seed, steps=steps)
    began = time.process_time()
    model, tokenizer = fresh_policy(seed) if fitted else (load_model(fit.START), policy.load_tokenizer(fit.START))
    fit_s = time.process_time() - began
    learner = Learner(Scorer(model), named(config.objective), Settings(rate=config.rate))
    draw = torch.Generator().manual_seed(seed)
    rewards = {0: evaluate(model, tokenizer, held_out)}
    waiting: deque[list[Episode]] = deque()  # sampled by older weights
    walls, wall = {0: 0.0}, 0.0
    for step in range(steps):
        began = time.process_time()
        while len(waiting) <= staleness and step + len(waiting) < steps:
            number = step + len(waiting)
            prompts = [1_000_000 * seed + number * config.groups + i for i in range(config.groups)]
            waiting.append(sample(model, tokenizer, [each for each in prompts for _ in range(config.size)], draw))
        sampled = time.process_time()
        update(learner, waiting.popleft(), config, step)
        sample_s, step_s = sampled - began, time.process_time() - sampled
        wall += sample_s + step_s if not staleness or not step else max(sample_s, step_s)
        walls[step + 1] = round(wall, 2)
        if (step + 1) % every == 0 or step + 1 == steps:
            rewards[step + 1] = evaluate(model, tokenizer, held_out)
            print(f"seed {seed}, staleness {staleness}: held-out reward {rewards}", file=sys.stderr, flush=True)
    return {
        "seed": seed,
        "staleness": staleness,
        "fit_cpu_s": round(fit_s, 1) if fitted else None,
        "reward": rewards,
        "wall_s": walls,
        "before": rewards[0],
        "after": rewards[steps],
    }


def compared(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By staleness: mean reward at the end, its distance to the synchronous runs of the same seeds, and the wall time
    as a share of theirs."""
    found = {}
    for staleness in sorted({run["staleness"] for run in runs}):
        mine = [run for run in runs if run["staleness"] == staleness]
        line = {"after": sum(run["after"] for run in mine) / len(mine)}
        both = [
            (run, other) for run in mine for other in runs if other["staleness"] == 0 and other["seed"] == run["seed"]
        ]
        if both:
            line["minus_synchronous"] = sum(run["after"] - other["after"] for run, other in both) / len(both)
            line["wall_share"] = sum(max(run["wall_s"].values()) for run, _ in both) / sum(
                max(other["wall_s"].values()) for _, other in both
            )
        found[str(staleness)] = {name: round(value, 4) for name, value in line.items()}
    return found


def read(path: Path) -> list[dict[str, Any]]:
    """The runs of a file with what this printed: JSON makes names of steps."""
    runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"]
    for run in runs:
        for name in ("reward", "wall_s"):
            run[name] = {int(step): value for step, value in run[name].items()}
    return runs


def plot(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Held-out reward over wall time, one curve for each staleness."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for staleness in sorted({run["staleness"] for run in runs}):
        mine = [run for run in runs if run["staleness"] == staleness]
        steps = sorted(mine[0]["reward"])
        rewards = [[run["reward"][step] for run in mine] for step in steps]
        walls = [sum(run["wall_s"][step] for run in mine) / len(mine) for step in steps]
        means = [sum(each) / len(each) for each in rewards]
        (line,) = axes.plot(walls, means, marker=".", label=f"staleness {staleness}, {len(mine)} seeds")
        axes.fill_between(
            walls, [min(each) for each in rewards], [max(each) for each in rewards], color=line.get_color(), alpha=0.12
        )
    axes.set(xlabel="seconds, with a machine each for sampler and trainer", ylabel="held-out reward", ylim=(0, 1))
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    plt.close(figure)


def fresh_policy(seed: int) -> tuple[Qwen3, Tokenizer]:
    """One that was fitted for this seed, as the one in the tree was."""
    with tempfile.TemporaryDirectory() as folder:
        model = policy.make(Path(folder), WORDS, seed=seed)
        tokenizer = policy.load_tokenizer(Path(folder))
    fit.fit(model, tokenizer, seed=seed)
    return model, tokenizer


def update(learner: Learner, episodes: list[Episode], config: Config, step: int) -> None:
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
    learner.step(batch, rate=learning_rate(config.rate, step, config.steps))


def evaluate(model: Qwen3, tokenizer: Tokenizer, episodes: int) -> float:
    seeds = [HELD_OUT + i for i in range(episodes)]
    done = sample(model, tokenizer, seeds, torch.Generator().manual_seed(0))
    return sum(episode.reward for episode in done) / len(done)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pagurus bench recipe", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=Config(task=Path()).steps)
    parser.add_argument("--held-out", type=int, default=256)
    parser.add_argument("--staleness", type=int, nargs="+", default=[1], help="steps between sampling and training")
    parser.add_argument("--every", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--plot", type=Path, help="draw the curves to this file (.svg or .png)")
    parser.add_argument("--again", type=Path, nargs="+", help="figures that this printed before, instead of learning")
    parser.add_argument("--fit", action="store_true", help="fit a policy anew for each seed, which takes minutes")
    parser.add_argument("--json", action="store_true", help="one JSON object last")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    runs = [run for path in options.again or () for run in read(path)] or [
        learn(
            seed,
            steps=options.steps,
            held_out=options.held_out,
            fitted=options.fit,
            staleness=staleness,
            every=options.every,
        )
        for seed in options.seeds
        for staleness in options.staleness
    ]
    result = {
        "runs": runs,
        "before_max": max(run["before"] for run in runs),
        "after_min": min(run["after"] for run in runs),
        "by_staleness": compared(runs),
    }
    if options.plot is not None:
        plot(runs, options.plot)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
