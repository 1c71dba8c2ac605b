"""Batches and steps: plans, packed tensors, refusals, and that a step is the same however a batch is cut."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollout.engine.embedded.model import Qwen3
from rollout.messages import Batch, Group
from sandbox.errors import NotFound
from tests.support.small_model import CONFIG, model
from trainer.batches.pack import pack
from trainer.batches.plan import cost, plan
from trainer.batches.sample import Sample, SampleLog, accepted, episodes, refusal
from trainer.errors import TrainerFailed
from trainer.learner import Learner, rewards_of
from trainer.models.logprobs import logprobs
from trainer.models.scorer import Scorer
from trainer.objectives import OBJECTIVES, Metrics, Objective, bounded, credit, named, with_corrections
from trainer.settings import OptimiserSettings
from trainer.stream import BatchStream

LENGTH = 32


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def samples(seed: int, *, groups: int = 3, size: int = 3, temperature: float = 1.0) -> list[Sample]:
    rng = random.Random(seed)
    made = []
    for group in range(groups):
        for member in range(size):
            tokens = [rng.randrange(CONFIG.vocab_size) for _ in range(rng.randrange(5, 20))]
            mask = [0, 0] + [rng.randrange(2) for _ in tokens[3:]] + [1]
            made.append(
                Sample(
                    tokens=tokens, mask=mask, logprobs=[-rng.random() * 6 * bit for bit in mask], group=f"p{group}",
                    reward=0.5 if group == 1 else float(member % 2), temperature=temperature, name=f"p{group}/{member}",
                )
            )  # fmt: skip
    return made


def gradient(
    batch: list[Sample],
    objective: Objective,
    *,
    budget: int = 4096,
    fed: int = 0,
    recompute: bool = False,
    policy: Qwen3 | None = None,
) -> Tensor:
    """The change of all weights by one plain step of size 1 (no Adam): minus the gradient."""
    policy = policy or model()
    before = flat(policy)
    wanted = objective.kl is not None or objective.advantage.baseline == "teacher"
    reference = Scorer(model(9)) if wanted else None
    scorer = Scorer(policy, recompute=recompute, critic=objective.value is not None)
    learner = Learner(scorer, objective, OptimiserSettings(budget=budget, max_norm=1e9), reference=reference)
    learner.optimisers = [torch.optim.SGD(learner.trained, lr=1.0)]
    learner.begin()
    for at in range(0, len(batch), fed or len(batch)):
        learner.feed(batch[at : at + (fed or len(batch))])
    learner.finish(rate=1.0)
    return flat(policy) - before


def flat(policy: Qwen3) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in policy.parameters()]).double()


def close(left: Tensor, right: Tensor) -> bool:
    return bool((left - right).norm() <= 1e-5 * right.norm()) and bool(right.norm() > 0)


# ------------------------------------------------------------------ plans


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(1, 1000), st.integers(1, 4))
def test_every_trajectory_is_planned_once_within_the_budget(lengths: list[int], budget: int, ranks: int) -> None:
    rounds = plan(lengths, budget=budget, ranks=ranks)
    assert all(len(one) == ranks for one in rounds)
    batches = [batch for one in rounds for batch in one]
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) <= 1 or sum(lengths[i] for i in batch) <= budget


@given(st.lists(st.integers(1, 64), min_size=40, max_size=80), st.integers(2, 4))
def test_ranks_of_a_round_have_about_the_same_to_do(lengths: list[int], ranks: int) -> None:
    for one in plan(lengths, budget=512, ranks=ranks, width=64):
        costs = [sum(cost(lengths[i], 64) for i in batch) for batch in one]
        assert max(costs) - min(costs) <= 2 * cost(64, 64)


def test_plan_example() -> None:
    assert plan([3, 9, 4], budget=10) == [[[1]], [[2, 0]]]
    assert plan([], budget=10) == []


def test_with_a_multiple_any_number_of_ranks_that_divides_it_has_the_same_micro_batches() -> None:
    lengths = [(7 * n) % 90 + 3 for n in range(21)]
    bins = [
        sorted(tuple(one) for round_ in plan(lengths, budget=120, ranks=ranks, multiple=8) for one in round_ if one)
        for ranks in (1, 2, 4, 8)
    ]
    assert all(one == bins[0] for one in bins) and len(bins[0]) % 8 == 0


# ------------------------------------------------------------------ tensors


def test_packed_trajectories_do_not_see_each_other() -> None:
    """Bit by bit the same scores whatever tokens stand beside a trajectory; alone, the same up to rounding."""
    policy, batch = Scorer(model()), samples(0)
    with torch.no_grad():
        together = policy(pack(batch)).new.split([item.sampled for item in batch])
        for item, scores in zip(batch, together, strict=True):
            assert torch.allclose(policy(pack([item])).new, scores, atol=1e-5)
            changed = [with_other_tokens(other) if other is not item else other for other in batch]
            at = batch.index(item)
            again = policy(pack(changed)).new.split([other.sampled for other in changed])
            assert torch.equal(again[at], scores)


def with_other_tokens(sample: Sample) -> Sample:
    """Other tokens, the same shape."""
    tokens = [(token + 7) % CONFIG.vocab_size for token in sample.tokens]
    return Sample(tokens=tokens, mask=sample.mask, logprobs=sample.logprobs, group=sample.group)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_scores_are_log_softmax_at_the_samples_own_temperature(temperature: float) -> None:
    policy, batch = model(), samples(1, temperature=temperature)
    scores = Scorer(policy)(pack(batch)).new.split([item.sampled for item in batch])
    for item, result in zip(batch, scores, strict=True):
        logits = policy(torch.tensor([item.tokens[:-1]]))[0] / temperature
        logs = torch.log_softmax(logits, -1)
        expected = [
            logs[t - 1, token] for t, (token, bit) in enumerate(zip(item.tokens, item.mask, strict=True)) if bit
        ]
        assert torch.allclose(result, torch.stack(expected), atol=1e-5)


def test_samples_of_two_temperatures_share_a_micro_batch() -> None:
    batch = samples(1)[:1] + samples(1, temperature=0.5)[1:2]
    scores = Scorer(model())
    both = scores(pack(batch)).new
    assert torch.allclose(both, torch.cat([scores(pack([item])).new for item in batch]), atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 130, 1 << 24])
def test_logprobs_in_chunks_have_the_gradient_of_log_softmax(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 5, generator=generator, dtype=torch.float64).requires_grad_()
    head = torch.randn(40, 5, generator=generator, dtype=torch.float64).requires_grad_()
    targets, warmth = torch.arange(9), torch.linspace(0.5, 2, 9).double()
    weights = torch.randn(9, generator=generator, dtype=torch.float64)
    result, entropy = logprobs(hidden, head, targets, warmth, chunk=chunk)
    plain = torch.log_softmax(hidden @ head.T / warmth[:, None], -1)
    assert torch.allclose(result, plain.gather(-1, targets[:, None])[:, 0])
    assert torch.allclose(entropy, -(plain.exp() * plain).sum(-1))
    ours = torch.autograd.grad((result * weights).sum(), (hidden, head))
    theirs = torch.autograd.grad((plain.gather(-1, targets[:, None])[:, 0] * weights).sum(), (hidden, head))
    assert all(torch.allclose(left, right) for left, right in zip(ours, theirs, strict=True))
    torch.autograd.gradcheck(lambda h, w: logprobs(h, w, targets, warmth, chunk=chunk)[0], (hidden, head))


def test_a_large_vocabulary_is_never_held_for_a_whole_batch() -> None:
    """The largest tensor of floats that is made has `chunk` numbers, forwards and backwards."""
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.is_floating_point():
                sizes.append(result.numel())
            return result

    hidden, head = torch.randn(64, 4, requires_grad=True), torch.randn(5000, 4, requires_grad=True)
    with Watch():
        collected, _ = logprobs(hidden, head, torch.zeros(64).long(), torch.ones(64), chunk=40_000)
        collected.sum().backward()
    assert max(sizes) == 40_000 < 64 * 5000


# ------------------------------------------------------------------ steps


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_a_step_is_the_same_however_it_is_packed_and_ordered(name: str) -> None:
    objective, batch = named(name, length=LENGTH), samples(2)
    complete = gradient(batch, objective)
    assert close(gradient(batch, objective, budget=1), complete)  # one trajectory at a time
    assert close(gradient(batch, objective, budget=50), complete)
    shuffled = random.Random(0).sample(batch, len(batch))
    assert close(gradient(shuffled, objective), complete)
    assert close(gradient(batch, objective, recompute=True), complete)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_groups_fed_as_they_complete_make_the_same_step(name: str) -> None:
    objective, batch = named(name, length=LENGTH), samples(3)
    assert close(gradient(batch, objective, fed=3), gradient(batch, objective))


@pytest.mark.parametrize("fate", ["all there", "one replaced", "one cut"])
async def test_what_was_computed_early_counts_only_if_the_batch_holds_it(fate: str) -> None:
    """A batch that is handed out as it was seen costs only its rest; any other is computed from the beginning."""
    observed = {item.group: [other for other in samples(3) if other.group == item.group] for item in samples(3)}
    handed = dict(observed)
    if fate == "one replaced":
        handed["p9"] = [replaced(item, group="p9") for item in handed.pop("p0")]
    if fate == "one cut":
        handed["p0"] = [replaced(item, mask=[0] * len(item.mask)) for item in handed["p0"]]

    class Source:
        def __init__(self) -> None:
            self.polls, self.enough = 0, asyncio.Event()

        async def next_batch(self) -> Batch:
            await self.enough.wait()
            return as_batch(list(handed))

        async def complete(self, without: Collection[str]) -> Batch:
            self.polls += 1
            if self.polls == 3:
                self.enough.set()
            return as_batch([name for name in list(observed)[: self.polls - 1] if name not in without])

    def as_batch(names: list[str]) -> Batch:
        return Batch(version=1, groups=[Group(prompt=name, seed=0, trajectories=[]) for name in names])

    def content(batch: Batch) -> list[Sample]:
        source = handed if len(batch.groups) == len(handed) else observed
        return [sample for group in batch.groups for sample in source[group.prompt]]

    streamed, plain = (Learner(Scorer(model()), named("pooled")) for _ in range(2))
    takes = SimpleNamespace(streams=streamed.streams, expect=streamed.begin, feed=streamed.feed)
    batch = await BatchStream(Source(), takes, content).next_batch()
    stats = streamed.complete(content(batch), rate=1e-3)
    plain.step(content(batch), rate=1e-3)
    assert (stats.hidden_s > 0) == (fate == "all there")
    ours, theirs = (flat(item.scorer.model) for item in (streamed, plain))  # type: ignore[arg-type]
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


def test_most_objectives_compute_while_groups_come_in() -> None:
    assert {name for name, row in OBJECTIVES.items() if not row.streams} == {"distill", "ppo", "reinforce++"}
    batch = samples(0)
    learner = Learner(Scorer(model()), named("pooled"))
    learner.begin()
    learner.feed(batch[:3])
    assert any(parameter.grad is not None for parameter in learner.trained)


def test_the_gradient_is_that_of_plain_autograd_over_padded_logits() -> None:
    """GSPO and TIS, from padded logits and formulas written here, against the learner's packed way."""
    batch = [item for item in samples(4) if item.group != "p1"]
    policy = model()
    total = torch.zeros(())
    for item in batch:
        peers = [other.reward for other in batch if other.group == item.group]
        spread = torch.tensor(peers).std()
        advantage = (item.reward - sum(peers) / len(peers)) / (spread + 1e-6)
        logs = torch.log_softmax(policy(torch.tensor([item.tokens[:-1]]))[0], -1)
        at = [t for t, bit in enumerate(item.mask) if bit]
        new = torch.stack([logs[t - 1, item.tokens[t]] for t in at])
        k = (new.detach() - torch.tensor([item.logprobs[t] for t in at])).exp().clamp(max=2.0)
        ratio = (new - new.detach()).mean().exp()
        total = total + (-ratio * advantage * k).mean() / len(batch)
    expected = torch.cat([part.flatten() for part in torch.autograd.grad(total, list(policy.parameters()))])
    assert close(gradient(batch, with_corrections(named("gspo"), ["tis"])), -expected.double())


def test_tokens_of_the_environment_bear_no_gradient() -> None:
    """Their log-probabilities may be anything, and their logits never enter the loss."""
    batch = samples(5)
    noisy = []
    for item in batch:
        logs = [value if bit else -9.9 for value, bit in zip(item.logprobs, item.mask, strict=True)]
        noisy.append(replaced(item, logprobs=logs))
    assert torch.equal(gradient(noisy, named("dapo")), gradient(batch, named("dapo")))
    last = batch[0].tokens
    longer = replaced(
        batch[0], tokens=[*last, 3, 4, 5], mask=[*batch[0].mask, 0, 0, 0], logprobs=[*batch[0].logprobs, 0.0, 0.0, 0.0]
    )
    assert close(gradient([longer, *batch[1:]], named("dapo")), gradient(batch, named("dapo")))


def replaced(sample: Sample, **changes: object) -> Sample:
    import msgspec

    return msgspec.structs.replace(sample, **changes)


def test_several_updates_of_a_batch_hold_on_to_the_policy_before_it() -> None:
    """Decoupled PPO: with two updates the proximal policy is the one before both."""
    batch = samples(6, groups=4)
    policy = model()
    objective = with_corrections(named("pooled"), ["decoupled"])
    learner = Learner(Scorer(policy), objective, OptimiserSettings(updates=2, rate=3e-2))
    observed: list[Tensor] = []
    loss = Objective.loss

    def spy(self: Objective, tokens: object, metrics: Metrics) -> Tensor:
        observed.append((tokens.new.detach() - tokens.proximal).abs().max())  # type: ignore[attr-defined]
        return loss(self, tokens, metrics)  # type: ignore[arg-type]

    Objective.loss = spy  # type: ignore[method-assign]
    try:
        stats = learner.step(batch)
    finally:
        Objective.loss = loss  # type: ignore[method-assign]
    assert observed[0] < 1e-6 < observed[-1]
    assert stats.trajectories == 12


def test_a_step_makes_good_tokens_likelier_and_counts_what_it_did() -> None:
    policy, batch = model(), samples(7)
    with torch.no_grad():  # on policy
        before = Scorer(policy)(pack(batch)).new.split([item.sampled for item in batch])
    own = []
    for item, logs in zip(batch, before, strict=True):
        values = iter(logs.tolist())
        own.append(replaced(item, logprobs=[next(values) if bit else 0.0 for bit in item.mask]))
    stats = Learner(Scorer(policy), named("pooled"), OptimiserSettings(rate=1e-3)).step(own)
    assert (stats.trajectories, stats.computed, stats.silent) == (9, 6, 3)
    assert stats.summary.mismatch_kl == pytest.approx(0.0, abs=1e-6)
    assert stats.summary.ess == pytest.approx(1.0, abs=1e-4)
    assert stats.summary.clipped_low == stats.summary.clipped_high == 0.0
    assert stats.summary.tokens == sum(item.sampled for item in own if item.group != "p1")
    assert set(stats.lengths) == {"better", "worse"}
    with torch.no_grad():
        after = Scorer(policy)(pack(own)).new.split([item.sampled for item in own])
    for item, old, new in zip(own, before, after, strict=True):
        if item.group != "p1":
            assert (new.mean() > old.mean()) == (item.reward > 0.5)


def test_a_batch_that_says_nothing_changes_nothing() -> None:
    policy = model()
    before = flat(policy)
    stats = Learner(Scorer(policy), named("pooled")).step([item for item in samples(0) if item.group == "p1"])
    assert (stats.computed, stats.silent) == (0, 3)
    assert torch.equal(flat(policy), before)


# ------------------------------------------------------------------ numbers that are none


BROKEN = {
    "logprob not finite": {"logprobs": [0.0, float("-inf")]},
    "logprob above 0": {"logprobs": [0.0, 0.5]},
    "reward not finite": {"reward": float("nan")},
    "lists of different lengths": {"mask": [0]},
    "first token sampled from nothing": {"mask": [1, 1]},
    "token outside the vocabulary": {"tokens": [1, 40]},
    "temperature not a number from 0 up": {"temperature": float("inf")},
    "sampled with top_p or top_k: its logprobs are of another distribution than the policy's": {"complete": False},
}
COMPLETE = Sample(tokens=[1, 2], mask=[0, 1], logprobs=[0.0, -0.5])


@pytest.mark.parametrize("reason", sorted(BROKEN))
def test_broken_samples_are_refused_with_a_reason(reason: str) -> None:
    assert refusal(COMPLETE, 40) is None
    broken = replaced(COMPLETE, **BROKEN[reason])
    assert refusal(broken, 40) == reason
    assert accepted([COMPLETE, broken], 40) == ([COMPLETE], [("", reason)])


@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
def test_one_infinite_logprob_does_not_reach_the_weights(value: float) -> None:
    batch = samples(8)
    at = batch[0].mask.index(1)
    spoilt = replaced(batch[0], logprobs=[*batch[0].logprobs[:at], value, *batch[0].logprobs[at + 1 :]])
    policy = model()
    stats = Learner(Scorer(policy), named("pooled")).step([spoilt, *batch[1:]])
    assert stats.refused == {"logprob not finite": 1}
    assert torch.isfinite(flat(policy)).all()
    before = flat(policy)
    stats = Learner(Scorer(policy), named("pooled")).step([spoilt])
    assert stats.put_aside == {spoilt.name: "logprob not finite"} and torch.equal(flat(policy), before)


def test_a_gradient_that_is_not_finite_stops_the_step_before_the_weights_change() -> None:
    policy = model()
    learner = Learner(Scorer(policy), named("pooled"))
    before = flat(policy)
    learner.trained[0].register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(TrainerFailed, match=r"embed_tokens.*weights are as they were"):
        learner.step(samples(9))
    assert torch.equal(flat(policy), before)


def test_weights_that_are_not_finite_after_a_step_are_an_error() -> None:
    learner = Learner(Scorer(model()), named("pooled"))
    with pytest.raises(TrainerFailed, match="not kept"):
        learner.step(samples(9), rate=float("nan"))


# ------------------------------------------------------------------ the log of batches


def test_batches_are_read_as_they_were_written(tmp_path: Path) -> None:
    log, batch = SampleLog(tmp_path / "log"), samples(1)
    log.write(4, batch)
    assert log.read(4) == batch
    assert log.steps() == [4]
    with pytest.raises(NotFound, match="step 5"):
        log.read(5)


def test_a_student_comes_nearer_to_its_teacher() -> None:
    """The exact reverse KL over the vocabulary, on what the student samples anew before each step."""
    student, teacher = model(1), model(2)
    scorer, reference = Scorer(student), Scorer(teacher)
    learner = Learner(scorer, named("distill"), OptimiserSettings(rate=2e-2), reference=reference)
    apart = []
    for step in range(12):
        batch = [sampled_by(scorer, torch.Generator().manual_seed(64 * step + n)) for n in range(24)]
        apart.append(sum(reverse_kl(scorer, reference, item) for item in batch))
        learner.step(batch)
    assert apart[-1] < 0.6 * apart[0]
    with pytest.raises(TrainerFailed, match="needs a teacher"):
        Learner(scorer, named("distill"))


@torch.no_grad()
def logits_of(scorer: Scorer, tokens: list[int]) -> Tensor:
    packed = pack([Sample(tokens=tokens, mask=[0] * len(tokens), logprobs=[0.0] * len(tokens))])
    return (scorer.hidden(packed) @ scorer.head().T).log_softmax(-1)


def sampled_by(scorer: Scorer, draw: torch.Generator, length: int = 10) -> Sample:
    tokens, logs = [5], [0.0]
    for _ in range(length):
        chances = logits_of(scorer, tokens)[-1]
        tokens.append(int(torch.multinomial(chances.exp(), 1, generator=draw)))
        logs.append(float(chances[tokens[-1]]))
    return Sample(tokens=tokens, mask=[0] + [1] * length, logprobs=logs, group="g")


def reverse_kl(scorer: Scorer, reference: Scorer, sample: Sample) -> float:
    ours, theirs = logits_of(scorer, sample.tokens), logits_of(reference, sample.tokens)
    return float((ours.exp() * (ours - theirs)).sum())


# ------------------------------------------------------------------ episodes in pieces


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_an_episode_counts_once_however_many_pieces_it_is_in(name: str) -> None:
    """Two of four earn 1: pieces of one must not move the mean, the deviation or anybody's weight."""
    complete = [replaced(item, group="p", reward=float(n % 2)) for n, item in enumerate(samples(3, groups=1, size=4))]
    nothing = Sample(tokens=[4, 5], mask=[0, 0], logprobs=[0.0, 0.0])
    pieces = [
        replaced(piece, group="p", reward=item.reward, episode=f"p/{n}")
        for n, item in enumerate(complete)
        for piece in ([item, nothing, nothing] if n == 1 else [item])
    ]
    assert episodes(pieces) == [0, 1, 1, 1, 2, 3]
    result = gradient(pieces, named(name, length=LENGTH))
    assert torch.allclose(result, gradient(complete, named(name, length=LENGTH)), rtol=1e-4, atol=1e-7)


def test_pieces_share_the_weight_of_their_episode() -> None:
    long, other = samples(3, groups=1, size=2)
    first, second = (replaced(item, group="p", reward=1.0, episode="p/0") for item in samples(5, groups=1, size=2))
    batch = [first, second, *(replaced(item, group="p", reward=0.0) for item in (long, other))]
    rewards = rewards_of(batch)
    assert rewards.rewards.tolist() == [1.0, 0.0, 0.0]
    assert rewards.lengths.tolist() == [first.sampled + second.sampled, long.sampled, other.sampled]
    earned = credit(named("grpo"), rewards)
    of_first = earned.share[: first.sampled + second.sampled].sum()
    assert float(of_first) == pytest.approx(1.0) and earned.counts.sequences == 3


# ------------------------------------------------------------------ one strange token


def shaped(name: str, corrections: list[str]) -> Objective:
    return with_corrections(bounded(named(name, length=LENGTH)), corrections)


@pytest.mark.parametrize("reported", [-12.0, -95.0])
@pytest.mark.parametrize("corrections", [[], ["decoupled"], ["tis"], ["icepop"]])
@pytest.mark.parametrize("name", ["pooled", "grpo", "dapo", "cispo"])
def test_one_token_is_not_the_whole_gradient(name: str, corrections: list[str], reported: float) -> None:
    clean = engines_own(samples(11, groups=6, size=4))
    number = next(n for n, item in enumerate(clean) if item.reward == 0.0)  # PPO's clip does not bound it
    at = clean[number].mask.index(1)
    logprobs = [reported if t == at else value for t, value in enumerate(clean[number].logprobs)]
    strange = [*clean[:number], replaced(clean[number], logprobs=logprobs), *clean[number + 1 :]]
    one, other = (gradient(batch, shaped(name, corrections)) for batch in (clean, strange))
    assert torch.isfinite(other).all()
    assert torch.nn.functional.cosine_similarity(one, other, dim=0) > 0.8
    assert 0.5 < other.norm() / one.norm() < 2.0


def test_the_share_of_the_steepest_token_is_logged() -> None:
    clean = engines_own(samples(11, groups=6, size=4))
    stats = Learner(Scorer(model()), shaped("pooled", [])).step(clean)
    tokens = stats.summary.tokens
    assert 1 / tokens <= stats.summary.largest_share < 10 / tokens
    number = next(n for n, item in enumerate(clean) if item.reward == 0.0)
    logprobs = [-14.0 if t == clean[number].mask.index(1) else value for t, value in enumerate(clean[number].logprobs)]
    clean[number] = replaced(clean[number], logprobs=logprobs)
    stats = Learner(Scorer(model()), named("pooled")).step(clean)
    assert stats.summary.largest_share > 0.9  # without the bound


def engines_own(batch: list[Sample]) -> list[Sample]:
    """The same, of an engine that computes as the trainer does."""
    with torch.no_grad():
        new = Scorer(model())(pack(batch)).new.split([item.sampled for item in batch])
    made = []
    for item, values in zip(batch, new, strict=True):
        said = iter(values.tolist())
        made.append(replaced(item, logprobs=[next(said) if bit else 0.0 for bit in item.mask]))
    return made
