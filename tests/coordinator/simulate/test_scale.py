"""A plan's arithmetic against the models, the trainer and the engine themselves; byte counts and memory exactly."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig
from typer.testing import CliRunner

from coordinator.simulate.clock import VirtualClock
from coordinator.simulate.engines import SimulatedEngine, StepCosts
from coordinator.simulate.rollouts import Plan, RolloutSimulation, SimulatedTurn
from coordinator.simulate.scale import course, memory, timing, traffic, trajectories
from coordinator.simulate.scale.plan import ScalePlan, parse
from coordinator.simulate.scale.references import GPUS, MODELS
from coordinator.simulate.scale.report import PlannedRun, binds, compute, not_today, report, sources
from coordinator.simulate.scale.shapes import BF16, CHUNK, ModelShape, from_config
from coordinator.simulate.scale.traffic import ShardedGroup
from pagurus.training.simulate import verbs
from rollout.decide.view import SchedulingRules
from rollout.engine.embedded.model import KVCache, ModelConfig, Qwen3
from sandbox.errors import Invalid, Unsupported
from trainer.batches.pack import pack
from trainer.batches.sample import Sample
from trainer.estimate import ghostly, resident, retained
from trainer.models.scorer import Scorer

PLANS = Path(__file__).parents[3] / "examples" / "plans"
SMALL = ModelShape(layers=3, hidden=64, heads=4, kv_heads=2, head_dim=32, intermediate=160, vocabulary=300)
PLAN = """
name = "small"
model = "Qwen3-32B"
[trainer]
gpu = "H800"
gpus = 16
[[pools]]
gpu = "H20"
gpus = 16
tensor = 4
[workload]
groups = 4
size = 2
in_flight = 12
turns = {mean = 4}
"""


def model(shape: ModelShape) -> Qwen3:
    return Qwen3(
        ModelConfig(
            vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim, max_position_embeddings=8192, tie_word_embeddings=shape.tied,
        )
    )  # fmt: skip


def packed(length: int, count: int) -> list[Sample]:
    mask = [0] * (length // 2) + [1] * (length - length // 2)
    return [Sample(tokens=[1] * length, mask=mask, logprobs=[0.0] * length)] * count


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_the_model(name: str) -> None:
    shape = MODELS[name]
    common = {
        "hidden_size": shape.hidden, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied,
    }  # fmt: skip
    config = (
        Qwen3MoeConfig(
            **common, num_experts=shape.experts, num_experts_per_tok=shape.experts_per_token,
            moe_intermediate_size=shape.expert_intermediate, decoder_sparse_step=1, mlp_only_layers=[],
        )
        if shape.experts
        else Qwen3Config(**common, intermediate_size=shape.intermediate)
    )  # fmt: skip
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
    assert shape.parameters == sum(item.numel() for item in made.parameters())
    assert round(shape.active / 1e9) == {"Qwen3-32B": 33, "Qwen3-235B-A22B": 22}[name]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_flop_are_those_of_the_trainer(recompute: bool, tied: bool) -> None:
    """Products of matrices, to the last one. The counter does not know attention on a CPU: its part is left out."""
    shape = msgspec.structs.replace(SMALL, tied=tied)
    batch = pack(packed(40, 3))
    sampled, scorer = len(batch.targets), Scorer(model(shape), recompute=recompute)
    with FlopCounterMode(display=False) as forward:
        loss = scorer(batch).new.sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert forward.get_total_flops() == shape.forward(120, 0.0, sampled)
    assert backward.get_total_flops() == shape.backward(120, 0.0, sampled, micro=sampled, recompute=recompute)


def test_the_head_is_computed_twice_where_logits_are_more_than_a_chunk() -> None:
    shape = msgspec.structs.replace(SMALL, vocabulary=CHUNK // 60)
    with ghostly():
        batch = pack(packed(80, 2))
        scorer = Scorer(model(shape))
        with FlopCounterMode(display=False) as forward:
            loss = scorer(batch).new.sum()
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    assert forward.get_total_flops() == shape.forward(160, 0.0, 80)
    assert backward.get_total_flops() == shape.backward(160, 0.0, 80, micro=80, recompute=False)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_activations_are_what_autograd_retains(bf16: bool, recompute: bool) -> None:
    for shape, length, near in ((SMALL, 512, 0.02), (MODELS["Qwen3-32B"], 4096, 0.001)):
        with ghostly():
            counted = retained(Scorer(model(shape), bf16=bf16, recompute=recompute), length=length, count=1)
        computed = memory.retained(shape, length, length - 1, bf16=bf16, recompute=recompute)
        assert computed == pytest.approx(counted, rel=near)


def test_a_rank_has_what_dry_run_says_and_an_engine_its_cache() -> None:
    plan = parse(PLAN)
    with ghostly():
        expected = resident(model(plan.shape), ranks=16, optimiser="adamw")
    parts = memory.of_trainer(plan, 0.3)
    shared = plan.trainer.gradient_bytes * (memory.layer_of_rank(plan) + plan.shape.outside)
    assert parts["weights"] + parts["gradients"] + parts["optimiser"] - shared == pytest.approx(expected)
    cache = KVCache(model(SMALL).config, rows=5, length=7)
    size = sum(item.nbytes for item in (*cache.keys, *cache.values))
    assert size == 5 * 7 * SMALL.cache_bytes() * 4 // BF16
    assert SMALL.cache_bytes(tensor=2) == SMALL.cache_bytes(tensor=4) == SMALL.cache_bytes() // 2


def test_a_token_of_a_trajectory_has_the_bytes_of_its_message() -> None:
    count = 4000
    sample = Sample(tokens=[100_000] * count, mask=[1] * count, logprobs=[-0.1] * count)
    assert len(msgspec.msgpack.encode(sample)) / count == pytest.approx(traffic.TOKEN_BYTES + 1, rel=0.02)
    assert traffic.TOKEN_BYTES == 14  # half of the ids are below 65,536, which msgpack writes in three bytes


def test_collectives_by_hand() -> None:
    """16 ranks on two machines: each receives 15/16; what comes from the other machine is shared among its eight."""
    link = ShardedGroup(16, 8).gathered(1600.0)
    assert (link.nvlink, link.nic) == (1500.0, 100.0)
    assert ShardedGroup(4, 8).gathered(1600.0).nic == 0.0
    plan = parse(PLAN)
    means = trajectories.means(plan, 0)
    train, count = traffic.training(plan, means), traffic.micro_batches(plan, plan.batch * means.tokens)
    everything = 4.0 * (plan.shape.layers * plan.shape.layer + plan.shape.outside)
    assert train["forward"].nvlink == pytest.approx(count * everything * 15 / 16)
    assert train["backward"].nvlink == pytest.approx(
        count * 15 / 16 * (2 * everything - 4.0 * plan.shape.outside)
    )  # what is in no layer stays gathered


def test_experts_of_a_gpu_of_their_own_are_not_gathered() -> None:
    text = (PLANS / "qwen3-235b.toml").read_text()
    alone, shared = parse(text), parse(text.replace("expert = 8", "expert = 4"))
    means = trajectories.means(alone, 0)
    experts = alone.shape.in_experts / 4 / 8 / alone.shape.layers
    assert memory.layer_of_rank(shared) - memory.layer_of_rank(alone) == pytest.approx(experts)
    more = traffic.training(shared, means)["forward"].nvlink - traffic.training(alone, means)["forward"].nvlink
    assert more > 0 and alone.shape.touched(1) == pytest.approx(alone.shape.active - alone.shape.embedding, rel=0.001)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("gpus = 16\n[[", "gpus = 0\n[["), "trainer.gpus must be at least 1"),
        (('gpu = "H20"', 'gpu = "H2O"'), r"pools\[0\].gpu: no kind 'H2O'"),
        (("tensor = 4", "tensor = 3"), r"pools\[0\].tensor is 3, which does not divide 16"),
        (('model = "Qwen3-32B"', 'model = "Qwen"'), "model: no shape of 'Qwen'"),
        (("turns = {mean = 4}", "turns = {mean = -4}"), "workload.turns.mean must be more than 0"),
        (("in_flight = 12", "in_flite = 12"), "workload: there is no field in_flite"),
        (("groups = 4\n", ""), "workload: the field groups is missing"),
        (("size = 2", "size = 2\nover_stale = 'drop'"), "workload.over_stale"),
        (('name = "small"', "name = "), "is no TOML"),
        (("gpus = 16\n[[", "gpus = 16\nexpert = 2\n[["), "trainer.expert is more than the experts"),
    ],
)
def test_what_is_wrong_is_named_by_its_key(change: tuple[str, str], said: str) -> None:
    assert change[0] in PLAN
    with pytest.raises(Invalid, match=said):
        parse(PLAN.replace(*change))


def test_a_shape_is_read_from_a_config() -> None:
    assert from_config(model(SMALL).config.to_json()) == msgspec.structs.replace(SMALL, source="its config.json")
    mixture = MODELS["Qwen3-235B-A22B"]
    config = {"num_hidden_layers": 94, "hidden_size": 4096, "num_attention_heads": 64, "num_key_value_heads": 4,
              "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": False, "num_experts": 128,
              "num_experts_per_tok": 8, "moe_intermediate_size": 1536}  # fmt: skip
    assert from_config(config) == msgspec.structs.replace(mixture, source="its config.json")


def test_a_version_is_its_changes_or_an_image_if_that_is_shorter() -> None:
    plan = parse(PLAN)
    words = plan.shape.parameters
    assert traffic.version(plan) == pytest.approx(0.0069 * 2.75 * words)
    many = parse(PLAN + "[publication]\nchanged = 0.9\n")
    assert traffic.version(many) == pytest.approx(1.37 * words)
    one = timing.publication(parse(PLAN + "[publication]\nranks = false\n"))
    assert one["encode"] == pytest.approx(16 * timing.publication(plan)["encode"]) and "gather on rank 0" in one


def test_kinds_and_models_of_a_plans_own() -> None:
    own = """
[gpus.H20]
flops = 1e14
memory = 10
bandwidth = 1e12
nvlink = 1e11
nic = 1e10
[models.tiny]
layers = 2
hidden = 8
heads = 2
kv_heads = 1
head_dim = 4
intermediate = 16
vocabulary = 32
"""
    plan = parse(PLAN.replace("Qwen3-32B", "tiny") + own)
    assert plan.gpu("H20").flops == 1e14 and plan.gpu("H800") == GPUS["H800"] and plan.shape.layers == 2
    assert "tiny: the plan" in list(sources(plan))


@pytest.mark.parametrize("name", ["qwen3-32b", "qwen3-235b"])
def test_the_examples_fit_and_name_their_sources(name: str) -> None:
    plan = parse((PLANS / f"{name}.toml").read_text())
    means = trajectories.means(plan, 0)
    for parts, kind in (
        (memory.of_trainer(plan, means.written / means.tokens), "H800"),
        (memory.of_engine(plan, plan.pools[0]), "H20"),
    ):
        assert sum(parts.values()) < 0.92 * plan.gpu(kind).memory * memory.GIB
    assert 30_000 < means.longest <= plan.workload.length
    said = "\n".join(sources(plan))
    assert "InferSim" in said and "alibaba/ROLL" in said and "assumed" in said and "\n" in said


def test_what_does_not_fit_binds_first() -> None:
    run = small()
    assert binds(run)[0].startswith("memory of the trainer on H800 does not fit")  # 32B on 16 GPUs at 32,768 tokens
    assert any("publish their own rows" in line for line in not_today(run))


def small() -> PlannedRun:
    return compute(parse(PLAN))


def test_parts_add_up_to_what_the_report_says() -> None:
    run = small()
    made = report(run)
    assert made["step"]["seconds"] >= made["step"]["trainer_waits_s"]  # type: ignore[index, call-overload]
    assert run.steps.seconds == pytest.approx(run.trainer_s + run.steps.waited_s)
    assert run.trainer_s == pytest.approx(run.training_s + sum(run.publication.values()))
    item, engines = run.engines[0], 4
    assert item.in_flight * engines == run.plan.workload.in_flight
    assert item.answers == pytest.approx(item.in_flight * item.decode_s / item.trajectory_s, rel=0.01)
    step = timing.decoding_step(run.plan, run.plan.pools[0], item.answers, run.means.context)
    assert (
        item.costs.step(1) < item.costs.base + item.answers * item.costs.per_sequence == pytest.approx(step, rel=0.05)
    )


def test_a_fixed_point_is_what_the_virtual_clock_comes_to() -> None:
    """On one engine, whose batches are so large that new versions hardly matter. Equal turns would come in herds."""
    text = PLAN.replace("in_flight = 12", "in_flight = 16").replace("groups = 4", "groups = 100")
    text = text.replace("gpus = 16\ntensor", "gpus = 4\ntensor").replace("{mean = 4}", "{mean = 12}")
    spread = "written = {mean = 200, deviation = 0.8}\ntool_s = {mean = 2, deviation = 1.0}\n"
    plan = parse(text + spread)
    item = course.steady(plan, plan.pools[0], trajectories.means(plan, 0))
    came = RolloutSimulation(
        Plan(
            rules=SchedulingRules(groups=10, size=2, staleness=8, concurrency=16),
            engines=[item.costs],
            workload=lambda prompt, member: trajectories.turns(plan.workload, 0, prompt, member),
            prompts=400,
        )
    ).run()
    assert came.seconds == pytest.approx(800 / item.per_second, rel=0.1)


def test_an_engine_that_reads_samples_nothing() -> None:
    ended = dict[str, float]()
    for exclusive in (False, True):
        clock = VirtualClock()
        engine = SimulatedEngine(clock, StepCosts(base=0.1, prefill=10.0, exclusive=exclusive))
        engine.request(prompt=0, tokens=50, done=lambda e=exclusive, c=clock: ended.update({f"{e}": c.now}))
        clock.after(1.0, lambda e=engine: e.request(prompt=20, tokens=1, done=lambda: None))
        clock.run()
        assert engine.busy <= clock.now + 1e-9 or not exclusive
    assert ended == {"False": pytest.approx(5.0), "True": pytest.approx(7.0)}


def test_a_new_version_has_contexts_read_again() -> None:
    plan = Plan(
        rules=SchedulingRules(groups=2, size=2, staleness=1, concurrency=8),
        engines=[StepCosts(base=0.01, prefill=1000.0)],
        workload=lambda prompt, member: [SimulatedTurn(100, 50, 0.1)] * (4 + prompt % 5),
        prompts=20,
        trainer=0.1,
    )
    once, again = (RolloutSimulation(replace(plan, recompute=flag)).run() for flag in (False, True))
    assert again.read > 1.1 * once.read and once.tokens == again.tokens


def test_the_verb_prints_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(PLAN)
    came = CliRunner().invoke(verbs, [str(path), "--json"])
    assert came.exit_code == 0, came.output
    made = json.loads(came.stdout)
    assert {"step", "links", "memory_gib", "binds", "sources"} <= made.keys()
    assert "binds" in CliRunner().invoke(verbs, [str(path)]).stdout
    with pytest.raises(Unsupported):
        CliRunner().invoke(verbs, [str(path), "--report", "x.html"], catch_exceptions=False)


def test_more_bandwidth_helps_where_bandwidth_binds() -> None:
    """And nothing else: a control."""
    plan = parse(PLAN)
    pool = plan.pools[0]
    faster = msgspec.structs.replace(plan, gpus={"H20": msgspec.structs.replace(GPUS["H20"], bandwidth=8192e9)})
    slow, fast = (timing.decoding_step(item, pool, 8, 4000) for item in (plan, faster))
    assert fast < 0.7 * slow and timing.prefill(plan, pool, 4000) == timing.prefill(faster, pool, 4000)
    assert isinstance(plan, ScalePlan)
