"""Log-probabilities and entropies of tokens, without ever holding the logits of a whole micro-batch.

Guarantee: at most `CHUNK` numbers in fp32 exist per vocabulary-sized tensor at a time, whatever the batch; results do
not depend on the size of a chunk beyond rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 1 << 24  # numbers: 64 MiB of fp32


def logprobs(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: Tensor, *, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden headᵀ / temperature)[target] and the entropy, both [T] in fp32, both with gradients.

    hidden [T, hidden], head [V, hidden], targets [T], temperature [T].
    """
    rows = max(1, chunk // head.shape[0])
    result: tuple[Tensor, Tensor] = _LogProbs.apply(hidden, head, targets, temperature, rows)  # type: ignore[no-untyped-call]
    return result


class _LogProbs(torch.autograd.Function):
    """d log p_target / d logit_v = (1[v = target] - p_v) / T; d H / d logit_v = -p_v (log p_v + H) / T.

    A batch that fits into one chunk keeps its probabilities for that; of a larger one they are computed again.
    """

    @staticmethod
    def forward(
        context: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperature: Tensor, rows: int
    ) -> tuple[Tensor, Tensor]:
        kind = torch.promote_types(hidden.dtype, torch.float32)
        chosen, entropy = hidden.new_zeros(len(hidden), dtype=kind), hidden.new_zeros(len(hidden), dtype=kind)
        retained: Tensor | None = None
        at = 0
        for part, target, warmth in _parts(rows, hidden, targets, temperature):
            here = slice(at, at + len(part))
            logs = _log_softmax(part, head, warmth)
            chosen[here] = logs.gather(-1, target[:, None])[:, 0]
            shares = logs.exp()
            entropy[here] = -torch.linalg.vecdot(shares, logs)
            retained = shares if len(part) == len(hidden) else None
            at += len(part)
        context.save_for_backward(
            hidden, head, targets, temperature, entropy, *([] if retained is None else [retained])
        )
        context.rows = rows
        context.set_materialize_grads(False)
        return chosen, entropy

    @staticmethod
    def backward(
        context: Any, above: Tensor | None, for_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, head, targets, temperature, entropy, *retained = context.saved_tensors
        above = torch.zeros_like(entropy) if above is None else above
        slopes = torch.zeros_like(entropy) if for_entropy is None else for_entropy
        for_hidden = torch.empty_like(hidden) if context.needs_input_grad[0] else None
        for_head: Tensor | None = None
        at = 0
        for part, target, warmth, slope, bonus, spread in _parts(
            context.rows, hidden, targets, temperature, above, slopes, entropy
        ):
            shares = retained[0] if retained else _log_softmax(part, head, warmth).exp_()
            step = shares * (-slope / warmth)[:, None]
            if for_entropy is not None:
                step -= (torch.xlogy(shares, shares) + shares * spread[:, None]) * (bonus / warmth)[:, None]
            step.scatter_add_(-1, target[:, None], (slope / warmth)[:, None])
            step = step.to(hidden.dtype)
            if for_hidden is not None:
                torch.matmul(step, head, out=for_hidden[at : at + len(part)])
            if context.needs_input_grad[1]:
                more = (step.T @ part).to(above.dtype)
                for_head = more if for_head is None else for_head.add_(more)
            at += len(part)
        if context.needs_input_grad[1]:
            for_head = torch.zeros_like(head) if for_head is None else for_head.to(head.dtype)
        return for_hidden, for_head, None, None, None


def _log_softmax(hidden: Tensor, head: Tensor, temperature: Tensor) -> Tensor:
    """At least fp32; logits are divided by the temperature of each row."""
    logits = hidden @ head.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits.div_(temperature[:, None])
    return logits.sub_(logits.logsumexp(-1, keepdim=True))


def _parts(rows: int, *tensors: Tensor) -> zip[tuple[Tensor, ...]]:
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)
