"""`Scorer`: a model as the trainer sees it, from packed tokens to log-probabilities of the sampled ones.

Owns: the way from a backbone's hidden states to numbers per token, activation checkpointing, the critic.
Guarantee: equal to log_softmax of the model's logits, whatever is packed beside a trajectory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rollout.engine.embedded.model import Qwen3
from sandbox.errors import Invalid
from trainer.batches.pack import PackedBatch
from trainer.models.attention import attend
from trainer.models.logprobs import logprobs


@dataclass(frozen=True, slots=True)
class Scores:
    """All [T], fp32."""

    new: Tensor  # log π
    entropy: Tensor
    value: Tensor | None  # of the critic, where there is one


class Scorer(nn.Module):
    """``Scorer(load(folder))(packed).new``.

    `recompute` keeps one hidden state per layer and computes the rest again, for long trajectories. `bf16` computes in
    that precision while the weights stay in fp32.
    """

    def __init__(self, model: nn.Module, *, recompute: bool = False, critic: bool = False, bf16: bool = False):
        super().__init__()
        self.model = model
        self.bf16 = bf16
        self.recompute = recompute
        self.critic = nn.Linear(self.width, 1) if critic else None
        if self.critic is not None:
            nn.init.zeros_(self.critic.weight)
            nn.init.zeros_(self.critic.bias)
        if recompute and not isinstance(model, Qwen3):
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]

    @property
    def width(self) -> int:
        config: Any = self.model.config
        return int(config.hidden_size)

    @property
    def vocabulary(self) -> int:
        config: Any = self.model.config
        return int(config.vocab_size)

    @property
    def positions(self) -> int | None:
        """Tokens of the longest sequence that the model has positions for, where it says so."""
        config: Any = self.model.config
        result = getattr(config, "max_position_embeddings", None)
        return int(result) if result else None

    def layers(self) -> list[nn.Module]:
        """The repeated blocks: what is sharded and checkpointed one by one."""
        for module in self.model.modules():
            if isinstance(module, nn.ModuleList) and len(module) == self.model.config.num_hidden_layers:  # type: ignore[union-attr]
                return list(module)
        raise Invalid(f"no list of layers in {type(self.model).__name__}", hint="use a decoder-only model")

    def forward(self, packed: PackedBatch) -> Scores:
        kind = "cuda" if packed.tokens.is_cuda else "cpu"
        with torch.autocast(kind, torch.bfloat16, enabled=self.bf16):
            hidden = self.hidden(packed)[packed.predicting]
        with torch.autocast(kind, enabled=False):
            if self.bf16:
                hidden = hidden.to(torch.bfloat16)
            new, entropy = logprobs(hidden, self.head().to(hidden.dtype), packed.targets, packed.temperature)
            value = (
                None if self.critic is None else self.critic(hidden.to(self.critic.weight.dtype))[:, 0].float().clone()
            )
        return Scores(new, entropy, value)

    def hidden(self, packed: PackedBatch) -> Tensor:
        """[N, width], normalised: what the head is applied to."""
        if isinstance(self.model, Qwen3):
            again = checkpoint if self.recompute and torch.is_grad_enabled() else None
            return self.model.hidden(
                packed.tokens, packed.positions, lambda q, k, v: attend(q, k, v, packed), recompute=again
            )
        model: Any = self.model
        result = model.get_decoder()(
            input_ids=packed.tokens[None], position_ids=packed.positions[None], use_cache=False, packed=packed
        )
        hidden: Tensor = result.last_hidden_state[0]
        return hidden

    def head(self) -> Tensor:
        """[V, width]"""
        if isinstance(self.model, Qwen3):
            return self.model.head_weight
        weight: Tensor = self.model.get_output_embeddings().weight  # type: ignore[operator]
        return weight
