"""Router replay: the experts that a batch names are the ones that compute, whatever the router would choose."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from rollout.engine.embedded.core import Core
from rollout.engine.gpus import visible
from rollout.experts import RoutedExperts
from rollout.store.samples import SampleStore
from sandbox.errors import Invalid
from tests.rollout.test_paged import made, play, request_model
from tests.support.daemon_host import Daemon
from tests.support.families import build
from tests.support.programs import Program
from tests.support.small_run import EXAMPLE, small
from trainer.batches.context import share
from trainer.batches.groups import samples as samples_of
from trainer.batches.pack import pack
from trainer.batches.sample import Sample
from trainer.config import open_run
from trainer.learner import Learner
from trainer.models.load import load
from trainer.models.scorer import Scorer
from trainer.objectives import build as objective
from trainer.settings import ObjectiveSettings, OptimiserSettings

FAMILIES = ["qwen3_moe", "deepseek_v3"]


def drawn(vocabulary: int, count: int = 3) -> list[Sample]:
    generator = torch.Generator().manual_seed(1)
    lists = [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in (9, 14, 6)][:count]
    return [Sample(tokens=ids, mask=[0] + [1] * (len(ids) - 1), logprobs=[0.0] * len(ids)) for ids in lists]


def chosen(scorer: Scorer, sample: Sample) -> Tensor:
    """[tokens, layers with a router, experts of a token], as the model chooses by itself."""
    layers: list[Tensor] = []
    gates = [module for name, module in scorer.model.named_modules() if name.endswith("mlp.gate")]
    hooks = [gate.register_forward_hook(lambda _, given, result: layers.append(result[2])) for gate in gates]
    with torch.no_grad():
        scorer(pack([sample]))
    for hook in hooks:
        hook.remove()
    return torch.stack(layers, 1)


def reported(sample: Sample, choices: Tensor, start: int = 0) -> Sample:
    return msgspec.structs.replace(sample, experts=[RoutedExperts.of(start, choices[start:].numpy())])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_own_choice_replayed_is_the_plain_forward_pass(family: str, tmp_path: Path) -> None:
    scorer = Scorer(load(build(family, tmp_path / family)), replay=True)
    samples = drawn(scorer.vocabulary)
    plain = scorer(pack(samples)).new
    named = [reported(sample, chosen(scorer, sample)) for sample in samples]
    replayed = scorer(pack(named)).new
    assert torch.allclose(replayed, plain, atol=1e-6)
    slopes = [
        torch.autograd.grad(item.sum(), list(scorer.parameters()), allow_unused=True) for item in (plain, replayed)
    ]
    for one, other in zip(*slopes, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_experts_compute_where_the_batch_names_them(family: str, recompute: bool, tmp_path: Path) -> None:
    """Another model whose routers are biased so that they choose these gives the same, also in its gradient."""
    directory = build(family, tmp_path / family)
    scorer = Scorer(load(directory), replay=True, recompute=recompute)
    sample = drawn(scorer.vocabulary, 1)[0]
    own = chosen(scorer, sample)
    experts = next(module for name, module in scorer.model.named_modules() if name.endswith("mlp.gate")).weight.shape[0]
    other = (own + 1) % experts  # distinct as the own ones are
    plain, replayed = scorer(pack([sample])).new, scorer(pack([reported(sample, other)])).new
    assert float((plain - replayed).abs().max().detach()) > 1e-4
    again = Scorer(load(directory), recompute=recompute)
    gates = [module for name, module in again.model.named_modules() if name.endswith("mlp.gate")]
    for layer, gate in enumerate(gates):
        gate.register_forward_hook(
            lambda router, given, result, layer=layer: forced(router, result, other[:, layer], family)
        )
    exact = again(pack([sample])).new
    assert torch.allclose(replayed, exact, atol=1e-6)
    replayed.sum().backward()
    exact.sum().backward()
    for one, two in zip(scorer.parameters(), again.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None)
        assert one.grad is None or two.grad is None or torch.allclose(one.grad, two.grad, atol=1e-5)


def forced(
    router: torch.nn.Module, result: tuple[Tensor, Tensor, Tensor], index: Tensor, family: str
) -> tuple[Tensor, Tensor, Tensor]:
    """By the formulas of the models' papers: Qwen3 normalises what a softmax gives, DeepSeek-V3 what a sigmoid gives,
    and scales it."""
    logits = result[0].float()
    score = (logits.softmax(-1) if family == "qwen3_moe" else logits.sigmoid()).gather(1, index)
    if router.norm_topk_prob:
        score = score / score.sum(-1, keepdim=True)
    scale = 1.0 if family == "qwen3_moe" else float(router.routed_scaling_factor)  # type: ignore[arg-type]
    return result[0], score * scale, index


def test_tokens_without_a_report_choose_by_themselves(tmp_path: Path) -> None:
    scorer = Scorer(load(build("qwen3_moe", tmp_path / "moe")), replay=True)
    sample = drawn(scorer.vocabulary, 1)[0]
    other = (chosen(scorer, sample) + 1) % 4
    plain, late = scorer(pack([sample])).new, scorer(pack([reported(sample, other, start=5)])).new
    assert torch.allclose(plain[:5], late[:5], atol=1e-6)  # what tokens 0 to 4 say of their next one
    assert not torch.allclose(plain[5:], late[5:], atol=1e-4)
    assert torch.allclose(scorer(pack([sample])).new, plain)  # nothing stays of the last batch


def test_it_is_the_same_packed_shared_and_cut_for_ranks(tmp_path: Path) -> None:
    scorer = Scorer(load(build("qwen3_moe", tmp_path / "moe")), replay=True)
    one, two, three = drawn(scorer.vocabulary)
    two = msgspec.structs.replace(two, tokens=one.tokens[:5] + two.tokens[5:])
    choices = [(chosen(scorer, item) + 1) % 4 for item in (one, two, three)]
    choices[1][:5] = choices[0][:5]
    named = [reported(item, own) for item, own in zip((one, two, three), choices, strict=True)]
    alone = torch.cat([scorer(pack([item])).new for item in named])
    assert torch.allclose(scorer(pack(named)).new, alone, atol=1e-5)
    shared = pack(named, [(2, 5), (1, 0)])
    assert torch.allclose(scorer(shared).new, alone, atol=1e-5)
    assert shared.experts is not None
    for part in range(2):
        local, _ = share(shared, part, 2)
        assert local.experts is not None and len(local.experts) == len(local.tokens)
        for token, expert, position in zip(local.tokens, local.experts, local.positions, strict=True):
            where = (shared.tokens == token) & (shared.positions == position)
            assert (
                not where.any() or any(torch.equal(expert, row) for row in shared.experts[where]) or (expert < 0).all()
            )


def test_a_sample_whose_engine_reports_nothing_is_set_aside(tmp_path: Path) -> None:
    scorer = Scorer(load(build("qwen3_moe", tmp_path / "moe")), replay=True)
    samples = [msgspec.structs.replace(item, name=str(at)) for at, item in enumerate(drawn(scorer.vocabulary, 2))]
    samples[0] = reported(samples[0], chosen(scorer, samples[0]))
    stats = Learner(scorer, objective(ObjectiveSettings(preset="dapo")), OptimiserSettings()).step(samples)
    assert [(name, "reported no experts" in reason) for name, reason in stats.put_aside.items()] == [("1", True)]


def test_another_model_than_the_engines_is_refused(tmp_path: Path) -> None:
    scorer = Scorer(load(build("qwen3_moe", tmp_path / "moe")), replay=True)
    sample = drawn(scorer.vocabulary, 1)[0]
    wrong = torch.zeros(len(sample.tokens), 7, 2, dtype=torch.int16)
    with pytest.raises(Invalid, match="7 layers"):
        scorer(pack([reported(sample, wrong)]))
    with pytest.raises(Invalid, match="mixture of experts"):
        Scorer(load(build("llama", tmp_path / "llama")), replay=True)


def test_replay_brings_the_trainer_nearer_to_an_engine_of_other_precision(tmp_path: Path) -> None:
    """The embedded engine samples in bfloat16, the trainer scores in float32: without replay some tokens go to other
    experts than those that sampled them."""
    directory = made(tmp_path / "mixture", "Qwen3Moe", num_experts=32, num_hidden_layers=4)
    model = AutoModelForCausalLM.from_pretrained(directory)
    for parameter in model.parameters():
        parameter.data *= 8 if parameter.dim() == 3 else 1  # experts that matter
    model.save_pretrained(directory)
    core = Core(directory, version="0", slots=8, length=200, dtype="bfloat16", experts=True)
    for number in range(8):
        request_model(core, [5, 9, 70 + number, 31], 120, seed=number, stops=frozenset())
    played = play(core)
    samples = []
    for request in played:
        assert request.experts is not None and request.experts.end == len(request.tokens) - 1
        prompt, count = request.prompt, len(request.output)
        samples.append(
            Sample(
                tokens=request.tokens,
                mask=[0] * prompt + [1] * count,
                logprobs=[0.0] * prompt + request.logprobs,
                experts=[request.experts],
            )
        )
    scorer = Scorer(load(directory), replay=True)
    with torch.no_grad():
        errors = [
            (scorer(packed).new - packed.engine).abs().mean()
            for packed in (pack([msgspec.structs.replace(item, experts=[]) for item in samples]), pack(samples))
        ]
    assert errors[1] < 0.5 * errors[0], errors


def mixture(directory: Path) -> Path:
    """A policy with experts that has the tokenizer of the example's."""
    shutil.copytree(EXAMPLE / "start", directory, ignore=shutil.ignore_patterns("*.safetensors"))
    content = json.loads((directory / "config.json").read_text())
    torch.manual_seed(0)
    names = ("vocab_size", "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")
    config = Qwen3MoeConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16,
        **{name: content[name] for name in names},
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def test_a_run_replays_what_its_engine_reports(daemon: Daemon, tmp_path: Path) -> None:
    objective = ObjectiveSettings(router_replay=True)
    config = small(tmp_path / "runs", model=mixture(tmp_path / "policy"), steps=1, faults=0, objective=objective)
    directory, _ = open_run(config)
    process = Program([sys.executable, "-m", "coordinator.local", str(directory)], cwd=EXAMPLE.parent.parent)
    try:
        assert process.wait(500) == 0, (directory / "rollout.log").read_text()
    finally:
        process.end()
    store = SampleStore(directory / "rollout")
    batch = store.batch(0)
    store.close()
    assert batch is not None and batch.trajectories
    for sample in samples_of(batch):
        covered = [token for part in sample.experts for token in range(part.start, part.end)]
        assert covered == list(range(len(sample.tokens) - 1))  # all that say something of a next token
        assert all(part.choices.max() < 8 and part.choices.shape[1:] == (2, 2) for part in sample.experts)
    assert json.loads((directory / "summary.json").read_text())["policy_version"] == 1


def test_a_run_without_experts_is_refused_before_it_begins(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"objective\.router_replay needs a mixture of experts"):
        open_run(small(tmp_path / "runs", objective=ObjectiveSettings(router_replay=True)))
    assert not (tmp_path / "runs").exists()
    config = small(tmp_path / "runs", model=mixture(tmp_path / "policy"), engine="vllm", gpus=())
    config = msgspec.structs.replace(config, objective=ObjectiveSettings(router_replay=True))
    if not visible():
        with pytest.raises(Invalid, match="GPUs only"):
            open_run(config)
