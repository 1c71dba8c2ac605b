"""Timers of a process and the signals that they send, of the JSON of its images, as two dumps of one state have them.

Timers run while a restored sandbox is held for its comparison. No I/O.
"""

from __future__ import annotations

import base64
import signal
import struct
from typing import Any

SI_TIMER, SI_KERNEL = -2, 0x80
OF_ITIMERS: dict[int, str] = {signal.SIGALRM: "real", signal.SIGVTALRM: "virt", signal.SIGPROF: "prof"}


def comparable(timers: dict[str, Any], queue: dict[str, Any]) -> dict[str, Any]:
    """Intervals and settings; the remaining time only as armed or not. `queue`: the pending signals of the process."""
    result: dict[str, Any] = {}
    expired = _expired(queue)
    for name, value in timers.items():
        entries = value if isinstance(value, list) else [value]
        result[name] = [
            {
                **{k: v for k, v in entry.items() if k not in ("vsec", "vusec", "vnsec", "overrun")},
                # With an interval also when nothing remains: it has just expired and starts again with its signal.
                "armed": any(entry.get(k) for k in ("vsec", "vusec", "vnsec", "isec", "iusec", "insec"))
                or name in expired,
            }
            for entry in entries
        ]
    return result


def _pending(queue: dict[str, Any]) -> list[tuple[Any, int, int]]:
    """The pending signals, each with its number and code (siginfo begins with number, errno, code)."""
    result = []
    for entry in queue.get("signals", []):
        info = entry["siginfo"]
        number, _, code = struct.unpack_from("=iii", base64.b64decode(info) if isinstance(info, str) else bytes(info))
        result.append((entry, number, code))
    return result


def other_signals(queue: dict[str, Any]) -> list[Any]:
    """The pending signals but for those that timers sent: timers run while the processes are held."""
    return [
        entry
        for entry, number, code in _pending(queue)
        if code != SI_TIMER and not (code == SI_KERNEL and number in OF_ITIMERS)
    ]


def _expired(queue: dict[str, Any]) -> set[str]:
    """The interval timers that have expired, and whose signals are pending."""
    return {OF_ITIMERS[number] for _, number, code in _pending(queue) if code == SI_KERNEL and number in OF_ITIMERS}
