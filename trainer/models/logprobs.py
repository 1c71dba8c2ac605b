"""Log-probabilities and entropies of tokens, without ever holding the logits of a whole micro-batch.

Guarantee: at most `CHUNK` numbers in fp32 exist per vocabulary-sized tensor at a time, whatever the batch; results do
not depend on the size of a chunk beyond rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK = 1 << 24  # numbers: 64 MiB of fp32


def logprobs(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    temperature: Tensor,
    *,
    chunk: int = CHUNK,
    share: VocabularyShare | None = None,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden headᵀ / temperature)[target] and the entropy, both [T] in fp32, both with gradients.

    hidden [T, hidden], head [V, hidden], targets [T], temperature [T]. `share`: of the vocabulary that this rank's
    `head` is for; everything else is the same on the ranks that share it.
    """
    rows = max(1, chunk // (share.largest if share else head.shape[0]))
    result: tuple[Tensor, Tensor] = _LogProbs.apply(hidden, head, targets, temperature, rows, share or COMPLETE)  # type: ignore[no-untyped-call]
    return result


@dataclass(frozen=True, slots=True)
class VocabularyShare:
    """Tokens from `first` on, as many as the head has rows; the other ranks of `group` have the rest."""

    first: int = 0
    group: dist.ProcessGroup | None = None
    largest: int = 0  # tokens of the rank that has most

    def sum(self, values: Tensor) -> Tensor:
        """Over the ranks of the group, in place."""
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def logsumexp(self, logits: Tensor) -> Tensor:
        """Over all tokens, [T, 1] of [T, own tokens]."""
        if self.group is None:
            return logits.logsumexp(-1, keepdim=True)
        largest = logits.amax(-1, keepdim=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return self.sum((logits - largest).exp().sum(-1, keepdim=True)).log() + largest

    def find(self, targets: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """[T, 1] row of the head for each target, and whether it is there."""
        row = targets[:, None] - self.first
        own = (row >= 0) & (row < count)
        return row.clamp(0, count - 1), own


COMPLETE = VocabularyShare()


class _LogProbs(torch.autograd.Function):
    """d log p_target / d logit_v = (1[v = target] - p_v) / T; d H / d logit_v = -p_v (log p_v + H) / T.

    A batch that fits into one chunk keeps its probabilities for that; of a larger one they are computed again.
    """

    @staticmethod
    def forward(
        context: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        temperature: Tensor,
        rows: int,
        share: VocabularyShare,
    ) -> tuple[Tensor, Tensor]:
        kind = torch.promote_types(hidden.dtype, torch.float32)
        chosen, entropy = hidden.new_zeros(len(hidden), dtype=kind), hidden.new_zeros(len(hidden), dtype=kind)
        retained: Tensor | None = None
        at = 0
        for part, target, warmth in _parts(rows, hidden, targets, temperature):
            here = slice(at, at + len(part))
            logs = _log_softmax(part, head, warmth, share)
            row, own = share.find(target, len(head))
            chosen[here] = share.sum(logs.gather(-1, row).masked_fill(~own, 0.0))[:, 0]
            shares = logs.exp()
            entropy[here] = share.sum(-torch.linalg.vecdot(shares, logs))
            retained = shares if len(part) == len(hidden) else None
            at += len(part)
        context.save_for_backward(
            hidden, head, targets, temperature, entropy, *([] if retained is None else [retained])
        )
        context.rows, context.share = rows, share
        context.set_materialize_grads(False)
        return chosen, entropy

    @staticmethod
    def backward(
        context: Any, above: Tensor | None, for_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        share: VocabularyShare = context.share
        hidden, head, targets, temperature, entropy, *retained = context.saved_tensors
        above = torch.zeros_like(entropy) if above is None else above
        slopes = torch.zeros_like(entropy) if for_entropy is None else for_entropy
        for_hidden = torch.empty_like(hidden) if context.needs_input_grad[0] else None
        for_head: Tensor | None = None
        at = 0
        for part, target, warmth, slope, bonus, spread in _parts(
            context.rows, hidden, targets, temperature, above, slopes, entropy
        ):
            shares = retained[0] if retained else _log_softmax(part, head, warmth, share).exp_()
            step = shares * (-slope / warmth)[:, None]
            if for_entropy is not None:
                step -= (torch.xlogy(shares, shares) + shares * spread[:, None]) * (bonus / warmth)[:, None]
            row, own = share.find(target, len(head))
            step.scatter_add_(-1, row, (slope / warmth)[:, None] * own)
            step = step.to(hidden.dtype)
            if for_hidden is not None:
                torch.matmul(step, head, out=for_hidden[at : at + len(part)])
            if context.needs_input_grad[1]:
                more = (step.T @ part).to(above.dtype)
                for_head = more if for_head is None else for_head.add_(more)
            at += len(part)
        if context.needs_input_grad[1]:
            for_head = torch.zeros_like(head) if for_head is None else for_head.to(head.dtype)
        if for_hidden is not None:
            share.sum(for_hidden)
        return for_hidden, for_head, None, None, None, None


def _log_softmax(hidden: Tensor, head: Tensor, temperature: Tensor, share: VocabularyShare) -> Tensor:
    """At least fp32; logits are divided by the temperature of each row."""
    logits = hidden @ head.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits.div_(temperature[:, None])
    return logits.sub_(share.logsumexp(logits))


def _parts(rows: int, *tensors: Tensor) -> zip[tuple[Tensor, ...]]:
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)
