"""`Scorer`: a model as the trainer sees it, from packed tokens to log-probabilities of the sampled ones.

Guarantee: equal to log_softmax of the model's logits, whatever is packed with a trajectory.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from rollout.engine.embedded.model import Qwen3
from sandbox.errors import Invalid
from trainer.batches.context import share
from trainer.batches.pack import PackedBatch
from trainer.models.attention import PackedAttention
from trainer.models.balance import RouterRecord
from trainer.models.collectives import collected
from trainer.models.logprobs import VocabularyShare, logprobs
from trainer.models.router_replay import RouterReplay


@dataclass(frozen=True, slots=True)
class Scores:
    """All [T], fp32."""

    new: Tensor  # log π
    entropy: Tensor
    value: Tensor | None  # of the critic, where there is one
    balance: Tensor | None = None  # of the token's trajectory: see RouterRecord.of


class Scorer(nn.Module):
    """``Scorer(load(directory))(packed).new``.

    `recompute` keeps one hidden state per layer and computes the rest again, for long trajectories. `bf16` computes in
    that precision while the weights stay in fp32. Unless the model `packs`, each trajectory goes through the model's
    own forward pass by itself: for models that would see what is packed with it, or that change their logits. Where it
    `shares`, what trajectories of a group begin with alike may be read once. With `balance` scores say how evenly
    experts are used. With `replay` tokens go to the experts that the batch names.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        recompute: bool = False,
        critic: bool = False,
        bf16: bool = False,
        packs: bool = True,
        shares: bool = True,
        balance: bool = False,
        replay: bool = False,
    ):
        super().__init__()
        self.model = model
        self.packs, self.shares = packs, packs and shares
        self.bf16 = bf16
        self.recompute = recompute
        self.sharers: dist.ProcessGroup | None = None  # ranks that share each matrix, head and embedding included
        self.context: dist.ProcessGroup | None = None  # ranks that share the tokens of each micro-batch
        if balance and not packs:
            raise Invalid("objective.balance needs a model that trains packed", hint="leave out objective.balance")
        if replay and not packs:
            raise Invalid("objective.router_replay needs a model that trains packed", hint="leave it out")
        self.replay = RouterReplay(model, self.kind) if replay else None  # first: what it chooses is what is recorded
        self.routers = RouterRecord(model, self.kind) if balance else None
        self.critic = nn.Linear(self.width, 1) if critic else None
        if self.critic is not None:
            nn.init.zeros_(self.critic.weight)
            nn.init.zeros_(self.critic.bias)
        if recompute and not isinstance(model, Qwen3):
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]

    @property
    def width(self) -> int:
        return int(self._text.hidden_size)

    @property
    def _text(self) -> Any:
        """The configuration of the part that reads text."""
        config: Any = self.model.config
        return getattr(config, "text_config", None) or config

    @property
    def kind(self) -> str:
        """The `model_type` of its config.json."""
        return "qwen3" if isinstance(self.model, Qwen3) else str(self._text.model_type)

    @property
    def vocabulary(self) -> int:
        return int(self._text.vocab_size)

    @property
    def positions(self) -> int | None:
        """Tokens of the longest sequence that the model has positions for, where it says so."""
        result = getattr(self._text, "max_position_embeddings", None)
        return int(result) if result else None

    def layers(self) -> list[nn.Module]:
        """The repeated blocks: what is sharded and checkpointed one by one."""
        for module in self.model.modules():
            if isinstance(module, nn.ModuleList) and len(module) == self._text.num_hidden_layers:
                return list(module)
        raise Invalid(f"no list of layers in {type(self.model).__name__}", hint="use a decoder-only model")

    def forward(self, packed: PackedBatch) -> Scores:
        kind = "cuda" if packed.tokens.is_cuda else "cpu"
        if not self.packs:
            with torch.autocast(kind, torch.bfloat16, enabled=self.bf16):
                return self._one_by_one(packed)
        local, own = packed, None
        if self.context is not None:
            local, own = share(packed, dist.get_rank(self.context), self.context.size())
        if self.replay is not None:
            self.replay.use(local.experts)
        with nullcontext() if self.routers is None else self.routers.recording():
            scores = self._scored(local, kind)
        if self.context is not None and own is not None:
            parts = (scores.new, scores.entropy, scores.value)
            count = len(packed.targets)
            scores = Scores(*(None if part is None else collected(part, own, count, self.context) for part in parts))  # type: ignore[arg-type]
        if self.routers is None:
            return scores
        return replace(scores, balance=self.routers.of(local, self.context)[packed.sequence])

    def _scored(self, packed: PackedBatch, kind: str) -> Scores:
        """Of this rank's tokens."""
        with torch.autocast(kind, torch.bfloat16, enabled=self.bf16):
            hidden = self.hidden(packed)[packed.predicting]
        with torch.autocast(kind, enabled=False):
            if self.bf16:
                hidden = hidden.to(torch.bfloat16)
            head, share = self._own_head()
            head = head.to(hidden.dtype)
            if (bias := self.bias()) is not None:  # as one more column, of inputs that are 1
                head = torch.cat([head, bias.to(head.dtype)[:, None]], 1)
                read = torch.cat([hidden, hidden.new_ones(len(hidden), 1)], 1)
            else:
                read = hidden
            new, entropy = logprobs(read, head, packed.targets, packed.temperature, share=share)
            value = (
                None if self.critic is None else self.critic(hidden.to(self.critic.weight.dtype))[:, 0].float().clone()
            )
        return Scores(new, entropy, value)

    def _one_by_one(self, packed: PackedBatch) -> Scores:
        """Each trajectory by itself, through the model's own forward pass and its own head."""
        result: list[tuple[Tensor, Tensor]] = []
        values: list[Tensor] = []
        starts = [0, *accumulate(packed.lengths)]  # nothing is shared here
        for number, (start, end) in enumerate(pairwise(starts)):
            chosen = packed.sequence == number
            at = packed.predicting[chosen] - start
            model: Any = self.model
            out = model(
                input_ids=packed.tokens[None, start:end], use_cache=False, output_hidden_states=self.critic is not None
            )
            warmth = packed.temperature[chosen][:, None]
            logs = (out.logits[0][at].to(torch.promote_types(out.logits.dtype, torch.float32)) / warmth).log_softmax(-1)
            new = logs.gather(-1, packed.targets[chosen][:, None])[:, 0]
            result.append((new, -torch.linalg.vecdot(logs.exp(), logs)))
            if self.critic is not None:
                values.append(self.critic(out.hidden_states[-1][0][at].to(self.critic.weight.dtype))[:, 0].float())
        new, entropy = (torch.cat(parts) for parts in zip(*result, strict=True))
        return Scores(new, entropy, torch.cat(values) if values else None)

    def hidden(self, packed: PackedBatch) -> Tensor:
        """[N, width], normalised: what the head is applied to."""
        attention = PackedAttention(packed.runs, self.context)
        if isinstance(self.model, Qwen3):
            again = checkpoint if self.recompute and torch.is_grad_enabled() else None
            return self.model.hidden(packed.tokens, packed.positions, attention, recompute=again)
        model: Any = self.model
        result = model.get_decoder()(
            input_ids=packed.tokens[None], position_ids=packed.positions[None], use_cache=False, packed=attention
        )
        hidden: Tensor = result.last_hidden_state[0]
        return hidden

    def bias(self) -> Tensor | None:
        """[V], of a head that has one."""
        if isinstance(self.model, Qwen3):
            return None
        result: Tensor | None = getattr(self.model.get_output_embeddings(), "bias", None)  # type: ignore[operator]
        return result

    def head(self) -> Tensor:
        """[V, width]"""
        if isinstance(self.model, Qwen3):
            return self.model.head_weight
        weight: Tensor = self.model.get_output_embeddings().weight  # type: ignore[operator]
        return weight

    def _own_head(self) -> tuple[Tensor, VocabularyShare | None]:
        """[V, width], of this rank's tokens where the head is cut."""
        head = self.head()
        if not isinstance(head, DTensor) or self.sharers is None:
            return head, None
        largest = -(-head.shape[0] // self.sharers.size())
        return head.to_local(), VocabularyShare(dist.get_rank(self.sharers) * largest, self.sharers, largest)
