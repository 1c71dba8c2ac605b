"""Losses of pairs of answers. Pure: one number per pair, from sums of log-probabilities.

Symbols: y_w the chosen answer, y_l the rejected one; h = β (log π(y_w)/π_ref(y_w) - log π(y_l)/π_ref(y_l)).
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn import functional as F

PairLoss = Literal["sigmoid", "hinge", "ipo"]


def preference_loss(
    chosen: Tensor, rejected: Tensor, chosen_reference: Tensor, rejected_reference: Tensor,
    *, beta: float, kind: PairLoss = "sigmoid", smoothing: float = 0.0, lengths: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """ℓ [P] of P pairs, from log-probabilities of whole answers [P].

    - `sigmoid`: -(1 - ε) log sigmoid(h) - ε log sigmoid(-h), ε = `smoothing` (DPO, arXiv 2305.18290, equation 7;
      with ε conservative DPO, Mitchell 2023).
    - `hinge`: max(0, 1 - h) (SLiC, arXiv 2305.10425).
    - `ipo`: (h/β - 1/(2β))², log-probabilities being means over the tokens of an answer, which `lengths` are of
      (IPO, arXiv 2310.12036, equation 17).
    """
    better, worse = chosen - chosen_reference, rejected - rejected_reference
    if kind == "ipo":
        assert lengths is not None, "IPO takes means over tokens"
        return (better / lengths[0] - worse / lengths[1] - 1 / (2 * beta)).square()
    margin = beta * (better - worse)
    if kind == "hinge":
        return F.relu(1 - margin)
    return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)
