"""Models of folders: ours and those of transformers behind one scorer, adapters, precision, export."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollout.engine.embedded.model import Qwen3
from rollout.weights import adapter
from rollout.weights.export import export as export_version
from rollout.weights.export import put_together
from rollout.weights.store import VersionStore
from sandbox.errors import Invalid, NotFound
from tests.support.families import FAMILIES, build
from trainer.batches.pack import pack
from trainer.batches.sample import Sample
from trainer.learner import Learner
from trainer.models import policy
from trainer.models.load import Lora, adaptable, export, load, merged, published
from trainer.models.scorer import Scorer
from trainer.objectives import named
from trainer.settings import OptimiserSettings
from trainer.weights import Publisher

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("default")  # of transformers itself

SMALL: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 5},
    "qwen3": {"head_dim": 8, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def directory_of(kind: str, directory: Path, **changes: Any) -> Path:
    """A tiny model of this architecture with random weights, saved by transformers."""
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **KINDS.get(kind, {}), **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.1 if parameter.ndim == 1 else 0.2)
    model.save_pretrained(directory)
    return directory


def batch(seed: int = 0) -> list[Sample]:
    rng = random.Random(seed)  # token 0 pads: transformers lets its embedding learn nothing
    made = []
    for number in range(6):
        tokens = [rng.randrange(1, 50) for _ in range(rng.randrange(6, 20))]
        mask = [0, *(rng.randrange(2) for _ in tokens[2:]), 1]
        logs = [-2.0 * bit for bit in mask]
        made.append(Sample(tokens=tokens, mask=mask, logprobs=logs, reward=float(number % 2), group=f"p{number // 3}"))
    return made


def plain(model: nn.Module, samples: list[Sample]) -> Tensor:
    """log π of the sampled tokens by the model's own forward pass, one trajectory at a time."""
    result = []
    for sample in samples:
        logs = torch.log_softmax(model(torch.tensor([sample.tokens])).logits[0].float(), -1)
        result += [logs[t - 1, sample.tokens[t]] for t, bit in enumerate(sample.mask) if bit]
    return torch.stack(result)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("recompute", [False, True])
def test_scores_and_gradients_are_those_of_transformers(kind: str, recompute: bool, tmp_path: Path) -> None:
    directory, samples = directory_of(kind, tmp_path), batch()
    ours = load(directory)
    assert not isinstance(ours, Qwen3)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").train()
    expected = plain(theirs, samples)
    result = Scorer(ours, recompute=recompute)(pack(samples)).new
    assert torch.allclose(result, expected, atol=1e-5)
    expected.sum().backward()
    result.sum().backward()
    for (name, left), right in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        assert torch.allclose(left.grad, right.grad, rtol=1e-4, atol=1e-5), name


def test_our_qwen3_and_that_of_transformers_take_the_same_step(tmp_path: Path) -> None:
    model = policy.make(tmp_path, ["ls"], seed=0, shape=policy.Shape(width=32, layers=2, heads=2, inner=48))
    assert isinstance(load(tmp_path), Qwen3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.models.load.is_plain", lambda _: False)
        theirs = load(tmp_path)
    assert not isinstance(theirs, Qwen3)
    stats = [Learner(Scorer(item), named("gspo")).step(batch()) for item in (model, theirs)]
    assert stats[0].grad_norm == pytest.approx(stats[1].grad_norm, rel=1e-4)
    for (name, left), right in zip(model.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(left, right, atol=1e-5), name


@pytest.mark.parametrize("kind", ["ours", "llama"])
def test_adapters_alone_are_trained_and_merged_when_exported(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is an optional extra")
    base = tmp_path / "base"
    if kind == "ours":
        policy.make(base, ["ls"], seed=0, shape=policy.Shape(width=32, layers=2, heads=2, inner=48))
    else:
        directory_of(kind, base)
    model = load(base, lora=Lora(rank=4, alpha=8))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    learner = Learner(Scorer(model), named("pooled"), OptimiserSettings(rate=1e-2))
    for seed in range(2):  # the first step moves B alone, which begins at 0
        learner.step(batch(seed))
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if ".lora_" in name}
    exported = load(export(model, tmp_path / "out", base=base))
    assert set(exported.state_dict()) >= set(merged(model)) - {"lm_head.weight"}
    with torch.no_grad():
        ours, theirs = (Scorer(item)(pack(batch(5))).new for item in (model, exported))
    assert torch.allclose(ours, theirs, atol=1e-5)
    untrained = Scorer(load(base))(pack(batch(5))).new
    assert not torch.allclose(untrained, theirs, atol=1e-3)


@pytest.mark.parametrize("kind", ["ours", "llama"])
def test_of_a_model_with_adapters_these_alone_are_published(kind: str, tmp_path: Path) -> None:
    """What an engine's host gets is an adapter as peft reads it."""
    peft = pytest.importorskip("peft", reason="peft is an optional extra")
    base = tmp_path / "base"
    if kind == "ours":
        policy.make(base, ["ls"], seed=0, shape=policy.Shape(width=32, layers=2, heads=2, inner=48))
    else:
        directory_of(kind, base)
    lora = Lora(rank=4, alpha=8)
    model = load(base, lora=lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn_like(parameter).bfloat16() * 0.1)
    publisher = Publisher(VersionStore(tmp_path / "weights"))
    publisher.publish(0, published(model), {adapter.CONFIG: lora.file(base, model)})
    put_together(publisher.store, tmp_path / "adapter")
    publisher.close()
    theirs = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager", dtype=torch.float32),
        tmp_path / "adapter",
    )
    with torch.no_grad():
        assert torch.allclose(plain(theirs, batch()), Scorer(model)(pack(batch())).new, atol=1e-3)
        assert not torch.allclose(Scorer(load(base))(pack(batch())).new, Scorer(model)(pack(batch())).new, atol=1e-2)
    assert (tmp_path / "adapter" / adapter.WEIGHTS).stat().st_size < (base / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("family", "adapted"),
    [
        ("llama", ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]),
        ("phi3", ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"]),
        ("gpt_neox", ["dense", "dense_4h_to_h", "dense_h_to_4h", "query_key_value"]),
        ("mixtral", ["k_proj", "o_proj", "q_proj", "v_proj"]),
        ("qwen3_moe", ["k_proj", "o_proj", "q_proj", "v_proj"]),
        ("deepseek_v3", None),
        ("qwen2_moe", None),
    ],
)
def test_adapters_go_beside_every_linear_layer_but_experts(
    family: str, adapted: list[str] | None, tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason="peft is an optional extra")
    lora = Lora(rank=2, alpha=4)
    model = load(build(family, tmp_path / "base"), lora=lora)
    config = json.loads(lora.file(tmp_path / "base", model))
    names = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    assert names and not any(".experts." in name or name.endswith((".gate", ".router", "lm_head")) for name in names)
    assert adapted in (None, config["target_modules"])
    again = adaptable(load(tmp_path / "base"))
    assert [name for name in again if name.endswith(tuple(config["target_modules"]))] == again == names
    Scorer(model)(pack(batch())).new.sum().backward()
    trained = [parameter for name, parameter in model.named_parameters() if ".lora_B." in name]
    assert len(trained) == len(names) and all(item.grad is not None and item.grad.any() for item in trained)


@pytest.mark.parametrize(("family", "says"), [("gpt2", "no linear layer"), ("mamba", "peft cannot adapt")])
def test_a_model_without_adapters_is_refused(family: str, says: str, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is an optional extra")
    with pytest.raises(Invalid, match=says):
        load(build(family, tmp_path / "base"), lora=Lora(rank=2, alpha=4), packs=False)


@pytest.mark.long
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"gpt2", "mamba", "falcon_mamba", "afmoe"}))
def test_every_family_is_adapted(family: str, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is an optional extra")
    expected = adaptable(load(build(family, tmp_path / "base"), packs=False))
    model = load(tmp_path / "base", lora=Lora(rank=2, alpha=4), packs=False)
    assert [name for name, module in model.named_modules() if hasattr(module, "lora_A")] == expected


@pytest.mark.parametrize("kind", ["ours", "qwen2"])
def test_an_exported_folder_loads_in_transformers_with_its_tokenizer(kind: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    if kind == "ours":
        policy.make(base, ["ls"], seed=0, shape=policy.Shape(width=32, layers=2, heads=2, inner=48))
    else:
        directory_of(kind, base)
    model = load(base)
    Learner(Scorer(model), named("pooled"), OptimiserSettings(rate=1e-2)).step(batch())
    out = export(model, tmp_path / "out", base=base)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    with torch.no_grad():
        assert torch.allclose(plain(theirs, batch()), Scorer(model)(pack(batch())).new, atol=1e-5)
    assert kind != "ours" or transformers.AutoTokenizer.from_pretrained(out).decode([3 + 10]) == "\n"


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_a_trained_version_is_exported_with_its_head_tied_or_not(kind: str, tmp_path: Path) -> None:
    """What `pagurus export` writes: transformers finds in it what was published."""
    model = load(directory_of(kind, tmp_path / "base"))
    assert model.config.tie_word_embeddings == (kind == "qwen2")
    Learner(Scorer(model), named("pooled"), OptimiserSettings(rate=1e-2)).step(batch())
    files = {"config.json": (tmp_path / "base" / "config.json").read_bytes()}
    publisher = Publisher(VersionStore(tmp_path / "run" / "weights"))
    publisher.publish(7, published(model), files)
    publisher.close()
    assert export_version(tmp_path / "run", tmp_path / "out") == 7
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert (theirs.lm_head.weight is theirs.get_input_embeddings().weight) == (kind == "qwen2")
    with torch.no_grad():
        for parameter in model.parameters():  # versions are published in bfloat16
            parameter.copy_(parameter.bfloat16())
        assert torch.allclose(Scorer(model)(pack(batch())).new, plain(theirs, batch()), atol=1e-5)


def test_half_precision_computes_in_bf16_and_keeps_fp32_weights(tmp_path: Path) -> None:
    """A step of 1e-5, which bf16 weights would lose, is kept; scores are near those of fp32."""
    model = load(directory_of("llama", tmp_path))
    kinds = []
    model.model.layers[0].mlp.register_forward_hook(lambda *item: kinds.append(item[2].dtype))  # type: ignore[union-attr, index]
    exact = Scorer(model)(pack(batch())).new
    scorer = Scorer(model, bf16=True)
    rough = scorer(pack(batch())).new
    assert rough.dtype is torch.float32
    assert 0 < (rough - exact).abs().max() < 0.2
    assert kinds == [torch.float32, torch.bfloat16]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    Learner(scorer, named("pooled"), OptimiserSettings(rate=1e-6)).step(batch())
    changes = [(old - new).abs().max() for old, new in zip(before, model.parameters(), strict=True)]
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())
    assert 0 < max(changes) < 2e-6


def test_recomputation_keeps_less_for_long_trajectories(tmp_path: Path) -> None:
    """Bytes that autograd keeps for the backward pass of one long trajectory, with and without."""
    model = load(directory_of("llama", tmp_path, num_hidden_layers=6, max_position_embeddings=4096))
    tokens = [1 + t % 40 for t in range(2048)]
    long = Sample(tokens=tokens, mask=[0] + [1] * 2047, logprobs=[0.0] + [-1.0] * 2047)
    retained: dict[bool, int] = {}
    for recompute in (False, True):
        storages: dict[int, int] = {}

        def note(tensor: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            Scorer(model, recompute=recompute)(pack([long]))
        retained[recompute] = sum(storages.values())
        model.gradient_checkpointing_disable()  # type: ignore[operator]
    assert retained[True] < retained[False] / 4


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "an unknown architecture": ({"model_type": "perceptron"}, Invalid, "transformers cannot load"),
}


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_what_cannot_be_trained_is_refused(what: str, tmp_path: Path) -> None:
    content, kind, said = REFUSED[what]
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(kind, match=said):
        load(tmp_path)


def test_folders_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(Invalid, match="damaged"):
        load(tmp_path)
