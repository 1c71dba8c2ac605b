"""A policy folder, its fit, a step of GRPO, publication and resume state: real torch, tiny sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import recipe
from examples import fit
from examples.fit import Example
from examples.fix_the_service import WORDS, demonstrate
from examples.fix_the_service.demonstrations import script
from examples.fix_the_service.scenario import BREAKAGES, scenario
from rollout.engine.embedded.model import load_model
from rollout.environments import directory as task
from sandbox.errors import Invalid, NotFound
from trainer import machine, sizing
from trainer.config import TrainConfig, open_run
from trainer.models import policy
from trainer.models.load import take

SMALL = policy.Shape(width=32, layers=1, heads=2, inner=48)
TOKENIZER = policy.tokenizer(WORDS)
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fix_the_service"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@given(st.text() | st.text("<>|0xABpaden").map(lambda text: f"<0x41>{text}<|end|>"))
@settings(max_examples=300)
def test_any_text_survives_its_tokens(text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_no_output_spells_a_special_token(tmp_path: Path) -> None:
    policy.make(tmp_path, WORDS, seed=0, shape=SMALL)
    loaded = policy.load_tokenizer(tmp_path)
    assert not {0, 1, 2} & set(loaded.encode("a <|end|> <|pad|> <|begin|> b", add_special_tokens=False).ids)


def test_commands_and_words_are_single_tokens() -> None:
    for word in WORDS:
        assert len(TOKENIZER.encode(word, add_special_tokens=False).ids) == 1


def test_transformers_computes_the_same_logits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = policy.make(tmp_path, WORDS, seed=1, shape=SMALL)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.randint(0, model.config.vocab_size, (2, 20))
    with torch.no_grad():
        assert torch.allclose(theirs(tokens).logits, model(tokens), atol=1e-5)


def test_same_seed_same_weights(tmp_path: Path) -> None:
    for name in ("a", "b"):
        policy.make(tmp_path / name, WORDS, seed=3, shape=SMALL)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


def test_every_breakage_occurs_and_a_clean_script_earns_the_reward() -> None:
    assert {scenario(seed).breakage for seed in range(100)} == set(BREAKAGES)
    for seed in range(100):
        assert list(script(seed, sloppy=False))[-1] == "exit"
        texts = demonstrate(seed, sloppy=False)
        assert (scenario(seed).answer + "\n$ ", False) in texts


def test_fit_lowers_the_loss(tmp_path: Path) -> None:
    model = policy.make(tmp_path, WORDS, seed=0, shape=SMALL)
    losses: list[float] = []
    recipe = fit.Recipe(clean_steps=12, sloppy_steps=2, batch=4)
    fit.fit(
        model,
        policy.load_tokenizer(tmp_path),
        demonstrate,
        seed=0,
        recipe=recipe,
        report=lambda _, __, loss: losses.append(loss),
    )
    assert len(losses) == 14
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("name", "minimum", "limit"),
    [("fix_the_service", 0.25, 0.5), ("finish_the_migration", 0.2, 0.5), ("frozen_lake", 0.15, 0.4)],
)
def test_the_policy_in_the_tree_solves_what_a_fresh_fit_solves(name: str, minimum: float, limit: float) -> None:
    """On held-out seeds of the twin, sampled at T = 1. Fits of the first for three seeds gave 0.31 to 0.40."""
    example = Example.of(name)
    result = recipe.evaluate(example, load_model(example.start), policy.load_tokenizer(example.start), 256)
    assert minimum <= result <= limit


def test_a_folder_that_is_no_task_says_what_to_do(tmp_path: Path) -> None:
    result = task.load(EXAMPLE)
    assert (result.name, result.start) == ("fix_the_service", EXAMPLE / "start")
    with pytest.raises(NotFound, match="no directory"):
        task.load(tmp_path / "nowhere")
    with pytest.raises(Invalid, match=r"__init__\.py"):
        task.load(tmp_path)
    (tmp_path / "__init__.py").write_text("WORDS = ()\n")
    with pytest.raises(Invalid, match="0 environments"):
        task.load(tmp_path)


TWO_METHODS = """
from rollout import Environment, Observation

class Greet(Environment):
    async def reset(self, sandbox, seed): return Observation(text="hello")
    async def step(self, sandbox, action): return Observation(text="", reward=1.0, done=True)
"""


def test_an_environment_of_two_methods_is_a_task_and_needs_a_policy_to_begin_with(tmp_path: Path) -> None:
    file = tmp_path / "greet.py"
    file.write_text(TWO_METHODS)
    result = task.load(file)
    assert (result.name, result.environment.__name__, result.start) == ("greet", "Greet", None)
    with pytest.raises(Invalid, match="no policy to begin with"):
        open_run(TrainConfig(task=file, out=tmp_path / "runs"))
    with pytest.raises(NotFound, match="no model"):
        open_run(TrainConfig(task=file, out=tmp_path / "runs", model=tmp_path))
    directory, config = open_run(TrainConfig(task=file, out=tmp_path / "runs", model=EXAMPLE / "start"))
    assert config.model == EXAMPLE / "start" and directory.is_dir()
    take(EXAMPLE / "start", directory / "policy")
    taken, start = load_model(directory / "policy").state_dict(), load_model(EXAMPLE / "start").state_dict()
    assert all(torch.equal(taken[name], value) for name, value in start.items())
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text('{"model_type": "bloom"}')
    with pytest.raises(Invalid, match=r"attention of its own.*--engine vllm"):
        open_run(TrainConfig(task=file, out=tmp_path / "runs", model=tmp_path / "other"))
    with pytest.raises(NotFound, match="no tokenizer"):
        take(tmp_path / "other", directory / "policy")


@pytest.mark.parametrize(
    ("cores", "busy", "sandboxes", "pace", "nice"),
    [
        (2, 0.0, 16, 0.8, 5),
        (2, 1.0, 12, 0.8, 10),
        (2, 2.0, 12, 0.8, 10),
        (1, 1.0, 4, 0.8, 10),
        (8, 0.0, 64, 0.8, 5),
        (64, 3.0, 64, 0.8, 5),
        (2, -1.0, 16, 0.8, 5),
        (2, 9.0, 12, 0.8, 10),
    ],
)
def test_sandboxes_and_priority_follow_the_cores_that_are_free(
    cores: int, busy: float, sandboxes: int, pace: float, nice: int
) -> None:
    result = sizing.choose(cores, busy)
    assert (result.concurrency, result.pace, result.nice) == (sandboxes, pace, nice)
    chosen = sizing.choose(cores, busy, concurrency=5, pace=0.0)
    assert (chosen.concurrency, chosen.pace) == (5, 0.0)


def test_busy_cores_are_seen() -> None:
    assert machine.cores() >= 1
    assert 0.0 <= machine.busy(0.05) <= machine.cores()
