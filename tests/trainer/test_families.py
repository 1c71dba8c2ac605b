"""What the trajectories of a group begin with alike is read once: the same scores, gradients and steps."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.small_model import CONFIG, model
from trainer.batches.pack import PackedBatch, pack
from trainer.batches.plan import MIN_PREFIX, common, families
from trainer.batches.sample import Sample
from trainer.learner import Learner
from trainer.models import attention
from trainer.models.attention import attend
from trainer.models.scorer import Scorer
from trainer.objectives import OBJECTIVES
from trainer.settings import OptimiserSettings


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def related(seed: int, *, groups: int = 3, size: int = 4, prefix: int = 24) -> list[Sample]:
    """Groups of which all begin with the same prompt, in which one token was sampled."""
    rng = random.Random(seed)
    made = []
    for group in range(groups):
        prompt = [rng.randrange(CONFIG.vocab_size) for _ in range(prefix)]
        for _ in range(size):
            own = [rng.randrange(CONFIG.vocab_size) for _ in range(rng.randrange(2, 9))]
            mask = [0] * (prefix - 1) + [1] + [1] * len(own)
            made.append(
                Sample(
                    tokens=[*prompt, *own], mask=mask, logprobs=[-rng.random() * 6 * bit for bit in mask],
                    group=f"p{group}", reward=float(rng.randrange(2)),
                )
            )  # fmt: skip
    return made


def packed_families(batch: list[Sample], **options: int) -> PackedBatch:
    made = families([item.tokens for item in batch], [item.group for item in batch], **{"budget": 1 << 20, **options})
    rows = [batch[index] for one in made for index in one.members]
    assert rows == batch
    return pack(rows, [(len(one.members), one.prefix) for one in made])


@pytest.mark.parametrize("minimum", [1, 7, 12])
def test_a_beginning_that_is_read_once_gives_the_same_scores(minimum: int) -> None:
    policy, batch = Scorer(model()), related(0)
    shared, apart = packed_families(batch, minimum=minimum), pack(batch)
    assert len(shared.tokens) < len(apart.tokens) or minimum == 12
    assert shared.targets.tolist() == apart.targets.tolist()
    with torch.no_grad():
        assert torch.allclose(policy(shared).new, policy(apart).new, atol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 5, 23, 24, 25, 40])
@pytest.mark.parametrize("entries", [1, 100, attention.MAX_MASK])
def test_attention_sees_the_beginning_within_its_window(
    window: int | None, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "MAX_MASK", entries)
    batch = related(1, groups=1)
    shared, apart = packed_families(batch), pack(batch)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(len(apart.tokens), heads, 6, generator=generator) for heads in (4, 2, 2))
    prefix = shared.lengths[0]
    ends = list(accumulate(apart.lengths))
    starts = [0, *ends[:-1]]
    for part in (q, k, v):  # equal where tokens are
        for start in starts:
            part[start : start + prefix] = part[:prefix]
    own = torch.cat([torch.arange(prefix)] + [
        torch.arange(start + prefix, start + length) for start, length in zip(starts, apart.lengths, strict=True)
    ])  # fmt: skip
    result = attend(q[own], k[own], v[own], shared.runs, window=window)
    assert torch.allclose(result, attend(q, k, v, apart.runs, window=window)[own], atol=1e-5)
    runs = shared.runs
    assert torch.equal(k[own][runs.indices], torch.cat([k[:prefix], k])) and max(runs.keys) == max(apart.lengths)
    assert runs.bounds[1].tolist() == [0, prefix, *(prefix + end for end in ends)]
    assert apart.runs.plain and not runs.plain


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "ppo"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_is_the_same_when_beginnings_are_read_once(name: str, recompute: bool) -> None:
    batch, results = related(2), []
    for shares in (True, False):
        policy = Scorer(model(), recompute=recompute, shares=shares, critic=OBJECTIVES[name].value is not None)
        other = Scorer(model(5), shares=shares)
        stats = Learner(policy, OBJECTIVES[name], OptimiserSettings(budget=90), reference=other).step(batch)
        results.append((stats, [parameter.detach().clone() for parameter in policy.parameters()]))
    (shared, ours), (apart, theirs) = results
    assert shared.forward_tokens < apart.forward_tokens and shared.batch_tokens == apart.batch_tokens
    assert shared.grad_norm == pytest.approx(apart.grad_norm, rel=1e-5)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_beginnings_are_read_once_in_half_precision_too() -> None:
    batch = related(3)
    stats = Learner(Scorer(model(), bf16=True), OBJECTIVES["dr_grpo"]).step(batch)
    assert stats.forward_tokens < 0.8 * stats.batch_tokens and stats.computed == len(batch)


@given(
    st.lists(st.tuples(st.sampled_from(["", "a", "b", "c"]), st.integers(0, 40), st.integers(1, 30)), max_size=14),
    st.integers(20, 200),
    st.integers(1, 12),
)
def test_families_have_every_trajectory_once(items: list[tuple[str, int, int]], budget: int, minimum: int) -> None:
    groups = [group for group, _, _ in items]
    tokens = [[ord(group or "z")] * alike + [index] * own for index, (group, alike, own) in enumerate(items)]
    made = families(tokens, groups, budget=budget, minimum=minimum)
    assert sorted(index for one in made for index in one.members) == list(range(len(items)))
    assert len(made) >= min(minimum, len(items))
    lengths = [len(item) for item in tokens]
    for one in made:
        together = [tokens[index] for index in one.members]
        assert one.prefix == 0 or (len(together) > 1 and common(together) >= one.prefix >= MIN_PREFIX)
        assert one.prefix < min(map(len, together)) and len({groups[index] for index in one.members}) == 1
        assert one.size(lengths) <= budget or len(one.members) == 1
        assert len(one.members) == 1 or groups[one.members[0]]
