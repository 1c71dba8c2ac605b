"""A small Qwen3 in torch: one definition of the policy, for the trainer's gradients and the engine's decoding.

Guarantee: `forward` and `prefill` + `decode` compute the same function up to rounding, and the directory that
`save_model` writes loads in transformers and in vLLM as ``Qwen3ForCausalLM``.

Shapes: B rows, T positions of a batch, N packed tokens, H heads, G key/value heads, D head size, L cached length.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from sandbox import durable

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [..., H, D], k and v [..., G, D] -> [..., H, D]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The part of ``config.json`` that we use. Example: ``ModelConfig(vocab_size=280)`` is 1.0 M parameters."""

    vocab_size: int
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 2
    num_attention_heads: int = 6
    num_key_value_heads: int = 6
    head_dim: int = 32
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    eos_token_id: int = 0
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    @classmethod
    def load(cls, directory: Path | str) -> ModelConfig:
        raw: dict[str, Any] = json.loads((Path(directory) / "config.json").read_bytes())
        if raw.get("model_type") != "qwen3":
            raise ValueError(
                f"{directory}/config.json: model_type {raw.get('model_type')!r}, the embedded engine has qwen3"
            )
        rope = raw.get("rope_parameters") or {}
        if "rope_theta" in rope:  # where transformers 5 writes it
            raw["rope_theta"] = rope["rope_theta"]
        return cls(**{name: raw[name] for name in cls.__dataclass_fields__ if name in raw})

    def to_json(self) -> dict[str, Any]:
        """``config.json`` for transformers and vLLM."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "dtype": "float32",
            "torch_dtype": "float32",
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "rope_scaling": None,
            "sliding_window": None,
            "use_sliding_window": False,
            "use_cache": True,
            **asdict(self),
        }


def is_plain(content: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is of a Qwen3 as it is defined here."""
    plain = not content.get("rope_scaling") and not content.get("use_sliding_window")
    rope = content.get("rope_parameters") or {}
    return content.get("model_type") == "qwen3" and plain and rope.get("rope_type", "default") == "default"


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is self.weight.dtype:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        # Half-precision activations, fp32 weights: as transformers does, and one kernel instead of five.
        return F.rms_norm(x.to(self.weight.dtype), (x.shape[-1],), self.weight, self.eps).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads, self.groups, self.size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.groups * self.size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.groups * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.size, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.size, config.rms_norm_eps)

    def qkv(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x [..., hidden] -> q [..., H, D], k and v [..., G, D]; q and k normalised and rotated.

        Of a matrix that is cut over ranks only this rank's heads come.
        """
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.size)))
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.size)))
        v = self.v_proj(x).unflatten(-1, (-1, self.size))
        return rotate(q, rope), rotate(k, rope), v


class MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class Layer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        q, k, v = self.self_attn.qkv(self.input_layernorm(x), rope)
        x = x + self.self_attn.o_proj(attend(q, k, v).flatten(-2))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding, halves convention. x [..., heads, D]; cos, sin [..., 1, D/2]."""
    cos, sin = rope
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class KVCache:
    """Keys and values of every layer: ``keys[layer]`` is [rows, G, length, D]. Rows are given out by the scheduler."""

    def __init__(self, config: ModelConfig, rows: int, length: int):
        shape = (rows, config.num_key_value_heads, length, config.head_dim)
        self.rows, self.length = rows, length
        self.keys = [torch.zeros(shape) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros(shape) for _ in range(config.num_hidden_layers)]

    def copy(self, source: int, target: int, length: int) -> None:
        """Row `target` gets the first `length` positions of row `source`."""
        for layer in (*self.keys, *self.values):
            layer[target, :, :length] = layer[source, :, :length]


class TransformerBody(nn.Module):
    """What Hugging Face calls ``model``: everything but the head."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks: list[Layer] = [Layer(config) for _ in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(self.blocks)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Qwen3(nn.Module):
    """Parameter names are Hugging Face's, so `state_dict` is the file's content (less the tied head)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = TransformerBody(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.reset_positions()

    def reset_positions(self) -> None:
        """Rotations by position, which no file has."""
        config = self.config
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        angles = torch.outer(torch.arange(config.max_position_embeddings).float(), config.rope_theta**-steps)
        self.register_buffer("cos", angles.cos()[:, None, :], persistent=False)
        self.register_buffer("sin", angles.sin()[:, None, :], persistent=False)

    def initialise(self, seed: int) -> None:
        """Fresh weights, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.fill_(1.0)
                else:
                    parameter.normal_(0.0, 0.02, generator=generator)

    @property
    def head_weight(self) -> Tensor:
        """[V, hidden]"""
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def head(self, x: Tensor) -> Tensor:
        """Logits of normalised hidden states [..., hidden] -> [..., V]."""
        return F.linear(x, self.head_weight)

    def hidden(
        self, tokens: Tensor, positions: Tensor, attend: Attend, *, recompute: Callable[..., Any] | None = None
    ) -> Tensor:
        """Normalised hidden states [..., hidden] of tokens [...] at positions [...]; who sees whom is up to `attend`.

        `recompute` is `torch.utils.checkpoint.checkpoint`, or None to keep all activations.
        """
        x = self.model.embed_tokens(tokens)
        rope = (self.cos[positions], self.sin[positions])
        for layer in self.model.layers:
            x = layer(x, rope, attend) if recompute is None else recompute(layer, x, rope, attend, use_reentrant=False)
        normalised: Tensor = self.model.norm(x)
        return normalised

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, V] of tokens [B, T], causal. Right padding is harmless: mask its loss."""

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
            return y.transpose(1, 2)

        return self.head(self.hidden(tokens, torch.arange(tokens.shape[1]), attend))

    @torch.inference_mode()
    def prefill(self, tokens: Tensor, pieces: Sequence[tuple[int, int, int]], cache: KVCache) -> Tensor:
        """Run packed tokens [N] of several rows; logits [len(pieces), V] after the last token of each piece.

        A piece (row, start, end) holds positions start..end of that row; what is before start is cached already.
        Linear layers see all tokens at once, attention runs row by row (no padding).
        """
        positions = torch.cat([torch.arange(start, end) for _, start, end in pieces])
        rope = (self.cos[positions], self.sin[positions])
        x = self.model.embed_tokens(tokens)
        for index, layer in enumerate(self.model.blocks):
            attention = layer.self_attn
            q, k, v = attention.qkv(layer.input_layernorm(x), rope)
            y = torch.empty_like(q)
            offset = 0
            for row, start, end in pieces:
                packed = slice(offset, offset + end - start)
                offset = packed.stop
                cache.keys[index][row, :, start:end] = k[packed].transpose(0, 1)
                cache.values[index][row, :, start:end] = v[packed].transpose(0, 1)
                y[packed] = self._attend(attention, q[packed], cache, index, row, start, end)
            x = x + attention.o_proj(y.flatten(-2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        last = torch.tensor([end - start for _, start, end in pieces]).cumsum(0) - 1
        return self.head(self.model.norm(x[last]))

    @staticmethod
    def _attend(attention: Attention, q: Tensor, cache: KVCache, index: int, row: int, start: int, end: int) -> Tensor:
        """q [n, H, D] at positions start..end against the row's cache -> [n, H, D]."""
        keys = cache.keys[index][row : row + 1, :, :end]
        values = cache.values[index][row : row + 1, :, :end]
        grouped = attention.heads != attention.groups
        if start == 0:
            y = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None], keys, values, is_causal=True, enable_gqa=grouped
            )
        else:
            mask = torch.ones(end - start, end, dtype=torch.bool).tril(start)
            y = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None], keys, values, attn_mask=mask, enable_gqa=grouped
            )
        return y[0].transpose(0, 1)

    @torch.inference_mode()
    def decode(self, tokens: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """One token each for rows 0..B of the cache: tokens [B], positions [B] -> logits [B, V].

        Attention is a plain batched product with an additive mask: masked SDPA at query length 1 is many times slower.
        """
        batch, length = len(tokens), int(positions.max()) + 1
        rows = torch.arange(batch)
        rope = (self.cos[positions], self.sin[positions])
        hidden = torch.arange(length)[None, :] > positions[:, None]  # [B, L]
        bias = torch.zeros(batch, 1, 1, length).masked_fill_(hidden[:, None, None, :], float("-inf"))
        x = self.model.embed_tokens(tokens)
        for index, layer in enumerate(self.model.blocks):
            attention = layer.self_attn
            heads, groups, size = attention.heads, attention.groups, attention.size
            q, k, v = attention.qkv(layer.input_layernorm(x), rope)
            cache.keys[index][rows, :, positions] = k
            cache.values[index][rows, :, positions] = v
            keys = cache.keys[index][:batch, :, :length]
            values = cache.values[index][:batch, :, :length]
            q = (q * size**-0.5).view(batch, groups, heads // groups, size)
            weights = torch.softmax(torch.matmul(q, keys.transpose(-1, -2)) + bias, dim=-1)
            x = x + attention.o_proj(torch.matmul(weights, values).reshape(batch, heads * size))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.head(self.model.norm(x))


def load_model(directory: Path | str) -> Qwen3:
    """The model of a Hugging Face directory (one ``model.safetensors``), in float32."""
    model = Qwen3(ModelConfig.load(directory))
    load_weights(model, directory)
    return model


def load_weights(model: Qwen3, directory: Path | str) -> None:
    """Replace all weights. Every tensor must be there and nothing else may be."""
    tensors = load_file(Path(directory) / "model.safetensors")
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    else:
        tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    model.load_state_dict(tensors, strict=True)


def save_model(
    model: Qwen3, directory: Path | str, *, untie: bool = False, tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Write config.json, generation_config.json and model.safetensors, synced. The tokenizer is the caller's.

    `tensors` are written instead of the model's own, where those lie elsewhere.
    `untie` writes a tied head as a tensor of its own: vLLM's CPU build does not follow a tied head when weights are
    reloaded in flight (it keeps the head of the first load).
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().contiguous() for name, tensor in (tensors or model.state_dict()).items()}
    config = model.config
    if untie and config.tie_word_embeddings:
        config = replace(config, tie_word_embeddings=False)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    generation = {"eos_token_id": config.eos_token_id, "do_sample": True, "temperature": 1.0}
    (directory / "config.json").write_text(json.dumps(config.to_json(), indent=2) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    for path in directory.iterdir():
        durable.sync(path)
