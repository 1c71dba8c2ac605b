"""A policy of a few thousand weights whose distributions are far from uniform."""

from __future__ import annotations

import torch

from rollout.engine.embedded.model import ModelConfig, Qwen3

CONFIG = ModelConfig(
    vocab_size=40, hidden_size=24, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=12
)


def model(seed: int = 0) -> Qwen3:
    made = Qwen3(CONFIG)
    made.initialise(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)  # far from uniform
    return made
