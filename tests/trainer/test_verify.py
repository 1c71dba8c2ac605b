"""Families of transformers, built small: trained as they compute, or refused in words."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from pagurus.cli import application
from rollout.engine.embedded.model import ModelConfig, Qwen3, save_model
from sandbox.errors import Invalid
from tests.support.families import FAMILIES, ROTATIONS, build
from trainer.batches.pack import pack
from trainer.batches.sample import Sample
from trainer.learner import Learner
from trainer.models import first_layers
from trainer.models import verify as verifying
from trainer.models.load import load
from trainer.models.scorer import Scorer
from trainer.models.verify import Verification, begin, probes, verify, way_of
from trainer.objectives import named
from trainer.settings import OptimiserSettings

pytestmark = pytest.mark.filterwarnings("default")

# Behind each: what a trajectory would see of its neighbour, or what our head or attention would leave out.
ALONE = {
    "cohere", "cohere2", "gemma2", "gpt_oss", "granitemoehybrid", "lfm2", "mamba", "minimax", "qwen3_next",
    "phi3 longrope", "bloom", "mpt", "gptj", "llama4_text", "nemotron",
    "phimoe", "nanochat",
}  # fmt: skip
PACKED = {
    "llama",
    "mistral",
    "qwen2",
    "qwen2_moe",
    "qwen3_moe",
    "phi",
    "phi3",
    "opt",
    "seed_oss",
    "gpt2",
    "deepseek_v3",
}


def short(names: set[str]) -> list[str]:
    return sorted(names)


@pytest.mark.parametrize("name", short(PACKED))
def test_a_family_is_trained_packed(name: str, tmp_path: Path) -> None:
    result = verify(build(name, tmp_path))
    assert result.way == "packed", result
    assert max(result.packed or 0, result.single or 0, result.recompute or 0) < 1e-5
    assert result.slope is not None and result.slope < 1e-5


@pytest.mark.parametrize("name", short(ALONE))
def test_a_family_is_trained_one_trajectory_at_a_time(name: str, tmp_path: Path) -> None:
    result = verify(build(name, tmp_path))
    assert result.way == "alone", result
    assert result.alone is not None and result.alone < 1e-5 and result.reason.startswith("cannot be packed: ")


def test_a_model_whose_numbers_depend_on_what_it_read_before_is_refused(tmp_path: Path) -> None:
    """Dynamic rotations grow with the longest sequence so far, and shrink only for a short one."""
    result = verify(build("llama dynamic", tmp_path))
    assert result.way == "refused" and result.reason.count("differ by") == 2


@pytest.mark.long
@pytest.mark.parametrize("name", sorted({*FAMILIES, *ROTATIONS} - ALONE - PACKED))
def test_every_family_is_right_or_refused(name: str, tmp_path: Path) -> None:
    result = verify(build(name, tmp_path))
    right = {"packed": result.packed, "alone": result.alone}.get(result.way)
    assert result.reason if result.way == "refused" else right is not None and right < 1e-5


def test_at_least_forty_families_are_tried() -> None:
    assert len({*FAMILIES, *ROTATIONS}) >= 40


def test_our_own_definition_equals_that_of_transformers(tmp_path: Path) -> None:
    model = Qwen3(ModelConfig(vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2))
    model.initialise(1)
    save_model(model, tmp_path)
    result = verify(tmp_path)
    assert result.way == "packed" and result.packed is not None and result.packed < 1e-5


def test_a_model_that_sees_its_neighbours_learns_the_same_in_any_batch(tmp_path: Path) -> None:
    directory = build("lfm2", tmp_path)
    samples = probes(96, None)
    scorer = Scorer(load(directory, packs=False), packs=False)
    together = scorer(pack(samples)).new
    apart = torch.cat([scorer(pack([sample])).new for sample in samples])
    assert torch.equal(together, apart)
    learner = Learner(scorer, named("pooled"), OptimiserSettings(rate=1e-3))
    stats = learner.step([_of_group(sample, number) for number, sample in enumerate(samples)])
    assert stats.grad_norm > 0


def _of_group(sample: Sample, number: int) -> Sample:
    return msgspec.structs.replace(
        sample, group="g", reward=float(number), logprobs=[-3.0 * bit for bit in sample.mask]
    )


def test_a_run_finds_the_way_once_and_refuses_what_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    run.mkdir()
    directory = build("lfm2", tmp_path / "model")
    assert way_of(run).packs
    assert not begin(directory, run).packs and not way_of(run).packs
    monkeypatch.setattr(
        verifying, "verify", lambda _: Verification(model="X", way="refused", reason="differs by 2 nat")
    )
    assert not begin(directory, run).packs  # it is written down
    with pytest.raises(Invalid, match="X cannot be trained: differs by 2 nat"):
        begin(directory, tmp_path)


def test_differences_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that computes something else is found, whatever the family."""
    directory = build("llama", tmp_path)
    right = Scorer._one_by_one
    monkeypatch.setattr(Scorer, "bias", lambda _: torch.linspace(0, 1, 96))
    result = verify(directory)
    assert result.way == "alone" and "differ by" in result.reason

    def wrong(self: Scorer, packed: object) -> object:
        scores = right(self, packed)  # type: ignore[arg-type]
        return type(scores)(scores.new * 1.001, scores.entropy, scores.value)

    monkeypatch.setattr(Scorer, "_one_by_one", wrong)
    assert verify(directory).way == "refused"


def test_the_command_says_how_a_model_is_trained(tmp_path: Path) -> None:
    shown = CliRunner().invoke(application, ["verify-model", str(build("phi", tmp_path))])
    assert shown.exit_code == 0, shown.output
    assert "PhiForCausalLM: it is trained packed" in shown.output and "recompute" in shown.output


def test_the_embedded_engine_reports_what_the_trainer_computes() -> None:
    start = Path(__file__).parents[2] / "examples" / "fix_the_service" / "start"
    shown = CliRunner().invoke(application, ["verify-model", str(start), "--engine", "embedded", "--json"])
    assert shown.exit_code == 0, shown.output
    assert '"embedded"' in shown.output


LARGE_FAMILIES = {  # changes, and how many layers have one of each kind
    "deepseek_v3": ({"num_hidden_layers": 7, "first_k_dense_replace": 3}, 4),
    "qwen3_moe": ({"num_hidden_layers": 5}, 2),
    "gemma3_text": ({"num_hidden_layers": 9, "sliding_window_pattern": 3, "layer_types": None}, 3),
    "gpt2": ({"n_layer": 5}, None),  # whose layers have another name
}


@pytest.mark.parametrize("family", LARGE_FAMILIES)
def test_a_large_model_is_compared_by_its_first_layers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, layers = LARGE_FAMILIES[family]
    monkeypatch.setitem(FAMILIES, family, {**FAMILIES[family], **changes})
    directory = build(family, tmp_path / family)
    whole = verifying.verify_run(directory)
    assert whole.layers is None and whole.way == "packed"
    monkeypatch.setattr(first_layers, "LARGE", 0)
    short = verifying.verify_run(directory)
    assert (short.layers, short.way) == (layers, "packed")
    if layers is not None:
        place = tmp_path / "short"
        place.mkdir()
        assert first_layers.shorten(directory, place) == layers
        parts, complete = load(place).state_dict(), load(directory).state_dict()
        assert {name.split(".")[2] for name in parts if ".layers." in name} == {str(n) for n in range(layers)}
        for name, tensor in parts.items():
            assert torch.equal(tensor, complete[name]), name
