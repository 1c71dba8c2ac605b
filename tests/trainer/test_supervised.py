"""Supervised fine-tuning and preferences: masks, losses against transformers and numpy, whole runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout.engine.embedded.model import ModelConfig, Qwen3, save_model
from rollout.episode.renderer import ChatRenderer
from sandbox.errors import Invalid
from tests.trainer.test_distributed import near
from trainer.batches.pack import pack
from trainer.batches.sample import Sample
from trainer.errors import TrainerFailed
from trainer.models.load import load
from trainer.models.scorer import Scorer
from trainer.objectives.preference import preference_loss
from trainer.settings import OptimiserSettings
from trainer.supervised import data
from trainer.supervised.config import PreferenceSettings, gather
from trainer.supervised.data import PreferencePair
from trainer.supervised.learner import SupervisedLearner
from trainer.supervised.run import SupervisedRun, resume

START = Path(__file__).parents[2] / "examples" / "fix_the_service" / "start"
# Opens with the role, ends an answer with the token that ends it; a line feed stands behind.
TEMPLATE = (
    "{% for m in messages %}{{ '<|begin|>' + m['role'] + ':' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|begin|>assistant:' }}{% endif %}"
)
DROPS = TEMPLATE.replace("m['content'] +", "(m['content'] if loop.last or m['role'] != 'assistant' else '') +")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A chat model of two layers, with the tokenizer of an example."""
    directory = tmp_path / "chat"
    config = ModelConfig.load(START)
    made = Qwen3(
        ModelConfig(
            vocab_size=config.vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
        )
    )  # fmt: skip
    made.initialise(0)
    directory.mkdir()
    for path in START.iterdir():
        if path.suffix in (".json", ".jinja") and path.name not in ("config.json",):
            shutil.copyfile(path, directory / path.name)
    save_model(made, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def said(*contents: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]


def learned(renderer: ChatRenderer, sample: Sample) -> str:
    return renderer.decode([token for token, bit in zip(sample.tokens, sample.mask, strict=True) if bit])


def test_the_messages_of_the_assistant_are_learned_and_nothing_else(model: Path) -> None:
    renderer = ChatRenderer.load(model)
    (made,) = data.samples(renderer, said("hi", "hello", "and", "bye"))
    assert learned(renderer, made) == "hello<|end|>bye<|end|>"
    assert renderer.decode(made.tokens).startswith("<|begin|>user:hi<|end|>")
    (last,) = data.samples(renderer, said("hi", "hello", "and", "bye"), last=True)
    assert learned(renderer, last) == "bye<|end|>" and last.tokens == made.tokens
    with pytest.raises(Invalid, match="has no answer"):
        data.samples(renderer, said("hi"), name="row 3")


def test_a_template_that_rewrites_history_gives_each_answer_a_piece_of_its_own(model: Path) -> None:
    (model / "chat_template.jinja").write_text(DROPS)
    renderer = ChatRenderer.load(model)
    made = data.samples(renderer, said("hi", "hello", "and", "bye"))
    assert [learned(renderer, item) for item in made] == ["hello<|end|>", "bye<|end|>"]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": said("hi", "hello")},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"prompt": "hi", "completion": "hello"},
        {"prompt": said("hi"), "completion": [{"role": "assistant", "content": "hello"}]},
    ],
)
def test_rows_of_all_kinds_are_conversations(row: dict[str, Any]) -> None:
    assert data.conversation(row) == said("hi", "hello")


@pytest.mark.parametrize("row", [{}, {"messages": []}, {"messages": "hi"}, {"messages": [{"content": "x"}]}, {"a": 1}])
def test_what_is_no_conversation_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        data.conversation(row)


def random_samples(count: int, *, minimum: int = 4) -> list[Sample]:
    rng = np.random.default_rng(count)
    made = []
    for number in range(count):
        length = int(rng.integers(minimum, 30))
        mask = [0, *rng.integers(0, 2, length - 2).tolist(), 1]
        made.append(
            Sample(tokens=rng.integers(3, 90, length).tolist(), mask=mask, logprobs=[0.0] * length, name=str(number))
        )
    return made


def test_the_loss_and_gradient_of_imitation_equal_those_of_transformers(model: Path) -> None:
    """`labels` of transformers' own forward pass: -100 where nothing is learned, a mean over the batch's tokens."""
    from transformers import AutoModelForCausalLM

    samples = random_samples(9)
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens = sum(sample.sampled for sample in samples)
    total = torch.zeros(())
    for sample in samples:
        labels = torch.tensor([token if bit else -100 for token, bit in zip(sample.tokens, sample.mask, strict=True)])
        total = (
            total
            + theirs(input_ids=torch.tensor(sample.tokens)[None], labels=labels[None], num_items_in_batch=tokens).loss
        )
    total.backward()
    for budget in (8192, 40):  # in one micro-batch, in many
        learner = SupervisedLearner(Scorer(load(model)), OptimiserSettings(budget=budget, rate=1e-12, max_norm=1e9))
        metrics = learner.step(samples)
        assert metrics["loss"] == pytest.approx(float(total.detach()), abs=1e-6)
        ours = {name.removeprefix("model."): p.grad for name, p in learner.scorer.model.named_parameters()}
        target = {name.removeprefix("model."): p.grad for name, p in theirs.named_parameters()}
        assert target.keys() == ours.keys()
        for name, grad in target.items():
            assert torch.allclose(ours[name], grad, atol=1e-6), name


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def published(kind: str, w: np.ndarray, lengths: np.ndarray, beta: float, smoothing: float) -> np.ndarray:
    """The papers' formulas, in numpy. w: [4, P] log-probabilities of chosen, rejected, and both by the reference."""
    if kind == "ipo":
        h = (w[0] - w[2]) / lengths[0] - (w[1] - w[3]) / lengths[1]
        return (h - 1 / (2 * beta)) ** 2
    h = beta * ((w[0] - w[2]) - (w[1] - w[3]))
    if kind == "hinge":
        return np.maximum(0, 1 - h)
    return -(1 - smoothing) * np.log(sigmoid(h)) - smoothing * np.log(sigmoid(-h))


@pytest.mark.parametrize(("kind", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.1), ("hinge", 0.0), ("ipo", 0.0)])
def test_losses_of_preferences_equal_their_formulas(kind: Any, smoothing: float) -> None:
    rng = np.random.default_rng(3)
    values, lengths = rng.normal(size=(4, 7)) * 5 - 20, rng.integers(3, 30, (2, 7))
    result = preference_loss(
        *torch.tensor(values), beta=0.2, kind=kind, smoothing=smoothing, lengths=tuple(torch.tensor(lengths))  # type: ignore[arg-type]
    )  # fmt: skip
    assert np.allclose(result.numpy(), published(kind, values, lengths, 0.2, smoothing), atol=1e-12)


def pairs(count: int) -> list[PreferencePair]:
    made = random_samples(2 * count)
    return [PreferencePair(chosen=made[2 * i], rejected=made[2 * i + 1]) for i in range(count)]


@torch.no_grad()
def sums(scorer: Scorer, samples: list[Sample]) -> np.ndarray:
    return np.array([float(scorer(pack([sample])).new.double().sum()) for sample in samples])


@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo"])
def test_a_step_of_preferences_is_the_formula_of_its_pairs_however_packed(model: Path, kind: Any) -> None:
    batch, reference = pairs(5), Scorer(load(model))
    other = load(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    chosen, rejected = [pair.chosen for pair in batch], [pair.rejected for pair in batch]
    w = np.stack([sums(s, side) for s in (Scorer(other), reference) for side in (chosen, rejected)])
    lengths = np.array([[item.sampled for item in side] for side in (chosen, rejected)])
    target = published(kind, w, lengths, 0.1, 0.0).mean()
    grads: list[Tensor] = []
    for budget in (8192, 50):
        learner = SupervisedLearner(
            Scorer(other), OptimiserSettings(budget=budget, rate=1e-12, max_norm=1e9),
            reference=reference, preference=PreferenceSettings(kind=kind),
        )  # fmt: skip
        metrics = learner.step(batch)
        assert metrics["loss"] == pytest.approx(target, rel=1e-5)
        grads.append(torch.cat([p.grad.flatten() for p in other.parameters() if p.grad is not None]))
    assert torch.allclose(*grads, atol=1e-5 * float(grads[0].norm()))


def test_a_number_that_is_not_finite_stops_before_the_weights_change(model: Path) -> None:
    scorer = Scorer(load(model))
    learner = SupervisedLearner(scorer)
    with torch.no_grad():
        next(iter(scorer.model.parameters()))[:] = float("nan")
    before = [parameter.clone() for parameter in scorer.parameters()]
    with pytest.raises(TrainerFailed, match="the weights are as they were"):
        learner.step(random_samples(2))
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, scorer.parameters(), strict=True))


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_run_imitates_and_its_model_begins_another_run(model: Path, tmp_path: Path) -> None:
    rows = [
        {"messages": said(f"say {word}", word)} for word in ("cat", "dog", "ls", "sed", "cp", "rm", "mv", "echo") * 3
    ]
    rows += [{"nothing": 1}, {"messages": said("x" * 300, "y")}]
    path = lines(tmp_path / "rows.jsonl", rows)
    notes: list[str] = []
    config = gather(
        "sft", path, {"model": str(model), "out": str(tmp_path / "runs")},
        ["epochs=6", "batch=6", "optimiser.rate=3e-3", "held_share=0.2", "evaluate_every=10"],
    )  # fmt: skip
    run = SupervisedRun(config, report=notes.append)
    made = run.run()
    metrics = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    held = [item["held_out/loss"] for item in metrics if "held_out/loss" in item]
    assert held[-1] < held[0] - 0.5 and len(held) >= 3
    assert any("longer than 256 tokens" in note and "has neither messages" in note for note in notes)
    again = SupervisedRun(gather("sft", path, {"model": str(made), "out": str(tmp_path / "runs")}), report=notes.append)
    assert again.learner.measure(random_samples(3)) == pytest.approx(run.learner.measure(random_samples(3)), abs=1e-5)


def test_a_run_that_was_killed_ends_with_the_same_weights(model: Path, tmp_path: Path) -> None:
    path = lines(tmp_path / "rows.jsonl", [{"prompt": f"say {n}", "completion": str(n)} for n in range(12)])
    options = {"model": str(model), "out": str(tmp_path / "runs")}
    settings = ["batch=4", "epochs=2", "save_every=2", "held_share=0", "optimiser.rate=1e-3"]
    complete = SupervisedRun(gather("sft", path, options, settings), report=lambda _: None)
    complete.run()
    cut = SupervisedRun(gather("sft", path, options, settings), report=lambda _: None)
    real, done = cut.learner.step, []

    def step(*arguments: Any, **named: Any) -> dict[str, float]:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(1)
        return real(*arguments, **named)

    cut.learner.step = step  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        cut.run()
    left = resume(cut.directory, report=lambda _: None)
    left.run()
    for ours, theirs in zip(left.learner.scorer.parameters(), complete.learner.scorer.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_preferences_are_learned(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"say {n}", "chosen": "cat", "rejected": "dog"} for n in range(12)]
    rows.append({"prompt": "x", "chosen": "y"})
    path = lines(tmp_path / "pairs.jsonl", rows)
    config = gather(
        "dpo", path, {"model": str(model), "out": str(tmp_path / "runs")},
        ["batch=4", "epochs=4", "optimiser.rate=1e-3", "held_share=0.2", "preference.beta=0.5"],
    )  # fmt: skip
    run = SupervisedRun(config, report=lambda _: None)
    run.run()
    metrics = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    held = [item for item in metrics if "held_out/loss" in item]
    assert held[0]["held_out/loss"] == pytest.approx(np.log(2), abs=1e-5)  # as long as the policy is its reference
    assert held[-1]["held_out/loss"] < 0.5 and held[-1]["held_out/accuracy"] == 1.0
    assert run.left_out == {"has no rejected": 1}


@pytest.mark.parametrize("loss", ["sft", "dpo"])
def test_several_ranks_end_with_the_weights_of_one(loss: str, model: Path, tmp_path: Path) -> None:
    """By the command; in some rounds one of them has no micro-batch."""
    if loss == "sft":
        rows = [{"messages": said(f"say {n}", "cat " * (n % 5 + 1))} for n in range(12)]
    else:
        rows = [{"prompt": f"say {n}", "chosen": "cat " * (n % 4 + 1), "rejected": "dog"} for n in range(12)]
    path = lines(tmp_path / "rows.jsonl", rows)
    weights, curves = [], []
    shared = {"sft": ["mesh.tensor=2"], "dpo": []}[loss]
    (temporary := tmp_path / "temporary").mkdir()
    for ranks in (1, 2):
        out = tmp_path / f"{ranks}"
        settings = ["batch=5", "epochs=2", "optimiser.rate=1e-2", "optimiser.budget=64", f"ranks={ranks}"]
        arguments = [loss, str(path), "--model", str(model), "--out", str(out), *settings, "held_share=0.2"]
        arguments += shared if ranks > 1 else []
        command, environment = [sys.executable, "-m", "pagurus", *arguments], {**os.environ, "TMPDIR": str(temporary)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
        assert not list(temporary.glob("torchelastic*"))
        (run,) = out.iterdir()
        weights.append(dict(load(run / "model").state_dict()))
        curves.append([json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()])
    assert near(weights[1], weights[0])
    assert [line["step"] for line in curves[0]] == [line["step"] for line in curves[1]]
    for one, other in zip(*curves, strict=True):
        assert all(other[name] == pytest.approx(one[name], abs=1e-4) for name in one if name != "seconds")


@pytest.mark.parametrize(
    ("settings", "named"),
    [(["optimiser.rat=1"], "optimiser.rat"), (["batch=0"], "batch"), (["preference.smoothing=0.6"], "smoothing")],
)
def test_wrong_settings_are_refused(settings: list[str], named: str, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=named):
        gather("sft", tmp_path / "rows.jsonl", {"model": "x"}, settings)
    with pytest.raises(Invalid, match="no model is named"):
        gather("sft", tmp_path / "rows.jsonl", {})
