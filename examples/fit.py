"""How the policy in an example's ``start/`` was made: a fresh one learns from scripted episodes, clean ones first, then
sloppy ones.

``python -m examples.fit finish_the_migration`` makes it again. That takes minutes, so the result lies in the example
and runs begin with it. Owns: the loss of imitation, its schedule. Does not own: the scripts, the files of a policy.
Guarantee: a pure function of seed and recipe on one thread of one kind of processor.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from rollout.engine.embedded.model import Qwen3, save_model
from rollout.environments.base import Environment
from rollout.environments.directory import START
from rollout.environments.shell import TwinShell
from rollout.episode.nowhere import Nowhere
from trainer.models import policy
from trainer.models.policy import END_ID

DIRECTORY = Path(__file__).parent
EXAMPLES = ("fix_the_service", "finish_the_migration", "frozen_lake")


class Demonstrate(Protocol):
    """One scripted episode: its texts in order, True beside each that is an action."""

    def __call__(self, seed: int, *, sloppy: bool) -> list[tuple[str, bool]]: ...


@dataclass(frozen=True, slots=True)
class Example:
    """What a package below `examples` says of itself. Example: ``Example.of("fix_the_service").words``"""

    name: str
    environment: type[Environment]
    twin: type[TwinShell] | type[Nowhere]  # on which it runs without a sandbox
    words: Sequence[str]
    demonstrate: Demonstrate
    shape: policy.Shape

    @classmethod
    def of(cls, name: str) -> Example:
        loaded = importlib.import_module(f"examples.{name}")
        shape = policy.Shape(**getattr(loaded, "SHAPE", {}))
        return cls(name, loaded.ENVIRONMENT, loaded.Twin, loaded.WORDS, loaded.demonstrate, shape)

    @property
    def start(self) -> Path:
        """The policy that runs begin with."""
        return DIRECTORY / self.name / START


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How long and on what. Muon fits the matrices: on these short texts it learns to copy in a third of
    AdamW's steps; AdamW fits the embedding and the norms."""

    clean_steps: int = 190
    sloppy_steps: int = 60
    batch: int = 32
    matrix_rate: float = 0.02
    other_rate: float = 3e-3
    final_share: float = 0.1  # of both rates, reached linearly
    warmup: int = 20
    observed: float = 0.5  # weight of the tokens that the environment wrote, beside 1 for the agent's
    clean_share: float = 0.15  # of the demonstrations in the sloppy phase


def transcript(texts: Sequence[tuple[str, bool]], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Tokens of an episode and which of them the agent wrote; each action ends with END."""
    tokens: list[int] = []
    agent: list[bool] = []
    for text, action in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if action:
            ids = [*ids, END_ID]
        tokens += ids
        agent += [action] * len(ids)
    return tokens, agent


def fit(
    model: Qwen3,
    tokenizer: Tokenizer,
    demonstrate: Demonstrate,
    *,
    seed: int,
    recipe: Recipe | None = None,
    report: Callable[[int, int, float], None] | None = None,
) -> float:
    """Fits `model` in place; returns the seconds it took. `report(step, steps, loss)` after each step."""
    recipe = recipe or Recipe()
    started = time.monotonic()
    steps = recipe.clean_steps + recipe.sloppy_steps
    optimisers = _optimisers(model, recipe)
    for step, batch in enumerate(_batches(tokenizer, demonstrate, seed, recipe)):
        share = min(1.0, (step + 1) / recipe.warmup) * max(recipe.final_share, 1 - step / steps)
        loss = _loss(model, batch, recipe.observed)
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser, rate in optimisers:
            optimiser.param_groups[0]["lr"] = rate * share
            optimiser.step()
        if report is not None:
            report(step + 1, steps, float(loss.detach()))
    return time.monotonic() - started


def _batches(
    tokenizer: Tokenizer, demonstrate: Demonstrate, seed: int, recipe: Recipe
) -> Iterator[list[tuple[list[int], list[bool]]]]:
    """Each demonstration has a scenario of its own, drawn from seeds that no rollout uses (negative ones)."""
    number = seed * 1_000_003
    for step in range(recipe.clean_steps + recipe.sloppy_steps):
        late = step >= recipe.clean_steps
        batch = []
        for i in range(recipe.batch):
            number += 1
            sloppy = late and i >= recipe.batch * recipe.clean_share
            batch.append(transcript(demonstrate(-number, sloppy=sloppy), tokenizer))
        yield batch


def _optimisers(model: Qwen3, recipe: Recipe) -> list[tuple[torch.optim.Optimizer, float]]:
    named = list(model.named_parameters())
    matrices = [weight for name, weight in named if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in named if weight.ndim != 2 or "embed" in name]
    return [
        (torch.optim.Muon(matrices, lr=recipe.matrix_rate, momentum=0.95, weight_decay=0.01), recipe.matrix_rate),
        (torch.optim.AdamW(others, lr=recipe.other_rate, betas=(0.9, 0.98), weight_decay=0.01), recipe.other_rate),
    ]


def _loss(model: Qwen3, batch: list[tuple[list[int], list[bool]]], observed: float) -> Tensor:
    longest = max(len(tokens) for tokens, _ in batch)
    tokens = torch.zeros(len(batch), longest, dtype=torch.long)
    weights = torch.zeros(len(batch), longest)
    for row, (ids, agent) in enumerate(batch):
        tokens[row, : len(ids)] = torch.tensor(ids)
        weights[row, : len(ids)] = torch.where(torch.tensor(agent), 1.0, observed)
    logits = model(tokens[:, :-1])
    item = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    weight = weights[:, 1:].flatten()
    return (item * weight).sum() / weight.sum()


def make(example: Example, directory: Path, *, seed: int = 0, recipe: Recipe | None = None) -> float:
    """Writes a fresh policy, fitted, to `directory`; the seconds of the fit. Weights lie there in half precision."""
    torch.set_num_threads(1)  # two threads make these small products many times slower

    def report(step: int, steps: int, loss: float) -> None:
        if step % 10 == 0:
            print(f"step {step}/{steps}: loss {loss:.3f}", flush=True)

    with tempfile.TemporaryDirectory(dir=directory.parent) as place:
        aside = Path(place) / "policy"
        model = policy.make(aside, example.words, seed=seed, shape=example.shape)
        torch.manual_seed(seed)
        took = fit(model, policy.load_tokenizer(aside), example.demonstrate, seed=seed, recipe=recipe, report=report)
        save_model(model, aside, tensors={name: tensor.half() for name, tensor in model.state_dict().items()})
        shutil.rmtree(directory, ignore_errors=True)
        aside.rename(directory)
    return took


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.fit", description=__doc__.split("\n\n")[0])
    parser.add_argument("example", choices=EXAMPLES)
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the demonstrations (default: 0)")
    parser.add_argument("--out", type=Path, help="folder of the policy (default: start/ of the example)")
    given = parser.parse_args()
    chosen = Example.of(given.example)
    target = given.out or chosen.start
    print(f"fitted in {make(chosen, target, seed=given.seed):.0f} s; the policy is in {target}")
