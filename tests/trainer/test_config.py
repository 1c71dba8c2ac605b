"""What a run is told: keys, their checks, the dry run, estimates, and how a run is extended and exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from pagurus.cli import application
from rollout.decide.engines.devices import DevicePlacement
from rollout.engine.embedded.model import ModelConfig, Qwen3, load_model
from rollout.plan import read_plan
from rollout.weights.export import export
from rollout.weights.store import VersionStore
from sandbox.errors import Conflict, Invalid, NotFound
from tests.support.families import build
from trainer.batches.pack import pack
from trainer.batches.sample import Sample
from trainer.config import TrainConfig, gather, make, open_run, read
from trainer.estimate import estimate, ghostly, retained
from trainer.models import policy
from trainer.models.load import Lora, empty, load
from trainer.models.scorer import Scorer
from trainer.prepare import prepare
from trainer.preview import describe_hosts, preview
from trainer.settings import MeshSettings, ObjectiveSettings
from trainer.weights import Publisher

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "fix_the_service"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_a_file_is_read_and_its_paths_are_relative_to_it(tmp_path: Path) -> None:
    path = written(tmp_path, 'task = "there"\nsteps = 3\n[objective]\npreset = "gspo"\ncorrections = ["tis"]\n')
    made = make(read(path))
    assert made == TrainConfig(
        task=tmp_path / "there", steps=3, objective=ObjectiveSettings(preset="gspo", corrections=["tis"])
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('task = "x"\nobjectiv = "dapo"', "unknown key 'objectiv'.*nearest: objective"),
        ('[[mixture]]\ntask = "x"\nweigth = 2', "unknown key 'weigth'.*nearest: weight"),
        ("[[mixture]]\nweight = 2", "mixture|task"),
        ('task = "x"\ncurriculum = "c.py"', "a curriculum chooses among the parts of a mixture"),
        ('task = "x"\nsteps = "three"', r"steps"),
        ('task = "x"\nsteps = 0', "`int` >= 1.*steps"),
        ('task = "x"\nlearning_rate = 1e-6', "unknown key 'learning_rate'.*nearest: optimiser.rate; "),
        ('task = "x"\nqqqqqq = 1', "unknown key 'qqqqqq' .there are: "),
        ('task = "x"\nheld_out = "test.jsonl"', "counts episodes.*held_out. of a part"),
        ('task = "x"\nmixture = 1', "Expected `array`, got `int`.*mixture"),
        ('task = "x"\nmixture = ["x"]', "Expected `object`, got `str`.*mixture"),
        ('task = "x"\n[optimiser]\nrate = inf', "optimiser.rate is inf"),
        ('task = "x"\n[sampling]\ntemperature = 0', "the same answers"),
        ('task = "x"\nrate = 1e-6', "unknown key 'rate'.*nearest: .*optimiser.rate"),
        ('task = "x"\n[objective.clip]\nhihg = 0.3', "unknown key 'objective.clip.hihg'.*nearest: high"),
        ('task = "x"\n[optimiser]\nrate = -1.0', "> 0.*optimiser.rate"),
        ('task = "x"\n[objective.clip]\ndual = 0.5', "set more than 1.*objective.clip"),
        ('task = "x"\n[sampling]\ntop_p = 0.9', "cannot be learned from"),
        ('task = "x"\nranks = 3\n[mesh]\ntensor = 2', "does not divide 3 ranks"),
        ('task = "x"\nranks = 4\n[hosts]\ncount = 3', "3 hosts do not share 4 ranks evenly"),
        ('task = "x"\nranks = 3\n[hosts]\ncount = 3\nagents = ["b"]', "has 1 names, and hosts.count = 3 needs 2"),
        ("steps = 3", "no task is named"),
        ("steps =", "is no TOML"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=said):
        make(read(written(tmp_path, text)))
    with pytest.raises(NotFound):
        read(tmp_path / "nowhere.toml")


def test_a_resumed_run_keeps_its_keys_and_may_get_more_steps(tmp_path: Path) -> None:
    directory, first = open_run(TrainConfig(task=EXAMPLE, steps=3, seed=5, out=tmp_path))
    again = TrainConfig(task=Path("elsewhere"), resume=directory)
    assert open_run(again) == (directory, first)
    assert open_run(again, steps=7)[1].steps == 7
    assert open_run(again)[1].steps == 7
    assert open_run(again, ranks=3)[1].ranks == open_run(again)[1].ranks == 3
    assert open_run(again)[1].steps == 7


def test_a_resumed_run_refuses_other_settings_than_it_began_with(tmp_path: Path) -> None:
    """However they are named; those that it has already are no change."""
    plan = written(tmp_path, f'task = "{EXAMPLE}"\nout = "runs"\nsteps = 3\n[optimiser]\nrate = 1e-4\n')
    run, _ = open_run(gather(plan, {}))
    for what, options, settings in (
        (Path(), {}, ["optimiser.rate=1e-6"]),
        (Path("optimiser.rate=1e-6"), {}, []),
        (Path(), {"held_out": 64}, []),
        (Path(), {"objective": "dapo"}, []),
        (plan, {}, ["sampling.max_tokens=64"]),
        (EXAMPLE, {"out": str(tmp_path)}, []),
    ):
        with pytest.raises(Invalid, match=r"keeps its settings, and of (optimiser|held_out|objective|sampling)"):
            gather(what, options, settings, resume=run)
    for what, options, settings in (
        (Path(), {"steps": 7}, []),
        (Path("steps=7"), {}, []),
        (plan, {}, ["steps=7"]),
        (Path(), {}, ["steps=7", "optimiser.rate=1e-4"]),
    ):
        made = gather(what, options, settings, resume=run)
        assert (made.steps, made.optimiser.rate, made.resume) == (7, 1e-4, run)
    assert prepare(made) == run and open_run(TrainConfig(task=Path(), resume=run))[1].steps == 7


def test_a_mesh_that_does_not_fit_leaves_no_run_behind(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"num_attention_heads is 6, mesh\.tensor 4"):
        open_run(TrainConfig(task=EXAMPLE, ranks=4, mesh=MeshSettings(tensor=4), out=tmp_path))
    with pytest.raises(Invalid, match="adapters are not cut"):
        open_run(TrainConfig(task=EXAMPLE, ranks=2, mesh=MeshSettings(tensor=2), lora=4, out=tmp_path))
    assert not list(tmp_path.iterdir())
    directory, _ = open_run(TrainConfig(task=EXAMPLE, ranks=2, mesh=MeshSettings(tensor=2), out=tmp_path))
    with pytest.raises(Invalid, match="does not divide 3 ranks"):
        open_run(TrainConfig(task=Path(), resume=directory), ranks=3)


def test_a_mixture_is_read_with_its_paths_and_reaches_the_rollout(tmp_path: Path) -> None:
    (tmp_path / "hard.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    (tmp_path / "choose.py").write_text("def weights(outcomes): return {each.name: 1.0 for each in outcomes}")
    path = written(
        tmp_path,
        f'out = "runs"\ncurriculum = "choose.py"\n[[mixture]]\ntask = "{EXAMPLE}"\nweight = 2\n'
        f'[[mixture]]\ntask = "{EXAMPLE}"\nname = "hard"\nrows = "hard.jsonl"\n',
    )
    directory, config = open_run(make(read(path)))
    assert (config.task, config.curriculum) == (EXAMPLE, tmp_path / "choose.py")
    environments = read_plan(directory).environments(directory)
    assert [(part.name, part.weight) for part in environments.parts] == [("fix_the_service", 2.0), ("hard", 1.0)]
    assert environments.rows[1] == [{"n": 1}, {"n": 2}]
    assert open_run(TrainConfig(task=Path(), resume=directory)) == (directory, config)


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path: Path) -> None:
    path = written(tmp_path, f'task = "{EXAMPLE}"\nsteps = 3\nout = "runs"\n')
    shown = CliRunner().invoke(application, ["train", str(path), "--dry-run", "--groups", "5"])
    assert shown.exit_code == 0, shown.output
    rows = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in shown.output.splitlines() if "│" in line}
    assert (rows["steps"], rows["groups"], rows["objective.preset"]) == ("3", "5", "pooled")
    assert rows["parameters"].startswith("1,0")
    assert rows["peak memory of a rank"].endswith("MiB")
    assert [item.name for item in tmp_path.iterdir()] == ["run.toml"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"size": 1}, "size is 1: every advantage would be 0"),
        ({"objective": "GRPO"}, "nearest: grpo"),
        ({"mixture": [{"task": str(EXAMPLE), "rows": "none.jsonl"}]}, "no rows"),
        ({"rewards": [{"name": "a", "function": "none.py:f"}]}, "no reward function"),
        ({"mixture": [{"task": str(EXAMPLE)}], "curriculum": "none.py"}, "no curriculum"),
    ],
)
def test_what_a_run_would_fail_on_a_dry_run_refuses(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    made = make({"task": str(EXAMPLE), "out": str(tmp_path / "runs"), **changed})
    for begin in (preview, open_run):
        with pytest.raises((Invalid, NotFound), match=said):
            begin(made)
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_prints_who_has_which_ranks(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        f'task = "{EXAMPLE}"\nranks = 6\n[mesh]\ntensor = 2\n[hosts]\ncount = 3\nagents = ["b", "c", "d"]\n'
        'address = "10.0.0.1"\nwait = 60\n',
    )
    shown = CliRunner().invoke(application, ["train", str(path), "--dry-run"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    rows = dict(describe_hosts(make(read(path))))
    assert rows == {
        "host 0": "this machine, 10.0.0.1: ranks 0 to 1, batches, saves, weights",
        "host 1": "agent b: ranks 2 to 3",
        "host 2": "agent c: ranks 4 to 5",
        "standby": "d",
        "if a host is lost": "after 60 s without another one, 4 ranks on 2 hosts, from the last save",
        "agents": "python -m trainer.distributed.agent --head http://10.0.0.1:7010 --directory DIRECTORY",
    }
    assert all(row in shown.output for row in list(rows.values())[:4])
    six = make(read(path) | {"mesh": {"tensor": 6}})
    assert dict(describe_hosts(six))["if a host is lost"].endswith("the run stops: the mesh needs all")


def test_a_dry_run_refuses_an_unknown_objective(tmp_path: Path) -> None:
    shown = CliRunner().invoke(application, ["train", str(EXAMPLE), "--dry-run", "--objective", "dappo"])
    assert isinstance(shown.exception, Invalid)
    assert "nearest: dapo" in str(shown.exception)
    with pytest.raises(Invalid, match="ppo needs the whole batch first"):
        open_run(
            TrainConfig(task=EXAMPLE, objective=ObjectiveSettings(preset="ppo"), stream=True, out=tmp_path / "runs")
        )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("said", "reported"), [('system = "Be brief."', "a system prompt"), ("tools = ({},)", "tools")]
)
def test_a_model_without_chat_template_is_refused_where_it_would_have_to_be_told_something(
    said: str, reported: str, tmp_path: Path
) -> None:
    (tmp_path / "talking.py").write_text(
        "from rollout import Environment, Observation\n"
        "class Talking(Environment):\n"
        f"    {said}\n"
        "    async def reset(self, sandbox, seed): return Observation(text='')\n"
        "    async def step(self, sandbox, action): return Observation(text='', done=True)\n"
    )
    config = TrainConfig(task=tmp_path / "talking.py", model=EXAMPLE / "start", out=tmp_path / "runs")
    for begin in (open_run, preview):
        with pytest.raises(
            Invalid, match=rf"Talking has {reported}.* no chat template .name an instruction-tuned model"
        ):
            begin(config)
    assert not (tmp_path / "runs").exists()


def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mebibytes: int, *, count: int = 2) -> None:
    """A machine with GPUs of this memory, as nvidia-smi lists them."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(
        "".join(["#!/bin/sh\n", *(f"echo {n}, GPU-{n}, H800, {mebibytes}, 0, Disabled\n" for n in range(count))])
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_run_that_does_not_fit_into_the_memory_of_gpus_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(tmp_path, monkeypatch, 8)
    config = TrainConfig(task=EXAMPLE, out=tmp_path / "runs")
    for begin in (open_run, preview):
        with pytest.raises(Invalid, match=r"of a rank take 0.0 GiB, more than GPU 0 .*ranks = 3 or more, offload"):
            begin(config)
    assert not (tmp_path / "runs").exists()
    directory, _ = open_run(TrainConfig(task=EXAMPLE, offload=True, out=tmp_path / "runs"))
    assert read_plan(directory).devices == DevicePlacement(["GPU-0"], [["GPU-1"]])


def test_a_resumed_run_has_a_gpu_for_each_of_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(tmp_path, monkeypatch, 64 << 10, count=3)
    directory, _ = open_run(TrainConfig(task=EXAMPLE, out=tmp_path / "runs"))
    shutil.copytree(EXAMPLE / "start", directory / "policy")  # as a run does when it begins
    open_run(TrainConfig(task=Path(), resume=directory), ranks=2)
    assert read_plan(directory).devices == DevicePlacement(["GPU-0", "GPU-2"], [["GPU-1"]])
    with pytest.raises(Invalid, match="3 ranks do not fit"):
        open_run(TrainConfig(task=Path(), resume=directory), ranks=3)


def test_a_dry_run_prints_what_each_gpu_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(tmp_path, monkeypatch, 64 << 10)
    shown = CliRunner().invoke(application, ["train", str(EXAMPLE), "--dry-run", "--engine", "vllm"])
    assert shown.exit_code == 0, shown.output
    rows = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in shown.output.splitlines() if "│" in line}
    assert rows["trainer"] == "GPU 0 (H800, 64 GiB)"
    assert rows["memory of GPU 0"] == "at least 0.0 GiB of 64.0 GiB"
    assert rows["memory of GPU 1"] == "at least 57.6 GiB of 64.0 GiB"


def test_trajectories_longer_than_the_model_has_positions_are_refused(tmp_path: Path) -> None:
    config = TrainConfig(task=EXAMPLE, max_length=1025, out=tmp_path / "runs")
    for begin in (open_run, preview):
        with pytest.raises(Invalid, match=r"max_length is 1025, and .* has 1024 positions"):
            begin(config)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("recompute", [False, True])
def test_activations_without_memory_are_those_of_the_real_model(recompute: bool) -> None:
    config = ModelConfig(vocab_size=300, hidden_size=48, intermediate_size=96, num_hidden_layers=3)
    with ghostly():
        counted = retained(Scorer(Qwen3(config), recompute=recompute), length=64, count=4)
    real = Scorer(Qwen3(config), recompute=recompute)
    own = {parameter.untyped_storage().data_ptr() for parameter in real.parameters()}
    storages: dict[int, tuple[int, torch.Tensor]] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    sample = Sample(tokens=[0] * 64, mask=[0] + [1] * 63, logprobs=[0.0] * 64)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        real(pack([sample] * 4))
    assert counted == pytest.approx(sum(size for size, _ in storages.values()), rel=0.03)


def test_estimates_add_up() -> None:
    with ghostly():
        model = Qwen3(ModelConfig(vocab_size=300))
        result = estimate(model, budget=1024, longest=256, tokens=10_000, recompute=False, flops=1e10)
        little = estimate(model, budget=2, longest=2, tokens=2, recompute=False, flops=1e10)
        half = estimate(model, budget=1024, longest=256, tokens=10_000, recompute=False, flops=1e10, ranks=2,
                        reference=result.parameters)  # fmt: skip
    assert result.weights == result.gradients == result.optimiser / 2 == 4 * result.parameters
    assert result.peak > result.weights + result.gradients + result.optimiser
    state, published = 12 * result.parameters, 2 * result.parameters
    # A save copies weights and moments, and needs most; the next version is copied at the same time.
    assert little.peak == state + 2 * published + 8 * result.parameters + state
    layer, rest = 0, sum(parameter.numel() for parameter in model.parameters())
    for item in model.model.layers:
        layer = sum(parameter.numel() for parameter in item.parameters())
        rest -= layer
    assert (half.weights, half.gradients, result.gathered) == (result.weights, result.gradients // 2, 0)
    assert half.gathered == 2 * 4 * (2 * layer + rest)  # weights and their gradients
    assert result.step_s == pytest.approx(6 * result.parameters * 10_000 / 1e10)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_run_with_adapters_is_estimated(family: str, tmp_path: Path) -> None:
    directory = build(family, tmp_path / "base")
    with ghostly():
        result = estimate(
            empty(directory, lora=Lora(rank=2)), budget=64, longest=32, tokens=100, recompute=False, flops=1e10
        )
    real = load(directory, lora=Lora(rank=2))
    assert result.parameters == sum(parameter.numel() for parameter in real.parameters())
    assert result.trained == sum(parameter.numel() for parameter in real.parameters() if parameter.requires_grad)
    assert 0 < result.gradients < result.weights and result.activations > 0


def test_a_policy_of_a_run_is_exported(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(NotFound, match="no published weights"):
        export(run, tmp_path / "out")
    shape = policy.Shape(width=32, layers=1, heads=2, inner=48)
    model = policy.make(run / "policy", ["ls"], seed=0, shape=shape)
    files = {path.name: path.read_bytes() for path in (run / "policy").glob("*.json")}
    files["config.json"] = json.dumps(json.loads(files["config.json"]) | {"dtype": "float32"}).encode()
    publisher = Publisher(VersionStore(run / "weights"))
    for version in (1, 2):
        publisher.publish(version, model.state_dict(), files)
        with torch.no_grad():
            model.model.norm.weight.add_(1)
    assert export(run, tmp_path / "out") == 2 and export(run, tmp_path / "older", 1) == 1
    result, older = (load_model(tmp_path / name).state_dict() for name in ("out", "older"))
    assert result.keys() == model.state_dict().keys()
    assert torch.equal(result["model.norm.weight"], older["model.norm.weight"] + 1)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted([*files, "model.safetensors"])
    policy.load_tokenizer(tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype is torch.bfloat16
    assert json.loads((tmp_path / "out" / "config.json").read_bytes())["dtype"] == "bfloat16"
    with pytest.raises(Conflict, match="exists"):
        export(run, tmp_path / "out")


def test_a_run_that_takes_turns_never_does_both() -> None:
    share = {"task": "examples/fix_the_service", "share": {"rollout": 60, "train": 40.0}}
    made = make({**share, "staleness": 0})
    assert made.share is not None and (made.share.rollout, made.share.slowdown) == (60, 2)
    for also in ({}, {"staleness": 0, "stream": True}):
        with pytest.raises(Invalid, match="never both"):
            make({**share, **also})


def test_groups_as_trees_need_something_to_branch_and_a_baseline_of_the_group() -> None:
    from trainer.config import need_objective

    content: dict[str, Any] = {
        "task": "examples/fix_the_service",
        "size": 4,
        "branching": {"roots": 2, "by": "entropy"},
    }
    made = make(content)
    assert made.branching is not None and made.branching.by == "entropy" and made.visit.trajectories == 16
    need_objective(made)
    with pytest.raises(Invalid, match="nothing is left to branch"):
        make({**content, "branching": {"roots": 4}})
    with pytest.raises(Invalid, match="leave out one"):
        make({**content, "tail": 1.25})
    with pytest.raises(Invalid, match="branches need"):
        need_objective(make({**content, "objective": "reinforce++"}))
    with pytest.raises(Invalid, match="effects"):
        make({**content, "effects": {"forbid": ["nosuch"]}})
