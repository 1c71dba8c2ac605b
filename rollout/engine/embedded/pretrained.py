"""A model directory as the embedded engine computes with it: our own small Qwen3, or any that transformers loads.

Guarantee: what is loaded has every weight of the directory and no other; a model of which a layer keeps anything but
keys and values, or attends in a way that the paged cache does not, is refused before it answers.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollout.engine.embedded.model import ModelConfig, Qwen3, is_plain, load_model
from rollout.engine.embedded.paged import NAME, Heads, attention
from sandbox.errors import Invalid

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LAYERS = {"full_attention", "sliding_attention"}
OFFLINE = {"local_files_only": True}
HINT = "serve it by vLLM (--engine vllm)"
CHANGING = {"dynamic", "longrope"}  # rotations that depend on the longest sequence that is computed together


@dataclass(frozen=True)
class Facts:
    """What the engine must know of a model."""

    vocabulary: int
    length: int | None  # of the longest sequence
    ends: frozenset[int]  # tokens that end an answer
    tied: bool  # the head is the embedding


def load(directory: Path, *, device: str = "cpu", dtype: str = "float32", paged: bool = False) -> nn.Module:
    """Our own Qwen3 where the directory is one, in float32 on a CPU; else, or where pages are requested, transformers'
    model. Raises Invalid."""
    plain = (
        is_plain(json.loads((directory / "config.json").read_bytes())) and (directory / "model.safetensors").exists()
    )
    if plain and device == "cpu" and dtype == "float32" and not paged:
        return load_model(directory)

    def read(auto: Any, config: Any, options: dict[str, Any]) -> nn.Module:
        model, reported = auto.from_pretrained(directory, config=config, output_loading_info=True, **OFFLINE, **options)
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if reported[kind]:
                raise Invalid(
                    f"{directory}: {kind.replace('_', ' ')} {sorted(reported[kind])[:3]}", hint="publish it again"
                )
        return model.to(device)  # type: ignore[no-any-return]

    return _made(directory, read, dtype=DTYPES[dtype])


def refuse(directory: Path) -> None:
    """Raises Invalid for a directory that this engine does not serve, without loading its weights."""
    content = json.loads((directory / "config.json").read_bytes())
    if is_plain(content):
        ModelConfig.load(directory)
        return
    with torch.device("meta"), contextlib.suppress(RuntimeError):  # of code that looks at values: the server has some
        layers(_made(directory, lambda auto, config, options: auto.from_config(config, **options)))


def facts(model: nn.Module) -> Facts:
    config: Any = model.config
    tied = bool(config.tie_word_embeddings)
    if isinstance(model, Qwen3):
        return Facts(config.vocab_size, config.max_position_embeddings, frozenset({config.eos_token_id}), tied)
    text, generation = config.get_text_config(), getattr(model, "generation_config", config)
    reported = generation.eos_token_id
    ends = frozenset([reported] if isinstance(reported, int) else reported or [])
    return Facts(text.vocab_size, getattr(text, "max_position_embeddings", None), ends, tied)


def layers(model: nn.Module) -> list[Heads]:
    """What each layer keeps of a token, as seen by running one token through the model. Raises Invalid."""
    probe = _Probe()
    token = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    with torch.inference_mode():
        model(input_ids=token, position_ids=token, use_cache=False, pages=probe)
    config: Any = model.config
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    result = []
    for layer, kind in enumerate(kinds):
        heads = probe.heads.get(layer)
        if heads is None or kind not in LAYERS or (kind == "sliding_attention" and heads.window is None):
            raise Invalid(f"{type(model).__name__}: layer {layer} ({kind}) is not plain attention", hint=HINT)
        result.append(heads)
    return result


class _Probe:
    """Stands where the paged cache will, and hears what each layer asks of it."""

    def __init__(self) -> None:
        self.heads: dict[int, Heads] = {}

    def attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        others = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
        if others or not getattr(module, "is_causal", True):
            raise Invalid(f"{type(module).__name__} attends with {' and '.join(others) or 'no order'}", hint=HINT)
        self.heads[module.layer_idx] = Heads(len(k), k.shape[-1], v.shape[-1], options.get("sliding_window"))
        return q.new_zeros(q.shape[1], len(q), v.shape[-1])


def _made(directory: Path, make: Callable[[Any, Any, dict[str, Any]], nn.Module], **options: Any) -> nn.Module:
    """By transformers, with our attention in the place of its own."""
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM  # seconds to import

    AttentionInterface.register(NAME, attention)
    try:
        config = AutoConfig.from_pretrained(directory, **OFFLINE)
        model = make(AutoModelForCausalLM, config, {"attn_implementation": NAME, **options})
    except (OSError, ValueError, KeyError) as error:
        raise Invalid(f"transformers cannot load {directory}: {error}", hint="try it there first") from None
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    if rope.get("rope_type") in CHANGING:
        raise Invalid(f"{directory}: its rotations ({rope['rope_type']}) depend on what is packed with it", hint=HINT)
    if not getattr(model, "_supports_attention_backend", False):
        raise Invalid(f"{type(model).__name__} has attention of its own", hint=HINT)
    return model.eval()
