"""Small models of many families of transformers, whose weights make differences visible. Not a test module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

TINY: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48,
    "n_positions": 128, "n_ctx": 128, "d_model": 32, "ffn_dim": 48, "word_embed_proj_dim": 32, "num_layers": 2,
    "num_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "shared_expert_intermediate_size": 16, "n_shared_experts": 1, "num_shared_experts": 1, "first_k_dense_replace": 1,
    "rotary_dim": 8, "state_size": 8, "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_conv": 4,
    "mamba_expand": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "sliding_window": 8,
}  # fmt: skip

LATENT = {"num_key_value_heads": 4}  # attention over a latent: as many keys as queries

PLAIN = (
    "afmoe", "apertus", "arcee", "bitnet", "biogpt", "bloom", "codegen", "cohere", "cohere2", "cohere2_moe", "ctrl",
    "diffllama", "doge", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "flex_olmo", "gemma", "gemma2",
    "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "gptj", "granite",
    "granitemoe", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "jetmoe", "lfm2", "llama",
    "llama4_text", "minimax", "minimax_m2", "ministral", "mistral", "mixtral", "mpt", "nanochat", "nemotron", "olmo",
    "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma", "xglm",
)  # fmt: skip

# What a family needs beyond, or otherwise. Two kinds of layers where a family mixes them.
FAMILIES: dict[str, dict[str, Any]] = {
    **{name: {} for name in PLAIN},
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1]},
    "mamba": {"layer_types": None},
    "falcon_mamba": {"layer_types": None},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "glm4_moe_lite": LATENT,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
}  # fmt: skip

# Rotations that depend on the longest sequence of a batch.
ROTATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3 longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "llama dynamic": (
        "llama",
        {
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
}  # fmt: skip


def build(name: str, directory: Path) -> Path:
    """A model folder of a family, without a tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, changes = ROTATIONS.get(name) or (name, FAMILIES[name])
    base = AutoConfig.for_model(kind)
    names = {**TINY, **changes}
    existing = {key: value for key, value in names.items() if _has(base, key)} | changes
    existing = {key: value for key, value in existing.items() if value is not None}
    layers = None if changes.get("layer_types", 0) is None else getattr(base, "layer_types", None)
    if layers and "layer_types" not in changes:
        existing["layer_types"] = list(dict.fromkeys(layers))[:2] if len(set(layers)) > 1 else list(layers)[:2]
    config = AutoConfig.for_model(kind, **existing)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for item in model.parameters():
            scale = item.shape[-1] ** -0.5 if item.ndim > 1 else 0.1
            item.add_(torch.randn(item.shape, generator=draw) * scale)
    model.save_pretrained(directory)
    return directory


def _has(config: Any, key: str) -> bool:
    return key in config.to_dict() or key in getattr(config, "attribute_map", {})
