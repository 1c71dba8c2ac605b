"""Bytes of collectives, counted in a network of their own: a plan has them exactly, up to TCP's headers."""

from __future__ import annotations

from bench import scale


def test_ranks_exchange_what_a_plan_says() -> None:
    came = scale.exchanged()
    assert 0.99 < came["ratio"] <= 1.0
    assert came["nccl_mb"] < came["predicted"]


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    assert scale.compared([1.0, 9.0, 2.0], [2.0, 3.0, 2.0]) == {"predicted": 2.0, "measured": 2.0, "ratio": 1.0}
