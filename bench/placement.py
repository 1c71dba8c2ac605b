"""How long the choice of a host takes.

Sandboxes are placed one after another over hosts of different sizes, by the function that the coordinator calls, and
counted there; a tenth of them continue from a checkpoint that one host holds. Nothing is started. `decide_ms_*`: of one
decision; `decide_cpu_ms_p99`: its processor time, which other programs of the machine do not prolong. `pressed_limit`
and `pressed_minimum`: sandboxes for each processor, at the fullest and the emptiest host.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace
from typing import Any

from bench.harness import command
from coordinator.decide import place
from coordinator.decide.place import HostView, PlacementRequest
from trainer.machine import processor

GIB = float(1 << 30)


def measured(hosts: int, sandboxes: int, seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    views = {}
    for number in range(hosts):
        cpus = chance.choice([16, 32, 64])
        memory = 8 * cpus * GIB
        views[f"h{number:04}"] = HostView(
            f"h{number:04}", cpus, memory, 0.9 * memory, images=frozenset({"debian"}), labels={"zone": "ab"[number % 2]}
        )
    took, used = [], []
    for _ in range(sandboxes):
        holders = frozenset({chance.choice(list(views))}) if chance.random() < 0.1 else frozenset()
        target = PlacementRequest(images=frozenset({"debian"}), holders=holders, movable=True, memory=GIB / 8)
        began, ran = time.perf_counter(), time.thread_time()
        name = place.ranked(views.values(), target)[0]
        used.append(1000 * (time.thread_time() - ran))
        took.append(1000 * (time.perf_counter() - began))
        view = views[name]
        views[name] = replace(view, sandboxes=view.sandboxes + 1, memory_free=view.memory_free - GIB / 16)
    took.sort()
    used.sort()
    density = [view.sandboxes / view.cpus for view in views.values()]
    return {
        "hosts": hosts,
        "sandboxes": sandboxes,
        "decide_ms_p50": round(took[len(took) // 2], 3),
        "decide_ms_p99": round(took[int(0.99 * len(took))], 3),
        "decide_cpu_ms_p99": round(used[int(0.99 * len(used))], 3),
        "pressed_least": round(min(density), 2),
        "pressed_most": round(max(density), 2),
        "processor": processor(),
        "load": os.getloadavg()[0],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--hosts", type=int, default=100)
    parser.add_argument("--sandboxes", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    result = measured(options.hosts, options.sandboxes, options.seed)
    command.show(result, options)
    return 0
