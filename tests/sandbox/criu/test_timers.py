"""Interval timers, which run on while a restored sandbox is held for its comparison."""

from __future__ import annotations

import base64
import signal
import struct
from typing import Any

import pytest

from sandbox.criu import timers


def pending(number: int, code: int) -> dict[str, Any]:
    return {"signals": [{"siginfo": base64.b64encode(struct.pack("=iii", number, 0, code)).decode()}]}


def facts(remaining: int, queue: dict[str, Any], interval: int = 0) -> Any:
    timer = {"isec": interval, "iusec": 0, "vsec": remaining, "vusec": 0}
    return timers.comparable({"real": timer}, queue)["real"][0]["armed"]


@pytest.mark.parametrize(
    ("remaining", "queue", "armed"),
    [
        (3, {}, True),
        (0, {}, False),
        (0, pending(signal.SIGALRM, timers.SI_KERNEL), True),  # it has expired since
        (0, pending(signal.SIGALRM, 0), False),  # by kill(2)
        (0, pending(signal.SIGPROF, timers.SI_KERNEL), False),  # of another timer
    ],
)
def test_a_timer_is_armed_until_its_signal_is_taken(remaining: int, queue: dict[str, Any], armed: bool) -> None:
    assert facts(remaining, queue) is armed


def test_signals_of_timers_do_not_count_and_others_do() -> None:
    sent = pending(signal.SIGALRM, 0)
    assert timers.other_signals(sent) == sent["signals"]
    assert timers.other_signals(pending(signal.SIGALRM, timers.SI_KERNEL)) == []
    assert timers.other_signals(pending(signal.SIGUSR1, timers.SI_TIMER)) == []
