"""What jobs cost: time times what they held, at the prices of the cluster's operator.

A price is that of one unit for an hour. What has no price costs nothing.
"""

from __future__ import annotations

from coordinator.decide.queue import Amounts

HOUR = 3600.0


def cost(seconds: float, amounts: Amounts, prices: Amounts) -> float:
    """Of amounts that were held for so long.

    >>> cost(1800, {"GPU": 2, "CPU": 8, "pool": 1}, {"GPU": 2.5, "CPU": 0.05})
    2.7
    """
    return seconds / HOUR * sum(amount * prices.get(name, 0.0) for name, amount in amounts.items())


def so_far(started: float | None, ended: float | None, now: float) -> float:
    """Seconds for which a job has held its room; none before it has begun, or where a clock went back."""
    return 0.0 if started is None else max(0.0, (now if ended is None else ended) - started)
