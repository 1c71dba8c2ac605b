"""Whether what is placed on a GPU fits into its memory."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.decide.engines.device_memory import Demand, describe_memory, need_memory
from rollout.decide.engines.devices import GIB, DevicePlacement, Gpu
from sandbox.errors import Invalid

H800 = [Gpu(number, f"GPU-{number}", "H800", 80 * GIB, 0) for number in range(4)]
APART = DevicePlacement(["GPU-0"], [["GPU-1"]])
SHARED = DevicePlacement(["GPU-0"], [["GPU-0"]])
PAIR = DevicePlacement(["GPU-0"], [["GPU-1", "GPU-2"]])


def demand(rank: float, server: float, reserved: float = 0.0) -> Demand:
    return Demand(rank=int(rank * GIB), server=int(server * GIB), reserved=reserved)


@pytest.mark.parametrize(
    ("placement", "needed"),
    [
        (APART, demand(79, 71, 0.9)),
        (SHARED, demand(39, 15, 0.5)),
        (SHARED, demand(40, 40)),
        (PAIR, demand(10, 72, 0.9)),
        (DevicePlacement(), demand(900, 900)),
    ],
)
def test_what_fits(placement: DevicePlacement, needed: Demand) -> None:
    need_memory(placement, H800, needed)


@pytest.mark.parametrize(
    ("placement", "needed", "says", "hint"),
    [
        (APART, demand(120, 15, 0.9), r"a rank take 120.0 GiB, more than GPU 0 \(H800, 80 GiB\) has", "ranks = 2 or"),
        (APART, demand(10, 130, 0.9), r"130.0 GiB of each of its GPUs, and it may use 72.0 GiB", "parallel = 2 or"),
        (PAIR, demand(10, 100, 0.9), "it may use 72.0 GiB of GPU 1", "pool.parallel = 4 or"),
        (SHARED, demand(24, 15, 0.9), "1 ranks take 24.0 GiB, 1 servers 72.0 GiB", "gpu_memory_utilization = 0.70}"),
        (SHARED, demand(70, 15, 0.9), "does not fit", "GPUs of its own.*offload = true"),
        (SHARED, demand(60, 30), "1 servers 30.0 GiB", "GPUs of its own"),
        (DevicePlacement([], [["GPU-0"]] * 2), demand(0, 15, 0.9), "^what.*fit: 2 servers", "utilization = 0.50}"),
        (DevicePlacement([], [["GPU-0"]], ["GPU-0"]), demand(0, 15, 0.9), "2 servers 144.0", "utilization = 0.50}"),
    ],
)
def test_what_cannot_fit_is_refused_with_a_remedy(
    placement: DevicePlacement, needed: Demand, says: str, hint: str
) -> None:
    parallel = len(placement.engines[0])
    with pytest.raises(Invalid, match=says) as refused:
        need_memory(placement, H800, needed, ranks=1, parallel=parallel)
    assert re.search(hint, refused.value.hint or "")


def test_a_gpu_of_unknown_memory_is_not_judged() -> None:
    unknown = [Gpu(0, "GPU-0", "GB10", 0, 0)]
    need_memory(SHARED, unknown, demand(900, 900, 0.9))
    assert describe_memory(SHARED, unknown, demand(900, 900)) == []


@given(rank=st.integers(1, 100), server=st.integers(1, 70), reserved=st.integers(10, 95))
def test_the_share_that_is_proposed_fits(rank: int, server: int, reserved: int) -> None:
    try:
        need_memory(SHARED, H800, demand(rank, server, reserved / 100))
    except Invalid as error:
        hint = error.hint or ""
        if "utilization = " in hint:
            share = float(hint.partition("utilization = ")[2][:4])
            need_memory(SHARED, H800, demand(rank, server, share))


def test_rows_for_people() -> None:
    assert describe_memory(SHARED, H800, demand(8, 15, 0.5)) == [("memory of GPU 0", "at least 48.0 GiB of 80.0 GiB")]
