"""How evenly experts are used: the published formula, of each trajectory, and a loss that makes it so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sandbox.errors import Invalid
from tests.support.families import build
from tests.support.meshes import micro_batch
from tests.trainer.test_learner import model, samples
from trainer.batches.pack import pack
from trainer.batches.sample import Sample
from trainer.learner import Learner
from trainer.models.load import load
from trainer.models.scorer import Scorer
from trainer.objectives import build as objective
from trainer.settings import ObjectiveSettings, OptimiserSettings


def expected(scorer: Scorer, tokens: list[int], scoring: str) -> float:
    """Of one trajectory by itself, token by token."""
    routes: list[tuple[Tensor, Tensor]] = []
    hooks = [
        module.register_forward_hook(lambda _, given, result: routes.append((result[0], result[2])))
        for name, module in scorer.model.named_modules()
        if name.endswith("mlp.gate")
    ]
    one = Sample(tokens=tokens, mask=[0] + [1] * (len(tokens) - 1), logprobs=[0.0] * len(tokens))
    with torch.no_grad():
        scorer(pack([one]))
    for hook in hooks:
        hook.remove()
    result = []
    for logits, index in routes:
        count, experts, chosen = len(tokens), logits.shape[1], index.shape[1]
        total = 0.0
        for expert in range(experts):
            times = sum(expert in row for row in index.tolist()) * experts / (chosen * count)
            shares = [row.sigmoid() / row.sigmoid().sum() if scoring == "sigmoid" else row.softmax(0) for row in logits]
            total += times * float(sum(share[expert] for share in shares)) / count
        result.append(total)
    return sum(result) / len(result)


@pytest.mark.parametrize(("family", "scoring"), [("qwen3_moe", "softmax"), ("deepseek_v3", "sigmoid")])
def test_it_is_of_each_trajectory_by_itself(family: str, scoring: str, tmp_path: Path) -> None:
    scorer = Scorer(load(build(family, tmp_path / family)), balance=True)
    packed = micro_batch(0, scorer.vocabulary)
    balance = scorer(packed).balance
    assert balance is not None and balance.shape == packed.targets.shape
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, scorer.vocabulary, (64,), generator=generator).tolist()
    trajectories = [tokens[:9] + tokens[20:26], tokens[:9] + tokens[30:35], tokens[40:53]]
    exact = torch.tensor([expected(scorer, item, scoring) for item in trajectories])
    assert torch.allclose(balance, exact[packed.sequence], rtol=1e-5)


def trained(directory: Path, *, budget: int, balance: float) -> tuple[Tensor, list[float]]:
    """The change of all weights by two plain steps, and how evenly experts were used before each."""
    scorer = Scorer(load(directory), balance=True)
    before = torch.cat([parameter.detach().flatten() for parameter in scorer.parameters()])
    chosen = objective(ObjectiveSettings(preset="dapo", balance=balance))
    learner = Learner(scorer, chosen, OptimiserSettings(budget=budget))
    learner.optimisers = [torch.optim.SGD(scorer.parameters(), lr=1.0)]
    evenness = [learner.step(samples(0), rate=0.05).summary.balance for _ in range(2)]
    return torch.cat([parameter.detach().flatten() for parameter in scorer.parameters()]) - before, evenness


def test_its_gradient_does_not_depend_on_packing_and_has_experts_used_evenly(tmp_path: Path) -> None:
    directory = build("qwen3_moe", tmp_path / "moe")
    small, evenness = trained(directory, budget=24, balance=10.0)
    large, again = trained(directory, budget=4096, balance=10.0)
    assert torch.allclose(small, large, rtol=1e-3, atol=1e-6)
    assert evenness == pytest.approx(again) and evenness[0] > evenness[1] > 1.0
    without, _ = trained(directory, budget=4096, balance=0.0)
    assert not torch.allclose(large, without, rtol=1e-2, atol=1e-4)


def test_a_model_without_known_routers_is_refused() -> None:
    with pytest.raises(Invalid, match="routers are known, not a qwen3"):
        Scorer(model(), balance=True)


def test_a_row_that_divides_late_needs_the_complete_batch() -> None:
    settings: dict[str, Any] = {"preset": "pooled"}
    assert objective(ObjectiveSettings(**settings)).streams
    assert not objective(ObjectiveSettings(**settings, balance=0.1)).streams
