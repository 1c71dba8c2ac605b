"""A mesh of ranks: what is refused, and that scores and gradients of a model that is cut are the whole model's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollout.engine.embedded.model import ModelConfig, Qwen3, save_model
from rollout.weights.export import put_together
from rollout.weights.store import VersionStore
from sandbox.errors import Invalid
from tests.support.families import build
from tests.support.meshes import MeshCase, compare, spawn
from tests.support.small_model import CONFIG
from tests.trainer.test_distributed import alone, near, plan, record
from trainer.distributed.launch import Fleet
from trainer.distributed.mesh import MeshLayout
from trainer.distributed.plans import PLANS, cuts, need_cuttable, plan_of
from trainer.distributed.worker import WorkPlan
from trainer.errors import TrainerFailed
from trainer.models.load import configuration, load
from trainer.settings import MeshSettings, ObjectiveSettings, OptimiserSettings

DENSE = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96,
         "vocab_size": 101}  # fmt: skip
EVEN = replace(CONFIG, num_attention_heads=4, num_key_value_heads=2, head_dim=6, vocab_size=41)


@pytest.mark.parametrize(
    ("sizes", "batches", "averaged", "of_rank"),
    [
        ({"ranks": 1}, 1, 1, [0]),
        ({"ranks": 3}, 3, 3, [0, 1, 2]),
        ({"ranks": 4, "tensor": 2}, 2, 2, [0, 0, 1, 1]),
        ({"ranks": 4, "replicate": 2}, 4, 4, [0, 1, 2, 3]),
        ({"ranks": 8, "replicate": 2, "tensor": 4}, 2, 2, [0, 0, 0, 0, 1, 1, 1, 1]),
        ({"ranks": 4, "expert": 4, "tensor": 2}, 2, 2, [0, 0, 1, 1]),
        ({"ranks": 8, "context": 2, "tensor": 2}, 2, 4, [0, 0, 0, 0, 1, 1, 1, 1]),
    ],
)
def test_a_layout_says_who_works_on_what(
    sizes: dict[str, int], batches: int, averaged: int, of_rank: list[int]
) -> None:
    layout = MeshLayout(**sizes)
    assert (layout.batches, layout.averaged) == (batches, averaged)
    assert [layout.batch_of(rank) for rank in range(layout.ranks)] == of_rank


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"ranks": 2, "tensor": 4}, "does not divide 2 ranks"),
        ({"ranks": 6, "replicate": 2, "tensor": 2}, "does not divide 6 ranks"),
        ({"ranks": 6, "expert": 4}, "expert 4 does not divide the 6 ranks of a copy"),
    ],
)
def test_sizes_that_do_not_make_up_the_ranks_are_refused(sizes: dict[str, int], reason: str) -> None:
    with pytest.raises(Invalid, match=reason):
        MeshLayout(**sizes)


@pytest.mark.parametrize(
    ("content", "sizes", "reason"),
    [
        ({"model_type": "gemma2"}, {"tensor": 2}, "no plan cuts models of type gemma2"),
        (DENSE | {"num_attention_heads": 7}, {"tensor": 2}, "num_attention_heads is 7, mesh.tensor 2"),
        (DENSE, {"tensor": 4}, "num_key_value_heads is 2, mesh.tensor 4"),
        (DENSE | {"intermediate_size": 97}, {"tensor": 2}, "intermediate_size is 97"),
        (DENSE | {"vocab_size": 3}, {"tensor": 2}, "the vocabulary is too small"),
        (DENSE, {"expert": 2}, "a llama has no experts"),
        (DENSE | {"model_type": "qwen3_moe", "num_experts": 6}, {"expert": 4}, "6 experts, mesh.expert is 4"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(content: dict[str, Any], sizes: dict[str, int], reason: str) -> None:
    layout = MeshLayout(ranks=8, **sizes)
    with pytest.raises(Invalid, match=reason):
        need_cuttable(content, layout)
    need_cuttable(content, MeshLayout(ranks=8), adapters=True)


def test_adapters_are_not_cut() -> None:
    with pytest.raises(Invalid, match="adapters are not cut"):
        need_cuttable(DENSE, MeshLayout(ranks=2, tensor=2), adapters=True)


def test_a_plan_names_every_parameter_of_its_family(tmp_path: Path) -> None:
    for family, plan_ in PLANS.items():
        model = load(build(family, tmp_path / family))
        made = cuts(plan_, [name for name, _ in model.named_parameters()])
        assert set(made.values()) >= {"columns", "rows", "vocabulary", "complete"}, family
    with pytest.raises(Invalid, match=r"does not name model.layers.0.pre_feedforward_layernorm.weight"):
        cuts(plan_of("llama"), ["model.norm.weight", "model.layers.0.pre_feedforward_layernorm.weight"])


MESHES = {
    2: [{"tensor": 2}, {"context": 2}, {"expert": 2}],
    4: [
        {"tensor": 2},
        {"tensor": 2, "replicate": 2},
        {"context": 4},
        {"expert": 4},
        {"expert": 2, "tensor": 2},
        {"expert": 2, "replicate": 2},
        {"context": 2, "tensor": 2, "expert": 4},
    ],
}


@pytest.mark.parametrize(("ranks", "recompute"), [(2, True), (4, False)])
def test_scores_and_gradients_are_those_of_the_whole_model(ranks: int, recompute: bool, tmp_path: Path) -> None:
    """Of every family in the table, cut in every way."""
    directories = [str(build(family, tmp_path / family)) for family in PLANS] + [str(odd(tmp_path / "odd"))]
    case = MeshCase(directories=directories, ranks=ranks, meshes=MESHES[ranks], recompute=recompute)
    spawn(compare, case, tmp_path)


def odd(directory: Path, config: ModelConfig = EVEN) -> Path:
    """A policy with a tied head, whose vocabulary is of an odd size."""
    made = Qwen3(config)
    made.initialise(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    save_model(made, directory)
    return directory


@pytest.mark.parametrize(
    ("family", "objective", "meshes"),
    [
        ("qwen3", "ppo", [(2, {"context": 2}), (1, {}), (4, {"tensor": 2, "replicate": 2})]),
        ("qwen3_moe", "pooled", [(2, {"expert": 2}), (1, {}), (2, {"tensor": 2})]),
    ],
)
def test_a_run_goes_on_with_another_mesh_and_the_same_weights(
    family: str, objective: str, meshes: list[tuple[int, dict[str, int]]], tmp_path: Path
) -> None:
    odd(tmp_path / "base") if family == "qwen3" else build(family, tmp_path / "base")
    settings = OptimiserSettings(rate=1e-2, budget=64, epsilon=1e-2)  # no step of a size that rounding decides
    options = {"settings": settings, "steps": len(meshes), "objective": ObjectiveSettings(preset=objective)}
    expected = alone(tmp_path, **options)
    before: dict[str, torch.Tensor] = {}
    for step, (ranks, sizes) in enumerate(meshes, 1):
        made = plan(tmp_path, "changing", mesh=MeshSettings(**sizes), **options)
        with Fleet(made, ranks=ranks) as fleet:
            if before:  # published again by those that read the save
                assert fleet.wait(step - 1).weights.version == step - 1
                assert same(exported(made, tmp_path / f"again-{step}", step - 1), before)
            record(fleet, step, since=step - 1)
            assert fleet.wait(step).saved
            before = fleet.weights(step)
            assert same(exported(made, tmp_path / f"step-{step}", step), before)
    assert near(before, expected)


def exported(made: WorkPlan, directory: Path, version: int) -> dict[str, torch.Tensor]:
    """What an engine gets: every piece is checked."""
    put_together(VersionStore(made.published), directory, version)
    return load_file(directory / "model.safetensors")


def same(served: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> bool:
    """Bit by bit, as they are published: what is tied has one name."""
    missing = weights.keys() - served.keys()
    return missing <= {"lm_head.weight"} and all(
        torch.equal(tensor, weights[name].bfloat16()) for name, tensor in served.items()
    )


def test_ranks_say_why_they_cannot_cut_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with Fleet(plan(tmp_path, "odd", mesh=MeshSettings(tensor=2)), ranks=2) as fleet:
        assert configuration(tmp_path / "base")["num_key_value_heads"] == 1
        with pytest.raises(TrainerFailed, match=r"num_key_value_heads is 1, mesh.tensor 2"):
            fleet.wait(1)
    assert not list(temporary.glob("torchelastic*"))
