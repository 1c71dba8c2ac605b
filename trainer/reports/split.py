"""Where the wall time of a run went: a pure function of how long the trainer worked and waited.

Guarantee: the parts of a step add up to its wall time. While the trainer works, the time is the trainer's, though
rollouts continue. While it waits for a batch, the time is divided in proportion to what the trajectories spent in each
phase at that time; what remains when no trajectory did anything is idle.
"""

from __future__ import annotations

from collections.abc import Mapping

PART = {  # of the rollout's phases
    "generate": "engine",
    "create": "environment",
    "reset": "environment",
    "step": "environment",
    "checkpoint": "checkpoint",
    "recover": "checkpoint",
    "score": "reward",
}
PARTS = ("engine", "environment", "checkpoint", "reward", "trainer", "idle")


def split(*, waited: float, worked: float, spent: Mapping[str, float]) -> dict[str, float]:
    """Seconds by part. `spent`: trajectory-seconds by phase, and ``idle``, during the wait.

    Example: two trajectories generate for all of a wait of 4 s: ``split(waited=4, worked=1, ...)["engine"] == 4``.
    """
    parts = dict.fromkeys(PARTS, 0.0)
    parts["trainer"] = worked
    parts["idle"] = min(waited, max(0.0, spent.get("idle", 0.0)))
    phases = {name: seconds for name, seconds in spent.items() if name != "idle"}
    busy, total = waited - parts["idle"], sum(phases.values())
    if total <= 0:
        parts["idle"] += busy
        return parts
    for phase, seconds in phases.items():
        parts[PART[phase]] += busy * seconds / total
    return parts
