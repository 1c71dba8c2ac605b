"""How the policy in ``start/`` was made: a fresh one learns from scripted episodes, clean ones first, then sloppy ones.

``python -m examples.fix_the_service.fit`` makes it again. That takes minutes, so the result lies beside this file and
runs begin with it. Owns: the loss of imitation, its schedule. Does not own: the scripts, the files of a policy.
Guarantee: a pure function of seed and recipe on one thread of one kind of processor.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from rollout.engine.embedded.model import Qwen3, save_model
from trainer.models import policy
from trainer.models.policy import END_ID

from .demonstrations import demonstrate
from .scenario import WORDS

START = Path(__file__).parent / "start"


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
    for step, batch in enumerate(_batches(tokenizer, seed, recipe)):
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


def _batches(tokenizer: Tokenizer, seed: int, recipe: Recipe) -> Iterator[list[tuple[list[int], list[bool]]]]:
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
    each = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    weight = weights[:, 1:].flatten()
    return (each * weight).sum() / weight.sum()


def make(folder: Path, *, seed: int = 0, recipe: Recipe | None = None) -> float:
    """Writes a fresh policy, fitted, to `folder`; the seconds of the fit. Weights lie there in half precision."""
    torch.set_num_threads(1)  # two threads make these small products many times slower

    def report(step: int, steps: int, loss: float) -> None:
        if step % 10 == 0:
            print(f"step {step}/{steps}: loss {loss:.3f}", flush=True)

    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        aside = Path(place) / "policy"
        model = policy.make(aside, WORDS, seed=seed)
        torch.manual_seed(seed)
        took = fit(model, policy.load_tokenizer(aside), seed=seed, recipe=recipe, report=report)
        save_model(model, aside, tensors={name: tensor.half() for name, tensor in model.state_dict().items()})
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    return took


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.fix_the_service.fit", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the demonstrations (default: 0)")
    parser.add_argument("--out", type=Path, default=START, help=f"folder of the policy (default: {START})")
    given = parser.parse_args()
    print(f"fitted in {make(given.out, seed=given.seed):.0f} s; the policy is in {given.out}")
