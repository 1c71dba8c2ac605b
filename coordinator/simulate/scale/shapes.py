"""What a decoder-only transformer costs, by its shape: weights, FLOP, bytes of cache. Pure.

Guarantee: weights and FLOP of matrix products are exact for Qwen3 and Qwen3-MoE, as the trainer here computes them
(`tests/coordinator/simulate/test_scale.py` compares them with the models themselves). Attention counts the half of the
square that is causal. Norms, rotations, softmax and activation functions count as nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from rollout.decide.ranges import Count, Natural

BF16, FP32 = 2, 4  # bytes
CHUNK = 1 << 24  # logits that the trainer holds at a time; of more than that it computes the head twice


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of a ``config.json``. `experts` 0: dense."""

    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    intermediate: Natural = 0  # of a dense layer
    vocabulary: Count
    tied: bool = False  # the head is the embedding
    experts: Natural = 0
    experts_per_token: Natural = 0
    expert_intermediate: Natural = 0
    source: str = "the plan"

    def __post_init__(self) -> None:
        if self.experts and not (self.expert_intermediate and 0 < self.experts_per_token <= self.experts):
            raise ValueError("`experts` needs `expert_intermediate`, and `experts_per_token` from 1 to `experts`")
        if not self.experts and not self.intermediate:
            raise ValueError("`intermediate` is missing: a dense layer has one")

    @property
    def attention(self) -> int:
        """Weights of the matrices of a layer's attention."""
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def expert(self) -> int:
        """Weights of one expert; of a dense layer, of its only one."""
        return 3 * self.hidden * (self.expert_intermediate or self.intermediate)

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def layer(self) -> int:
        """Weights of a layer, all experts included."""
        norms = 2 * self.hidden + 2 * self.head_dim
        return self.attention + norms + max(1, self.experts) * self.expert + self.experts * self.hidden

    @property
    def outside(self) -> int:
        """Weights that are in no layer."""
        return (1 if self.tied else 2) * self.embedding + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.outside

    @property
    def in_experts(self) -> int:
        """Weights of a mixture's experts; of a dense model none."""
        return self.layers * self.experts * self.expert

    @property
    def multiplied(self) -> int:
        """Weights of the layers by which each token is multiplied."""
        router = self.experts * self.hidden
        return self.layers * (self.attention + router + max(1, self.experts_per_token) * self.expert)

    @property
    def active(self) -> int:
        """Weights that a token uses, as a model's name counts them: embedding and head included."""
        return self.multiplied + self.outside

    def touched(self, tokens: float) -> float:
        """Weights of all that a step of this many tokens reads: of a mixture, the experts that any of them uses."""
        if not self.experts:
            return self.parameters - (0 if self.tied else self.embedding)
        reached = 1 - float((1 - self.experts_per_token / self.experts) ** tokens)
        dense = self.parameters - self.in_experts - (0 if self.tied else self.embedding)
        return dense + reached * self.in_experts

    def cache_bytes(self, tensor: int = 1) -> int:
        """Of one token, on each of `tensor` GPUs: no GPU has less than one head."""
        return self.layers * 2 * self.head_dim * -(-self.kv_heads // tensor) * BF16

    # ------------------------------------------------------------------ FLOP

    def reading(self, tokens: float, past: float = 0.0) -> float:
        """FLOP for reading tokens that see `past` others in the mean, without the head."""
        return tokens * (2 * self.multiplied + 4 * self.layers * self.heads * self.head_dim * past)

    def forward(self, tokens: float, past: float, sampled: float) -> float:
        """FLOP of a trainer's forward pass; the head is for `sampled` tokens alone."""
        return self.reading(tokens, past) + 2 * self.embedding * sampled

    def backward(self, tokens: float, past: float, sampled: float, *, micro: float, recompute: bool) -> float:
        """FLOP of the backward pass, what is computed again included: of each layer all but its last product, and the
        head where the logits of a micro-batch (`micro` sampled tokens) are more than a chunk."""
        result = 2 * self.forward(tokens, past, sampled)
        if micro * self.vocabulary > CHUNK:
            result += 2 * self.embedding * sampled
        if recompute:
            last = self.layers * max(1, self.experts_per_token) * self.expert // 3
            result += self.reading(tokens, past) - 2 * last * tokens
        return result


def from_config(config: Mapping[str, object]) -> ModelShape:
    """Of a Hugging Face ``config.json``, as read: of Qwen3, Qwen3-MoE and models whose layers are like theirs."""

    def number(*names: str, default: int = 0) -> int:
        return next((int(str(config[name])) for name in names if config.get(name) is not None), default)

    heads, hidden, experts = number("num_attention_heads"), number("hidden_size"), number("num_experts")
    return ModelShape(
        layers=number("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=number("num_key_value_heads", default=heads),
        head_dim=number("head_dim", default=hidden // max(1, heads)),
        intermediate=number("intermediate_size"),
        vocabulary=number("vocab_size"),
        tied=bool(config.get("tie_word_embeddings")),
        experts=experts,
        experts_per_token=number("num_experts_per_tok") if experts else 0,
        expert_intermediate=number("moe_intermediate_size") if experts else 0,
        source="its config.json",
    )
