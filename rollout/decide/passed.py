"""How often a policy passes: pass@k with an interval. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z = 1.959963984540054  # of the normal distribution, for 95 %


def at_least_one(samples: int, passed: int, k: int) -> float:
    """The probability that one of `k` episodes passes, estimated without bias from `samples` of which `passed` did.

    >>> at_least_one(4, 1, 1), at_least_one(4, 1, 4), at_least_one(4, 0, 2)
    (0.25, 1.0, 0.0)
    """
    if not 1 <= k <= samples or not 0 <= passed <= samples:
        raise ValueError(f"pass@{k} of {passed} in {samples} means nothing")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of values between 0 and 1, one for each task, and its 95 % interval (Wilson's).

    It holds for zeros and ones; values between them scatter less, so that for them it is rather too wide.

    >>> [round(each, 3) for each in interval([1.0] * 10)]
    [1.0, 0.722, 1.0]
    """
    if not values:
        return math.nan, 0.0, 1.0
    count, mean = len(values), sum(values) / len(values)
    middle = (mean + Z * Z / (2 * count)) / (1 + Z * Z / count)
    half = Z / (1 + Z * Z / count) * math.sqrt(mean * (1 - mean) / count + Z * Z / (4 * count * count))
    return mean, max(0.0, middle - half), min(1.0, middle + half)
