"""The tree of settings: any leaf as key=value, bounds, presets with changes, and that each leaf reaches the loss."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from pagurus.cli import application
from rollout.config import PlaySettings, RolloutConfig
from rollout.engine.client import Sampling
from rollout.engine.embedded.model import ModelConfig, Qwen3
from rollout.episode.spec import PhaseTimeouts
from rollout.messages import Batch, Group, Trajectory, TurnRecord
from rollout.plan import RolloutPlan
from sandbox.errors import Invalid
from trainer import optimisers
from trainer import run as trainer_run
from trainer.batches.groups import samples as samples_of
from trainer.batches.sample import Sample, refusal
from trainer.config import TrainConfig, gather, rollout_plan
from trainer.learner import Learner, rewards_of
from trainer.models.logprobs import logprobs
from trainer.models.scorer import Scorer
from trainer.objectives import KL, Advantage, Clip, Metrics, Rewards, SampledTokens, bounded, build, credit, named
from trainer.objectives.advantage import Overlong, gae
from trainer.run import TrainerRun
from trainer.settings import (
    EvaluationSettings,
    ObjectiveSettings,
    OptimiserSettings,
    TimeoutSettings,
    descriptions,
    flat,
)
from trainer.steps import work_plan

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "fix_the_service"


def reported(*settings: str, **options: Any) -> TrainConfig:
    return gather(EXAMPLE, options, settings)


def test_any_leaf_is_set_by_its_path() -> None:
    made = reported(
        "objective.clip.high=0.28", "optimiser.rate=1e-6", "optimiser.betas=[0.9, 0.99]", "sampling.temperature=0.7",
        "evaluation.samples=4", "objective.corrections=['tis']", "over_stale=drop", "template.enable_thinking=false",
    )  # fmt: skip
    result = dict(flat(made))
    assert result["objective.clip.high"] == 0.28 and result["optimiser.rate"] == 1e-6
    assert result["optimiser.betas"] == (0.9, 0.99) and result["over_stale"] == "drop"
    assert made.sampling == Sampling(max_tokens=16, temperature=0.7)  # what is not set stays
    assert made.template == {"enable_thinking": False} and made.evaluation.samples == 4


def test_settings_overrule_options_which_overrule_the_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(f'task = "{EXAMPLE}"\nsteps = 3\ngroups = 3\nobjective = "gspo"\n')
    made = gather(path, {"groups": 5, "objective": "dapo"}, ["groups=7", "objective.clip.low=0.1"])
    assert (made.steps, made.groups, made.objective.preset, made.objective.clip.low) == (3, 7, "dapo", 0.1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("optimiser.rat=1", "unknown key 'optimiser.rat'.*nearest: rate"),
        ("clip_high=1", "unknown key"),
        ("steps.more=1", "steps"),
        ("steps", "no setting"),
        ("optimiser.kind=sgd", "optimiser.kind"),
        ("objective.kl.beta=-1", "objective.kl.beta"),
        ("objective.overlong.penalty=1", "`penalty` needs `limit`"),
        ("optimiser.updates=0", "optimiser.updates"),
    ],
)
def test_wrong_settings_are_refused_by_their_path(text: str, said: str) -> None:
    with pytest.raises(Invalid, match=said):
        reported(text)


def test_the_dry_run_prints_every_leaf_and_the_resolved_objective() -> None:
    shown = CliRunner().invoke(application, ["train", str(EXAMPLE), "--dry-run", "objective.clip.high=0.31"])
    assert shown.exit_code == 0, shown.output
    rows = {line.split("│")[1].strip() for line in shown.output.splitlines() if "│" in line}
    assert rows >= {name for name, _ in flat(reported())}
    assert "high=0.31" in shown.output.replace(" ", "") and "within_groups" in shown.output


def test_settings_in_no_table_are_options_by_their_description(tmp_path: Path) -> None:
    runner = CliRunner()
    shown = " ".join(runner.invoke(application, ["train", "--help"]).output.split())
    text = descriptions(TrainConfig)
    for name in ("groups", "over_stale", "model", "staleness", "stream", "objective", "attempts", "pace"):
        assert f"--{name.replace('_', '-')}" in shown and text[name][1:30] in shown
    assert "--optimiser" not in shown and "--mixture" not in shown and "--task" not in shown
    plan = tmp_path / "plan.toml"
    plan.write_text(f'task = "{EXAMPLE}"\nsteps = 4\nstream = true\nimage = "debian"\n')
    options = ["--steps", "5", "--no-stream", "--image", "3", "--objective", "dapo", "--staleness", "auto"]
    run = runner.invoke(application, ["train", str(plan), *options, "--dry-run", "steps=6"])
    rows = {part[1].strip(): part[2].strip() for line in run.output.splitlines() if len(part := line.split("│")) > 2}
    assert run.exit_code == 0 and rows["steps"] == "6" and rows["stream"] == "False", run.output
    assert (rows["image"], rows["objective.preset"], rows["staleness"]) == ("3", "dapo", "auto")
    wrong = runner.invoke(application, ["train", str(plan), "--groups", "0"])
    assert isinstance(wrong.exception, Invalid) and "groups" in wrong.exception.message


def test_no_setting_is_declared_twice() -> None:
    """But for two whose default is another one in a run, and for a rollout's plan, which has what was derived."""
    inherited = {*PlaySettings.__struct_fields__, *PhaseTimeouts.__struct_fields__}
    own = {name for kind in (TrainConfig, RolloutConfig, TimeoutSettings) for name in vars(kind)["__annotations__"]}
    assert own & inherited == {"sampling", "visit"}
    bounds = {field.name: field.type for field in msgspec.structs.fields(TrainConfig)}
    plan = {field.name: field.type for field in msgspec.structs.fields(RolloutPlan)}
    derived = {"task", "mixture", "curriculum", "rewards", "engine", "lora", "pace", "steps", "faults"}
    assert {name for name in bounds.keys() & plan.keys() if bounds[name] != plan[name]} <= derived


@pytest.mark.parametrize("name", ["cispo", "rloo", "dr_grpo"])
def test_a_preset_without_changes_is_its_row(name: str) -> None:
    assert build(ObjectiveSettings(preset=name), length=9) == bounded(named(name, length=9))


def test_changes_of_a_preset_reach_the_objective() -> None:
    made = build(
        msgspec.convert(
            {
                "preset": "grpo", "clip": {"high": 0.3, "dual": 0.0}, "kl": {"beta": 0.0}, "entropy": 0.01,
                "advantage": {"scale": "none"}, "mean": "constant", "length": 64,
                "corrections": [{"name": "icepop", "low": 0.1}, "tis"],
            },
            ObjectiveSettings,
        )
    )  # fmt: skip
    assert made.clip == Clip(high=0.3) and made.kl is None and made.entropy == 0.01
    assert made.advantage == Advantage(baseline="group") and made.aggregate.length == 64
    assert (made.corrections[0].low, made.corrections[0].high, made.corrections[1].high) == (0.1, 5.0, 2.0)
    added = build(msgspec.convert({"preset": "dapo", "kl": {"beta": 0.1, "kind": "k2"}}, ObjectiveSettings))
    assert added.kl == KL(beta=0.1, kind="k2")
    with pytest.raises(Invalid, match="no ratio to clip"):
        build(msgspec.convert({"preset": "rloo", "clip": {"low": 0.1}}, ObjectiveSettings))


def test_the_entropy_has_the_gradient_of_a_softmax() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    head = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    targets, warmth = torch.randint(11, (7,)), torch.rand(7, dtype=torch.float64) + 0.5
    weights = torch.randn(2, 7, dtype=torch.float64)
    logs = ((hidden @ head.T) / warmth[:, None]).log_softmax(-1)
    plain = logs.gather(-1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)
    for chunk in (1 << 20, 33):  # in one part, in parts of three rows
        ours = logprobs(hidden, head, targets, warmth, chunk=chunk)
        for chosen in ((0, 1), (1,), (0,)):
            target = torch.autograd.grad(
                sum((weights[i] * plain[i]).sum() for i in chosen), (hidden, head), retain_graph=True
            )
            result = torch.autograd.grad(
                sum((weights[i] * ours[i]).sum() for i in chosen), (hidden, head), retain_graph=True
            )
            for one, other in zip(target, result, strict=True):
                assert torch.allclose(one, other, atol=1e-12)


def test_a_weighted_kl_is_multiplied_by_the_ratio() -> None:
    new = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    engine, reference = torch.tensor([-1.5, -1.0]).double(), torch.tensor([-2.0, -2.5]).double()
    zeros = torch.zeros(2, dtype=torch.float64)
    tokens = SampledTokens(new, engine, torch.zeros(2).long(), zeros, zeros + 0.5, zeros, reference=reference)
    made = build(msgspec.convert({"preset": "dapo", "kl": {"beta": 0.1, "weighted": True}}, ObjectiveSettings))
    x = reference - new
    target = (0.5 * 0.1 * (x.exp() - 1 - x) * (new - engine).exp()).sum()
    assert made.loss(tokens, Metrics()).item() == pytest.approx(target.item())


def loop(advantage: Advantage, batch: Rewards) -> np.ndarray:
    """Equation 16 of arXiv 1506.02438, term by term, in numpy."""
    assert batch.values is not None
    values, result, at = batch.values.numpy(), np.zeros(len(batch.values)), 0
    penalty = np.zeros(len(values)) if batch.penalty is None else batch.penalty.numpy()
    for length, reward in zip(batch.lengths.tolist(), batch.rewards.tolist(), strict=True):
        running = following = 0.0
        for t in reversed(range(at, at + length)):
            earned = (reward if t == at + length - 1 else 0.0) - penalty[t]
            running = (
                earned + advantage.discount * following - values[t] + advantage.discount * advantage.trace * running
            )
            following = values[t]
            result[t] = running
        at += length
    return result


@pytest.mark.parametrize("trace", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("lengths", [[1], [5, 0, 3, 1], [17, 64, 33], [0, 0, 2]])
def test_generalised_advantages_equal_the_sum_of_their_definition(lengths: list[int], trace: float) -> None:
    rng = np.random.default_rng(len(lengths))
    total = sum(lengths)
    batch = Rewards(
        torch.tensor(rng.normal(size=len(lengths))), torch.zeros(len(lengths)).long(), torch.tensor(lengths),
        penalty=torch.tensor(rng.normal(size=total)), values=torch.tensor(rng.normal(size=total)),
    )  # fmt: skip
    for discount in (1.0, 0.99):
        advantage = Advantage(baseline="critic", discount=discount, trace=trace)
        assert np.allclose(gae(advantage, batch).numpy(), loop(advantage, batch), atol=1e-12)


def process_supervision(groups: list[list[list[float]]], *, scaled: bool) -> list[list[float]]:
    """Section 4.1.3 of arXiv 2402.03300, in numpy: of each turn of each episode of each group."""
    result = []
    for group in groups:
        rewards = np.concatenate([np.array(episode) for episode in group])
        scale = rewards.std(ddof=1) + 1e-6 if scaled else 1.0
        for episode in group:
            normal = (np.array(episode) - rewards.mean()) / scale
            result.append([float(normal[turn:].sum()) for turn in range(len(episode))])
    return result


@pytest.mark.parametrize("preset", ["grpo", "dr_grpo"])
def test_credit_by_turns_is_process_supervision(preset: str) -> None:
    rng = np.random.default_rng(1)
    groups = [[list(rng.normal(size=int(rng.integers(1, 5)))) for _ in range(3)] for _ in range(4)]
    groups[2] = [[0.5, 0.5], [0.5], [0.5]]  # one that says nothing
    made, target = [], []
    expected = iter(process_supervision(groups, scaled=preset == "grpo"))
    for number, group in enumerate(groups):
        for member, rewards in enumerate(group):
            of_turn = next(expected)  # 0 where all of a group are equal
            lengths = [int(item) for item in rng.integers(1, 4, size=len(rewards))]
            turns = [turn for turn, length in enumerate(lengths) for _ in range(length)]
            size = len(turns) + 1
            sample = Sample(
                tokens=[1] * size, mask=[0] + [1] * len(turns), logprobs=[-1.0] * size, reward=sum(rewards),
                group=f"p{number}", name=f"p{number}/{member}", turns=[-1, *turns], turn_rewards=rewards,
            )  # fmt: skip
            made.append(sample)
            target += [of_turn[turn] for turn in turns]
    settings = msgspec.convert(
        {"preset": preset, "kl": {"beta": 0}, "advantage": {"credit": "turns"}}, ObjectiveSettings
    )
    objective = build(settings)
    earned = credit(objective, rewards_of(made, turns=True))
    assert np.allclose(earned.advantage.numpy(), target, atol=1e-9)
    assert earned.needed.tolist() == [group != 2 for group in range(4) for _ in range(3)]
    silent_part = credit(objective, rewards_of(made[6:9], turns=True))
    assert not silent_part.advantage.any()  # as groups come in, one by one, too


def test_credit_by_turns_takes_an_end_and_pieces_of_an_episode() -> None:
    turns = [TurnRecord(index=n, tokens=2, reward=r) for n, r in enumerate((0.25, 0.0))]
    trajectory = Trajectory(
        prompt="p0", tokens=[9, 1, 2, 9, 3, 4], mask=[0, 1, 1, 0, 1, 1], logprobs=[-1.0] * 6, versions=[0] * 6,
        turns=turns, reward=1.25, breaks=[3],
    )  # fmt: skip
    group = Group(prompt="p0", seed=0, trajectories=[trajectory])
    first, second = samples_of(Batch(version=0, groups=[group]), turns=True)
    assert first.turn_rewards == second.turn_rewards == [0.25, 1.0]
    assert (first.turns, second.turns) == ([-1, 0, 0], [-1, 1, 1])
    made = rewards_of([first, second], turns=True)
    assert made.turns is not None
    assert made.turns.rewards.tolist() == [0.25, 1.0] and made.turns.of_token.tolist() == [0, 0, 1, 1]
    (plain, _) = samples_of(Batch(version=0, groups=[group]))
    assert plain.turns == plain.turn_rewards == []
    wrong = msgspec.structs.replace(first, turn_rewards=[])
    assert refusal(wrong, 30) == "turns that its rewards do not fit"
    for preset in ("ppo", "rloo", "pooled"):
        with pytest.raises(Invalid, match="credit by turns"):
            build(msgspec.convert({"preset": preset, "advantage": {"credit": "turns"}}, ObjectiveSettings))


def test_overlong_episodes_are_penalised_and_cut_ones_filtered() -> None:
    rule = Overlong(penalty=1.0, limit=10, buffer=4)
    lengths = torch.tensor([5, 6, 8, 10, 99])
    assert rule.of(torch.ones(5), lengths).tolist() == [1.0, 1.0, 0.5, 0.0, 0.0]
    rewards = Rewards(
        torch.tensor([1.0, 0.0, 1.0, 0.0]).double(), torch.tensor([0, 0, 1, 1]), torch.tensor([3, 3, 3, 3]),
        truncated=torch.tensor([False, True, False, False]),
    )  # fmt: skip
    made = build(msgspec.convert({"preset": "dapo", "overlong": {"filter": True}}, ObjectiveSettings))
    earned = credit(made, rewards)
    assert earned.needed.tolist() == [True, False, True, True] and earned.counts.tokens == 9
    cut = Sample(tokens=[1, 2, 3], mask=[0, 1, 1], logprobs=[0.0, -1.0, -1.0], truncated=True)
    assert rewards_of([cut]).truncated.tolist() == [True]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        (OptimiserSettings(rate=1.0), [1.0, 0.75, 0.5, 0.25]),
        (OptimiserSettings(rate=1.0, schedule="constant", warm_up=3), [0.25, 0.5, 0.75, 1.0]),
        (
            OptimiserSettings(rate=1.0, schedule="cosine", final_share=0.0),
            [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, 0.1464466],
        ),
        (OptimiserSettings(rate=1.0, warm_up=2), [1 / 3, 2 / 3, 1.0, 0.5]),
    ],
)
def test_the_rate_follows_its_schedule(settings: OptimiserSettings, rates: list[float]) -> None:
    assert [settings.rate_at(step, 4) for step in range(4)] == pytest.approx(rates)


def tiny(*, critic: bool = False) -> Scorer:
    model = Qwen3(ModelConfig(vocab_size=30, hidden_size=16, intermediate_size=24, num_hidden_layers=1))
    model.initialise(0)
    return Scorer(model, critic=critic)


def batch() -> list[Sample]:
    return [
        Sample(tokens=[3, 4, 5, 6 + i], mask=[0, 1, 1, 1], logprobs=[0.0, -3.0, -3.0, -3.0], reward=float(i), group="g")
        for i in range(2)
    ]


def test_muon_steps_the_matrices_of_layers_and_adamw_the_rest() -> None:
    scorer = tiny()
    learner = Learner(scorer, named("pooled"), OptimiserSettings(kind="muon", rate=1e-2))
    adamw, muon = learner.optimisers
    held = {id(p) for group in muon.param_groups for p in group["params"]}
    names = {name for name, parameter in scorer.named_parameters() if id(parameter) in held}
    assert names and all("layers." in name and "norm" not in name for name in names)
    before = {name: parameter.clone() for name, parameter in scorer.named_parameters()}
    learner.step(batch())
    moved = {name for name, parameter in scorer.named_parameters() if not torch.equal(parameter, before[name])}
    assert names <= moved and len(moved) > len(names)
    assert isinstance(adamw, torch.optim.AdamW)


def test_the_critic_warms_up_alone_at_a_rate_of_its_own() -> None:
    scorer = tiny(critic=True)
    settings = msgspec.convert(
        {"preset": "ppo", "kl": {"beta": 0.0}, "critic": {"rate": 0.1, "warm_up": 1}}, ObjectiveSettings
    )
    learner = Learner(scorer, build(settings), OptimiserSettings(rate=1e-2))
    optimisers.set_rate(learner.optimisers, 5e-3)
    assert sorted(group["lr"] for group in learner.optimisers[0].param_groups) == pytest.approx([5e-3, 5e-2])
    before = {name: parameter.clone() for name, parameter in scorer.named_parameters()}
    learner.critic_only = True
    learner.step(batch())
    moved = {name for name, parameter in scorer.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {"critic.weight", "critic.bias"}
    learner.critic_only = False
    learner.step(batch())
    assert not all(torch.equal(p, before[n]) for n, p in scorer.named_parameters() if not n.startswith("critic"))


def test_eight_bit_state_says_what_it_needs() -> None:
    try:
        made = optimisers.make(nn.Linear(2, 2), OptimiserSettings(kind="adamw8bit"))
    except Invalid as error:
        assert "bitsandbytes" in str(error)
    else:
        assert made[0].__class__.__name__ == "AdamW8bit"


def test_every_timeout_arrives_where_it_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = TimeoutSettings.__struct_fields__
    made = reported("ranks=2", *(f"timeouts.{name}={number + 7}" for number, name in enumerate(names)))
    rollout = rollout_plan(made, EXAMPLE / "start")
    used = {name: getattr(rollout.config.limits, name) for name in PhaseTimeouts.__struct_fields__}
    used |= {"refused": rollout.config.timeout, "host": rollout.host_timeout}
    used["collective"] = work_plan(made, Path()).timeout
    watched: dict[str, float] = {}
    monkeypatch.setattr(trainer_run, "DistributedSteps", lambda plan, *, ranks, report, **watch: watched.update(watch))
    TrainerRun._steps(cast(TrainerRun, SimpleNamespace(config=made, directory=tmp_path)))
    used |= {"rank_silent": watched["silent"], "rank_stuck": watched["stuck"]}
    assert used == {name: number + 7 for number, name in enumerate(names) if name != "rollout"}


def test_the_page_of_settings_is_that_of_the_structs() -> None:
    script = Path(__file__).parents[2] / "scripts" / "settings.py"
    printed = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    assert printed == (script.parents[1] / "docs" / "settings.md").read_text(), "python scripts/settings.py --write"
    assert printed.count("\n- `") == len(list(flat(reported())))


def test_evaluations_sample_as_training_but_for_what_they_say() -> None:
    training = Sampling(max_tokens=16, temperature=1.0, seed=3)
    assert EvaluationSettings().of(training) == training
    changed = EvaluationSettings(temperature=0.0, max_tokens=64).of(training)
    assert (changed.temperature, changed.max_tokens, changed.seed) == (0.0, 64, 3)
