"""Models of transformers in the embedded engine: over a paged cache they say what transformers itself computes."""

from __future__ import annotations

import hashlib
import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from safetensors.torch import save_file  # noqa: E402

from rollout.engine.embedded.apply import prepare  # noqa: E402
from rollout.engine.embedded.core import Core, SamplingSequence  # noqa: E402
from rollout.engine.embedded.pretrained import refuse  # noqa: E402
from rollout.weights import adapter  # noqa: E402
from rollout.weights.mirror import Write  # noqa: E402
from sandbox.errors import Invalid  # noqa: E402
from tests.support.chat_models import SMOL, need_models  # noqa: E402

VOCABULARY = 200
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "Mistral": {"sliding_window": 24},
    "Gemma3Text": {"head_dim": 16, "sliding_window": 20},  # a window in some layers
    "Phi": {"num_key_value_heads": 4},
    "Qwen3Moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
BOUNDS = {"float32": 1e-4, "bfloat16": 0.06}
SMOL_BOUNDS = {"float32": 1e-4, "bfloat16": 0.2}  # 30 layers; of transformers' own cached decoding 0.16


def made(directory: Path, family: str, **changes: Any) -> Path:
    """A folder with random weights, far from uniform. They are numbers of bfloat16, as what trainers publish."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **FAMILIES.get(family, {}), **changes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data = (parameter.data * (4 if parameter.dim() == 2 else 1)).bfloat16().float()
    model.save_pretrained(directory)
    return directory


def logprobs(model: Any, request: SamplingSequence) -> list[float]:
    """What the model itself gives for each token of an answer."""
    with torch.no_grad():
        logits = model(torch.tensor([request.tokens])).logits[0].float()
    rows = torch.log_softmax(logits / (request.temperature or 1.0), dim=-1)[request.prompt - 1 : -1]
    result: list[float] = rows[range(len(request.output)), request.output].tolist()
    return result


def play(core: Core) -> list[SamplingSequence]:
    done: list[SamplingSequence] = []
    for _ in range(2000):
        if core.scheduler.idle:
            return done
        done += core.step()
    raise AssertionError("it never ends")


def request_model(core: Core, prompt: list[int], count: int, *, seed: int = 0, **options: Any) -> SamplingSequence:
    request = SamplingSequence(f"{len(core.requests)}-{random.random()}", list(prompt), count, seed=seed, **options)
    core.add(request)
    return request


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_transformers_whatever_is_beside_them(family: str, dtype: str, tmp_path: Path) -> None:
    directory, draw = made(tmp_path, family), random.Random(1)
    refuse(directory)  # which it does not
    core = Core(directory, version="0", slots=4, length=128, dtype=dtype, paged=True)
    core.scheduler.prefill_budget = 23  # prompts are read in several pieces
    stem, done = [draw.randrange(VOCABULARY) for _ in range(40)], list[SamplingSequence]()
    for n in range(9):
        prompt = [*stem, *(draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 30)))]
        request_model(core, prompt, draw.randrange(1, 40), seed=n, temperature=draw.choice([0.0, 0.7, 1.0]))
        for _ in range(3):
            done += core.step()
    done += play(core)
    turn = request_model(core, [*done[0].tokens, 5, 6], 4)
    done += play(core)
    assert (
        len(done) == 10 and turn.reused == len(turn.tokens) - 4 - 3
    )  # all but its newest token was kept, and it reads two
    assert core.statistics.reused_tokens >= 8 * 40 + turn.reused - 40
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    for request in done:
        assert request.logprobs == pytest.approx(logprobs(model, request), abs=BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS)
def test_smollm2_says_what_transformers_says(dtype: str) -> None:
    need_models()
    model = transformers.AutoModelForCausalLM.from_pretrained(SMOL, dtype=getattr(torch, dtype))
    tokenizer = transformers.AutoTokenizer.from_pretrained(SMOL)
    core = Core(SMOL, version="0", slots=4, length=256, dtype=dtype)
    assert core.facts.ends == {tokenizer.eos_token_id}
    prompts = [
        tokenizer(text).input_ids for text in ("The capital of France is", "In Linux, a list of files is shown by")
    ]
    requested = [request_model(core, prompt, 12, temperature=0.0) for prompt in prompts]
    play(core)
    assert "Paris" in tokenizer.decode(requested[0].output)
    for request in requested:
        assert request.logprobs == pytest.approx(logprobs(model, request), abs=SMOL_BOUNDS[dtype])


def test_members_of_a_group_have_their_prompt_in_common(tmp_path: Path) -> None:
    """One computes it; all have its blocks, so that six fit a cache of three such prompts."""
    prompt = [3 + n % 100 for n in range(97)]
    core = Core(made(tmp_path, "Llama"), version="0", slots=8, length=128, cache=320, retained=0)
    group = [request_model(core, prompt, 12, seed=n) for n in range(6)]
    limit = 0
    while not core.scheduler.idle:
        core.step()
        limit = max(limit, len(core.scheduler.running))
    assert limit == 6 and core.statistics.preemptions == 0
    assert (core.statistics.prefilled_tokens, core.statistics.reused_tokens) == (97, 5 * 96)
    alone = Core(tmp_path, version="0", slots=1, length=128, retained=0)
    for n, request in enumerate(group):
        again = request_model(alone, prompt, 12, seed=n)
        play(alone)
        assert again.output == request.output


def test_what_was_put_back_gives_the_same_answer(tmp_path: Path) -> None:
    def answers(cache: int | None) -> tuple[Core, list[list[int]]]:
        core, draw = Core(made(tmp_path, "Llama"), version="0", slots=6, length=96, cache=cache), random.Random(0)
        requested = [
            request_model(core, [draw.randrange(VOCABULARY) for _ in range(20)], 60, temperature=0.0) for _ in range(8)
        ]
        play(core)
        return core, [request.output for request in requested]

    free, expected = answers(None)
    tight, result = answers(200)
    assert free.statistics.preemptions == 0 < tight.statistics.preemptions and result == expected


@pytest.mark.parametrize("dtype", BOUNDS)
def test_weights_that_change_in_flight_are_those_that_were_published(dtype: str, tmp_path: Path) -> None:
    directory = made(tmp_path / "model", "Qwen2", tie_word_embeddings=True)
    core = Core(directory, version="0", slots=4, length=128, dtype=dtype)
    prompt = [3 + n for n in range(40)]
    requested = [request_model(core, prompt, 30, seed=n) for n in range(3)]
    while len(requested[0].output) < 10:
        core.step()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    old = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    published = {name: item for name, item in model.state_dict().items() if name != "lm_head.weight"}
    writes = []
    for name, tensor in published.items():
        tensor.add_(torch.randn(tensor.shape) * 0.05).copy_(tensor.bfloat16())
        writes.append(Write(name, None, words(tensor)))
    core.adopt(prepare(core.weights, dict.fromkeys(published, "BF16"), writes), 1, recompute=True)
    computed = {name: tensor.to(getattr(torch, dtype)) for name, tensor in published.items()}
    live = core.checksums()
    assert {name: live[name] for name in computed} == {name: sha256(tensor) for name, tensor in computed.items()}
    before = core.statistics.prefilled_tokens
    play(core)
    read = core.statistics.prefilled_tokens - before
    assert read < 40 + 3 * 16, "the prompt is computed anew once, what each said by itself"
    new = model.to(getattr(torch, dtype))
    for request in requested:
        assert [span.version for span in request.spans] == ["0", "1"]
        change = request.spans[0].end
        assert request.logprobs[:change] == pytest.approx(logprobs(old, request)[:change], abs=BOUNDS[dtype])
        assert request.logprobs[change:] == pytest.approx(logprobs(new, request)[change:], abs=BOUNDS[dtype])


def words(tensor: Any) -> np.ndarray[Any, Any]:
    result: np.ndarray[Any, Any] = tensor.bfloat16().reshape(-1).view(torch.int16).numpy()
    return result


def sha256(tensor: Any) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()


def test_an_adapter_is_computed_beside_its_base(tmp_path: Path) -> None:
    directory, alongside = made(tmp_path / "model", "Qwen2"), tmp_path / "adapter"
    alongside.mkdir()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tensors = {}
    for layer, kind in itertools.product(range(3), ("self_attn.q_proj", "mlp.down_proj")):  # with a bias, without
        module = f"model.layers.{layer}.{kind}"
        matrix = model.get_submodule(module)
        down, up = torch.randn(4, matrix.in_features) * 0.2, torch.randn(matrix.out_features, 4) * 0.2
        tensors |= dict(zip(adapter.names_of(module), (down, up), strict=True))
        matrix.weight.data += 2 * up @ down
    save_file(tensors, alongside / adapter.WEIGHTS)
    (alongside / adapter.CONFIG).write_text(
        f'{{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "base_model_name_or_path": "{directory}"}}'
    )
    core = Core(alongside, version="0", slots=2, length=64)
    request = request_model(core, [5, 6, 7], 20)
    play(core)
    assert request.logprobs == pytest.approx(logprobs(model, request), abs=1e-4)


def test_what_is_not_finite_spoils_no_later_answer(tmp_path: Path) -> None:
    core = Core(made(tmp_path, "Llama"), version="0", slots=2, length=64, retained=0)
    weight = core.weights["model.layers.0.self_attn.v_proj.weight"]
    retained = weight.clone()
    weight.fill_(float("nan"))
    spoilt = request_model(core, [3] * 20, 4)
    play(core)
    assert spoilt.finish == "error"
    weight.copy_(retained)
    request = request_model(core, [4] * 5, 4)
    play(core)
    assert request.finish == "length"


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("Gemma2", {"head_dim": 16}, "softcap"),
        ("GptOss", {"head_dim": 16, "num_local_experts": 4}, "s_aux"),
        ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "layer 0 .conv. is not plain attention"),
        ("Bloom", {}, "attention of its own"),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "depend on what is"),
    ],
)
def test_what_the_cache_does_not_hold_is_refused(
    family: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    directory = made(tmp_path, family, **changes)
    with pytest.raises(Invalid, match=said):
        refuse(directory)
    with pytest.raises(Invalid, match=f"{said}.*vllm"):
        Core(directory, version="0", slots=1, length=64)


def test_a_folder_that_lacks_a_weight_is_not_served(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    directory = made(tmp_path, "Llama")
    refuse(directory)  # its config is fine
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Invalid, match=r"missing keys .*up_proj"):
        Core(directory, version="0", slots=1, length=64)
