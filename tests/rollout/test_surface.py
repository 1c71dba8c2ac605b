"""The public surface of the rollout, and how light it is."""

from __future__ import annotations

import subprocess
import sys

import rollout


def test_the_public_names() -> None:
    assert rollout.__all__ == [
        "Batch",
        "Environment",
        "Faults",
        "Final",
        "Group",
        "Limits",
        "Observation",
        "Recovery",
        "RolloutConfig",
        "RolloutController",
        "Score",
        "Trajectory",
        "TurnRecord",
        "reward",
        "run_trajectory",
    ]
    assert all(hasattr(rollout, name) for name in rollout.__all__)


def test_importing_the_rollout_loads_neither_torch_nor_the_daemon() -> None:
    code = "import sys, rollout, rollout.engine.supervisor\n"
    code += "print([m for m in ('torch', 'daemon', 'ebpf') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
