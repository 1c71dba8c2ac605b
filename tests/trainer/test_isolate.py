"""Broken samples in the batches of a trainer that goes on: all others are trained, each of these is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rollout.engine.embedded.model import ModelConfig, Qwen3
from tests.support.small_model import CONFIG
from tests.trainer.test_distributed import plan
from tests.trainer.test_learner import LENGTH, flat, samples
from tests.trainer.test_steps import state
from trainer.batches import aside
from trainer.batches.aside import PutAside
from trainer.batches.pack import PackedBatch
from trainer.batches.sample import Sample
from trainer.errors import TrainerFailed
from trainer.isolate import careful_step, find
from trainer.learner import Learner
from trainer.models.scorer import Scorer, Scores
from trainer.objectives import bounded, named
from trainer.steps import LocalSteps

INF, NAN = float("inf"), float("nan")
GOOD: dict[str, Any] = {"tokens": [3, 4, 5, 6], "mask": [0, 0, 1, 1], "logprobs": [0.0, 0.0, -1.0, -1.0], "reward": 1.0}
POISON: dict[str, dict[str, Any]] = {
    "too long": {"tokens": [1] * 200, "mask": [0] + [1] * 199, "logprobs": [0.0] + [-1.0] * 199},
    "far too long": {"tokens": [1] * 20_000, "mask": [0] * 19_999 + [1], "logprobs": [0.0] * 19_999 + [-1.0]},
    "long prompt": {"tokens": [1] * 150, "mask": [0] * 149 + [1], "logprobs": [0.0] * 149 + [-1.0]},
    "token past the vocabulary": {"tokens": [3, 4, 5, 40]},
    "token far past the vocabulary": {"tokens": [3, 4, 5, 2**40]},
    "prompt past the vocabulary": {"tokens": [41, 4, 5, 6]},
    "negative token": {"tokens": [3, -1, 5, 6]},
    "logprob -inf": {"logprobs": [0.0, 0.0, -INF, -1.0]},
    "logprob inf": {"logprobs": [0.0, 0.0, INF, -1.0]},
    "logprob nan": {"logprobs": [0.0, 0.0, -1.0, NAN]},
    "logprob above 0": {"logprobs": [0.0, 0.0, 0.5, -1.0]},
    "reward nan": {"reward": NAN},
    "reward inf": {"reward": INF},
    "reward -inf": {"reward": -INF},
    "temperature nan": {"temperature": NAN},
    "temperature inf": {"temperature": INF},
    "temperature below 0": {"temperature": -1.0},
    "nothing": {"tokens": [], "mask": [], "logprobs": []},
    "short mask": {"mask": [0, 1]},
    "long mask": {"mask": [0, 0, 1, 1, 1]},
    "mask of 2": {"mask": [0, 0, 2, 1]},
    "mask of -1": {"mask": [0, 0, -1, 1]},
    "short logprobs": {"logprobs": [0.0]},
    "long logprobs": {"logprobs": [0.0] * 9},
    "first token sampled": {"mask": [1, 0, 1, 1]},
    "all sampled": {"mask": [1, 1, 1, 1], "logprobs": [-1.0] * 4},
    "advantages of another length": {"advantages": [1.0]},
    "advantage nan": {"advantages": [0.0, 0.0, NAN, 0.0]},
    "advantage inf": {"advantages": [0.0, 0.0, INF, 0.0]},
    "top_p": {"complete": False},
    "spoils the gradient": {"tokens": [3, 39, 5, 6]},
    "raises in the model": {"tokens": [3, 38, 5, 6]},
}


class Brittle(Scorer):
    """Token 39 overflows, token 38 raises, memory has an end: what no check of a sample foresees."""

    room = 1 << 30  # tokens at once

    def forward(self, packed: PackedBatch) -> Scores:
        if packed.tokens.numel() > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nGPU 0 has less.")
        if bool((packed.tokens == 38).any()):
            raise IndexError("index out of range in self")
        result = super().forward(packed)
        spoilt = torch.where((packed.tokens == 39).any(), torch.tensor(INF), torch.tensor(1.0))
        return Scores(result.new * spoilt, result.entropy, result.value)


def brittle() -> Any:
    torch.set_num_threads(1)
    made = Qwen3(msgspec_replaced(CONFIG, max_position_embeddings=128))
    made.initialise(0)
    return Learner(Brittle(made), bounded(named("pooled", length=LENGTH)))


def msgspec_replaced(config: ModelConfig, **changes: Any) -> ModelConfig:
    import dataclasses

    return dataclasses.replace(config, **changes)


def restoring(learner: Learner) -> Any:
    state = {name: value.clone() for name, value in learner.scorer.state_dict().items()}
    return lambda: learner.scorer.load_state_dict(state)


def clean(seed: int) -> list[Sample]:
    made = []
    for item in samples(seed):
        tokens = [token % 38 for token in item.tokens]
        made.append(msgspec.structs.replace(item, tokens=tokens, name=f"{seed}/{item.name}"))
    return made


@pytest.mark.parametrize("kind", sorted(POISON))
def test_a_broken_sample_is_named_and_all_others_are_trained(kind: str) -> None:
    batch = clean(1)
    poisoned = Sample(**{**GOOD, **POISON[kind]}, group="p0", name="poison/0")
    learner, expected = brittle(), brittle()
    stats = careful_step(learner, [*batch[:4], poisoned, *batch[4:]], rate=1e-3, restore=restoring(learner))
    assert list(stats.put_aside) == ["poison/0"] and stats.put_aside["poison/0"]
    expected.step(batch, rate=1e-3)
    assert torch.equal(flat(learner.scorer.model), flat(expected.scorer.model))


def test_all_of_them_at_once_in_the_batches_of_a_run(tmp_path: Path) -> None:
    learner, expected = brittle(), brittle()
    kinds = sorted(POISON)
    named_aside: dict[str, str] = {}
    for step in range(4):
        batch = clean(step)
        chosen = kinds[step * 8 : step * 8 + 8]
        poison = [Sample(**{**GOOD, **POISON[kind]}, group="p0", name=kind) for kind in chosen]
        stats = careful_step(learner, [*poison[:4], *batch, *poison[4:]], rate=1e-3, restore=restoring(learner))
        aside.note(tmp_path, aside.described(step, [*poison, *batch], stats.put_aside))
        named_aside |= stats.put_aside
        expected.step(batch, rate=1e-3)
    assert sorted(named_aside) == kinds and len(kinds) >= 30
    lines = aside.read(tmp_path)
    assert sorted(line.name for line in lines) == kinds and all(line.reason for line in lines)
    assert torch.allclose(flat(learner.scorer.model), flat(expected.scorer.model), rtol=1e-5, atol=1e-7)


def test_the_record_follows_the_save_that_a_run_continues_from(tmp_path: Path) -> None:
    """A trainer that died between the save of a step and its line, in the middle of a line, or after later steps."""
    one, two, three = (PutAside(step=step, name=f"p{step}/0", reason="no tokens") for step in (1, 2, 3))
    aside.recover(tmp_path, 1, [])
    assert not (tmp_path / aside.FILE).exists()
    aside.note(tmp_path, [one])
    aside.recover(tmp_path, 2, [two])  # saved, not written down
    assert aside.read(tmp_path) == [one, two]
    aside.recover(tmp_path, 2, [two])
    assert aside.read(tmp_path) == [one, two]
    aside.note(tmp_path, [three])
    aside.recover(tmp_path, 2, [two])  # the save of step 3 was damaged: that step is taken again
    assert aside.read(tmp_path) == [one, two]
    with (tmp_path / aside.FILE).open("ab") as file:
        file.write(b'{"step":3,"na')
    assert aside.read(tmp_path) == [one, two]
    aside.recover(tmp_path, 3, [three])
    assert aside.read(tmp_path) == [one, two, three] and aside.reasons(tmp_path) == {"no tokens": 3}


def test_a_save_names_what_its_step_put_aside(tmp_path: Path) -> None:
    poisoned = Sample(**{**GOOD, **POISON["reward nan"]}, group="p0", name="poison/0")
    steps = LocalSteps(plan(tmp_path, "alone"))
    steps.step([*clean(0), poisoned], state(1))
    saved = steps.saves.newest()
    assert saved is not None
    assert saved.put_aside == [PutAside(step=1, name="poison/0", reason="reward not finite", tokens=4)]


def test_a_log_probability_of_minus_95_is_trained_on() -> None:
    learner = brittle()
    strange = Sample(**{**GOOD, "logprobs": [0.0, 0.0, -95.0, -1.0], "reward": 0.0}, group="p1", name="p1/9")
    stats = careful_step(learner, [*clean(1), strange], rate=1e-3, restore=restoring(learner))
    assert not stats.put_aside and torch.isfinite(flat(learner.scorer.model)).all()


def test_halves_find_each_sample_at_fault_alone() -> None:
    requested: list[int] = []

    def probe(chosen: Any) -> str | None:
        requested.append(len(chosen))
        return "bad" if {3, 60} & set(chosen) else None

    assert find(64, probe) == {3: "bad", 60: "bad"}
    assert len(requested) <= 4 * 6 + 1


def test_weights_that_are_at_fault_are_an_error() -> None:
    learner = brittle()
    before = flat(learner.scorer.model)
    with pytest.raises(TrainerFailed, match="not finite"):
        careful_step(learner, clean(1), rate=1e30, restore=restoring(learner))
        careful_step(learner, clean(2), rate=1e30, restore=restoring(learner))
    assert torch.isfinite(before).all()


def test_too_little_memory_is_named_with_what_takes_less() -> None:
    learner = brittle()
    learner.scorer.room = 1
    with pytest.raises(TrainerFailed, match="does not fit into memory: CUDA out of memory") as raised:
        careful_step(learner, clean(1), rate=1e-3, restore=restoring(learner))
    assert "optimiser.budget" in (raised.value.hint or "") and isinstance(
        raised.value.__cause__, torch.OutOfMemoryError
    )


def test_a_sample_for_which_there_is_no_memory_is_put_aside() -> None:
    batch = clean(1)
    longest = max(len(item.tokens) for item in batch)
    size = longest + 3
    large = msgspec.structs.replace(
        batch[0],
        name="large",
        tokens=(batch[0].tokens * 9)[:size],
        mask=[0] + [1] * (size - 1),
        logprobs=[0.0] + [-1.0] * (size - 1),
    )
    learner = brittle()
    learner.scorer.room = longest
    learner.settings = msgspec.structs.replace(learner.settings, budget=longest)
    stats = careful_step(learner, [*batch, large], rate=1e-3, restore=restoring(learner))
    assert list(stats.put_aside) == ["large"] and "out of memory" in stats.put_aside["large"]
