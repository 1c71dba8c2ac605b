"""Small published weights for engine tests, the same for every engine."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

VOCABULARY = 128  # a multiple of 64: vLLM pads nothing
EOS = 1
WORDS = {"<pad>": 0, "<eos>": EOS, "<unk>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}


def publish(weights: Path, version: int) -> Path:
    """Random weights, different for each version, published in `weights`; a model folder of the same beside it."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers

    from rollout.engine.embedded.model import ModelConfig, Qwen3
    from rollout.weights.export import put_together
    from rollout.weights.store import VersionStore
    from trainer.weights import Publisher

    config = ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        eos_token_id=EOS,
    )
    policy = Qwen3(config)
    policy.initialise(version)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.dim() == 2:
                parameter.mul_(5)  # far from uniform, so that versions differ visibly
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    files = {"config.json": json.dumps(config.to_json()).encode(), "tokenizer.json": tokenizer.to_str().encode()}
    store = VersionStore(weights)
    Publisher(store, keep=100).publish(version, policy.state_dict(), files)
    directory = weights.parent / f"v{version:06d}"
    with ThreadPoolExecutor(1) as thread:  # tests call this inside a loop
        thread.submit(put_together, store, directory, version).result()
    return directory


def expected_logprobs(directory: Path, prompt: list[int], output: list[int], temperature: float = 1.0) -> list[float]:
    """What the full pass over prompt and output gives for each output token."""
    rows = every_logprob(directory, prompt, output, temperature)
    return [row[token] for row, token in zip(rows, output, strict=True)]


def every_logprob(directory: Path, prompt: list[int], output: list[int], temperature: float = 1.0) -> list[list[float]]:
    """The same for each token that could have been there."""
    import torch

    from rollout.engine.embedded.model import load_model

    with torch.no_grad():
        logits = load_model(directory)(torch.tensor([prompt + output]))[0]
        result: list[list[float]] = torch.log_softmax(logits / (temperature or 1.0), dim=-1).tolist()
    return result[len(prompt) - 1 : -1]
