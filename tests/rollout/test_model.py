"""The policy's arithmetic: cached decoding equals the full pass, and both equal transformers' Qwen3."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")


from rollout.engine.computed import computed_hashes  # noqa: E402
from rollout.engine.embedded.model import KVCache, ModelConfig, Qwen3, load_model, save_model  # noqa: E402

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def model(**changes: int | bool) -> Qwen3:
    config = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16}
    made = Qwen3(ModelConfig(**{**config, "num_key_value_heads": 4, **changes}))
    made.initialise(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.1)
    return made


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 2}, {"tie_word_embeddings": False}])
def test_prefill_in_pieces_and_decode_equal_the_full_pass(changes: dict[str, int | bool]) -> None:
    policy = model(**changes)
    tokens = torch.randint(0, 97, (3, 20), generator=torch.Generator().manual_seed(3))
    expected = policy(tokens).detach()
    cache = KVCache(policy.config, rows=4, length=32)
    ends = [7, 12, 1]
    packed = torch.cat([tokens[row, :end] for row, end in enumerate(ends)])
    logits = policy.prefill(packed, [(row, 0, end) for row, end in enumerate(ends)], cache)
    torch.testing.assert_close(logits, expected[range(3), [end - 1 for end in ends]], **TOLERANCE)
    logits = policy.prefill(tokens[0, 7:11], [(0, 7, 11)], cache)
    torch.testing.assert_close(logits[0], expected[0, 10], **TOLERANCE)
    at = torch.tensor([11, 12, 1])
    logits = policy.decode(tokens[range(3), at], at, cache)
    torch.testing.assert_close(logits, expected[range(3), at], **TOLERANCE)
    cache.copy(0, 3, 12)
    torch.testing.assert_close(cache.keys[0][3, :, :12], cache.keys[0][0, :, :12])


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 2}])
def test_transformers_computes_the_same_from_the_same_folder(tmp_path: Path, changes: dict[str, int]) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    policy = model(**changes)
    save_model(policy, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(theirs).__name__ == "Qwen3ForCausalLM"
    tokens = torch.randint(0, 97, (2, 15))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, policy(tokens), **TOLERANCE)
    again = load_model(tmp_path)
    torch.testing.assert_close(again(tokens), policy(tokens), rtol=0, atol=0)


def test_right_padding_does_not_reach_back() -> None:
    policy = model()
    tokens = torch.randint(0, 97, (1, 9))
    padded = torch.cat([tokens, torch.zeros(1, 4, dtype=torch.long)], dim=1)
    torch.testing.assert_close(policy(padded)[:, :9], policy(tokens), **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hashes_of_a_file_are_those_of_the_values_that_are_computed_with(tmp_path: Path, dtype: torch.dtype) -> None:
    policy = model()
    save_model(policy, tmp_path, tensors={name: tensor.to(dtype) for name, tensor in policy.state_dict().items()})
    live = {name: _sha256(tensor) for name, tensor in load_model(tmp_path).state_dict().items()}
    assert computed_hashes(tmp_path) == live
    assert computed_hashes(tmp_path, ["model.norm.weight"]) == {"model.norm.weight": live["model.norm.weight"]}


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
