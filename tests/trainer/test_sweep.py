"""A grid of runs: its points, a table of what came of them, and that it continues."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from sandbox.errors import Invalid
from trainer import sweep
from trainer.config import TrainConfig
from trainer.settings import ObjectiveSettings
from trainer.sweep import Sweep, grid, split

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "fix_the_service"


def test_every_combination_is_a_point() -> None:
    result = [point.settings for point in grid(["a=1,2", "b=[1, 2],x", "c='p,q'"])]
    assert result == [[a, b, "c='p,q'"] for a in ("a=1", "a=2") for b in ("b=[1, 2]", "b=x")]
    assert [point.settings for point in grid([])] == [[]]
    assert split("{a=1,b=2},3") == ["{a=1,b=2}", "3"]
    for wrong in ("a", "a=", "a=1,", "=1"):
        with pytest.raises(Invalid, match="is no axis"):
            grid([wrong])
    with pytest.raises(Invalid, match="10000 runs"):
        grid(["a=" + ",".join(map(str, range(100))), "b=" + ",".join(map(str, range(100)))])


# Stands for `python -m pagurus train --resume RUN`: two of the four runs end, the others fail.
TRAIN = """
import json, pathlib, sys
run = pathlib.Path(sys.argv[-1])
plan = json.loads((run / "plan.json").read_text())
if plan["seed"] or (run.parents[1] / "mended").exists():
    (run / "summary.json").write_text(json.dumps({"reward_after": plan["optimiser"]["rate"], "wall_s": plan["seed"]}))
else:
    sys.exit("broken")
"""


def test_a_grid_runs_and_the_same_command_continues_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "train.py"
    program.write_text(TRAIN)
    real = sweep.subprocess.Popen
    begun: list[str] = []

    def start(argv: list[str], **options: object) -> object:
        begun.append(argv[-1])
        return real([sys.executable, str(program), argv[-1]], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(sweep.subprocess, "Popen", start)
    plan = tmp_path / "plan.toml"
    plan.write_text(f'task = "{EXAMPLE}"\nout = "runs"\n')
    axes = ["optimiser.rate=1e-6,1e-5", "seed=0,1"]
    first = Sweep(plan, axes)
    rows = first.run(at_once=2)
    assert [row.state for row in rows] == ["failed", "done", "failed", "done"] and len(begun) == 4
    assert [row.results.get("reward_after") for row in rows] == [None, 1e-6, None, 1e-5]
    assert rows[3].settings == {"optimiser.rate": "1e-5", "seed": "1"}
    stored = msgspec.json.decode((Path(rows[3].run) / "plan.json").read_bytes(), type=TrainConfig, dec_hook=_path)
    assert stored.optimiser.rate == 1e-5 and stored.objective == ObjectiveSettings()
    (first.directory / "mended").touch()
    rows = Sweep(plan, axes).run()
    assert [row.state for row in rows] == ["done"] * 4 and len(begun) == 6


def _path(kind: type, value: str) -> Path:
    return Path(value)


def test_a_wrong_point_is_refused_before_any_run(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"optimiser\.rate"):
        Sweep(EXAMPLE, ["optimiser.rate=1e-6,-1", f"out={tmp_path / 'runs'}"])
    assert not (tmp_path / "runs").exists()
