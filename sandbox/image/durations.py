"""Durations as Go writes them. Pure."""

from __future__ import annotations

import re

_UNITS = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}
_PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|ms|s|m|h)")


def nanoseconds(text: str) -> int:
    """Raises ValueError for what is no duration.

    >>> nanoseconds("1m30s"), nanoseconds("0"), nanoseconds("1.5ms")
    (90000000000, 0, 1500000)
    """
    sign = -1 if text.startswith("-") else 1
    rest = text.lstrip("+-")
    if rest == "0":
        return 0
    if not rest or not re.fullmatch(f"(?:{_PART.pattern})+", rest):
        raise ValueError(f"{text!r} is no duration")
    return sign * sum(int(float(number) * _UNITS[unit]) for number, unit in _PART.findall(rest))
