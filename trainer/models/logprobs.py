"""Log-probabilities and entropies of tokens, without ever holding the logits of a whole micro-batch.

Owns: the arithmetic and its gradient. Guarantee: at most `CHUNK` numbers in fp32 exist per vocabulary-sized tensor at a
time, whatever the batch; results do not depend on the size of a chunk beyond rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 1 << 24  # numbers: 64 MiB of fp32


def logprobs(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: Tensor, *, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden headᵀ / temperature)[target] and the entropy, both [T] in fp32; only the first has gradients.

    hidden [T, hidden], head [V, hidden], targets [T], temperature [T].
    """
    rows = max(1, chunk // head.shape[0])
    found: tuple[Tensor, Tensor] = _LogProbs.apply(hidden, head, targets, temperature, rows)
    return found


class _LogProbs(torch.autograd.Function):
    """d log p_target / d logit_v = (1[v = target] - p_v) / temperature; the logits are computed again for it."""

    @staticmethod
    def forward(
        context: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperature: Tensor, rows: int
    ) -> tuple[Tensor, Tensor]:
        chosen, entropy, total = [], [], []
        for part, target, warmth in _parts(rows, hidden, targets, temperature):
            logits = _logits(part, head, warmth)
            normaliser = logits.logsumexp(-1)
            picked = logits.gather(-1, target[:, None])[:, 0]
            entropy.append(normaliser - (logits.sub(normaliser[:, None]).exp_() * logits).sum(-1))
            chosen.append(picked - normaliser)
            total.append(normaliser)
        empty = [hidden.new_zeros(0, dtype=torch.promote_types(hidden.dtype, torch.float32))]
        context.save_for_backward(hidden, head, targets, temperature, torch.cat(total or empty))
        context.rows = rows
        entropies = torch.cat(entropy or empty)
        context.mark_non_differentiable(entropies)
        return torch.cat(chosen or empty), entropies

    @staticmethod
    def backward(context: Any, above: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, head, targets, temperature, total = context.saved_tensors
        for_hidden = torch.empty_like(hidden) if context.needs_input_grad[0] else None
        for_head = torch.zeros_like(head, dtype=total.dtype) if context.needs_input_grad[1] else None
        at = 0
        for part, target, warmth, normaliser, slope in _parts(context.rows, hidden, targets, temperature, total, above):
            step = -_logits(part, head, warmth).sub_(normaliser[:, None]).exp_()
            step.scatter_add_(-1, target[:, None], torch.ones_like(target[:, None], dtype=step.dtype))
            step.mul_((slope / warmth)[:, None])
            step = step.to(hidden.dtype)
            if for_hidden is not None:
                for_hidden[at : at + len(part)] = step @ head
            if for_head is not None:
                for_head.add_(step.T @ part)
            at += len(part)
        return for_hidden, None if for_head is None else for_head.to(head.dtype), None, None, None


def _logits(hidden: Tensor, head: Tensor, temperature: Tensor) -> Tensor:
    """At least fp32, divided by the temperature of each row."""
    logits = hidden @ head.T
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature[:, None]


def _parts(rows: int, *tensors: Tensor) -> zip[tuple[Tensor, ...]]:
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)
