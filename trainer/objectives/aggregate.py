"""From losses of tokens to one number: which share of the batch's mean each token has.

Pure. Guarantee: shares depend on counts of the *whole* batch alone, so that however the batch is split over
micro-batches, ranks and time, the sum of the parts is the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """Of the whole batch, over all ranks, trajectories without an advantage included."""

    sequences: int = 0
    tokens: int = 0  # sampled ones

    def __add__(self, other: BatchCounts) -> BatchCounts:
        return BatchCounts(self.sequences + other.sequences, self.tokens + other.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregate:
    """share of token t of trajectory i = `numerator` / `denominator`, N trajectories:

    - `token`: 1 / Σ_i |o_i|, every token counts the same (DAPO, arXiv 2503.14476, equation 8).
    - `sequence`: 1 / (N |o_i|), every trajectory counts the same (GRPO, arXiv 2402.03300, equation 3).
    - `constant`: 1 / (N L) with L = `length`, no trajectory is divided by its own length (Dr. GRPO, arXiv 2503.20783,
      section 3.2). L = 1 is the log-probability of the whole trajectory (RLOO).
    """

    kind: Literal["token", "sequence", "constant"] = "token"
    length: int = 1

    def numerator(self, lengths: Tensor) -> Tensor:
        """[N] from `lengths` [N]: the part of a share that its trajectory alone decides."""
        one = lengths.new_ones(lengths.shape, dtype=lengths.dtype).double()
        return one / lengths.clamp(min=1) if self.kind == "sequence" else one

    def denominator(self, counts: BatchCounts) -> float:
        """The part that the whole batch decides."""
        if self.kind == "token":
            return float(max(1, counts.tokens))
        return float(max(1, counts.sequences)) * (self.length if self.kind == "constant" else 1)
