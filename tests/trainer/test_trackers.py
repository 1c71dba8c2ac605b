"""Figures reach the trackers that a run names, in the same tracker run after a restart."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sandbox.errors import Invalid
from trainer.config import TRACKERS as NAMES
from trainer.config import TrainConfig, make
from trainer.reports import plots
from trainer.reports.metrics import MetricsRecorder, read_lines
from trainer.reports.trackers import TRACKERS, identity, open_tracker


class Service:
    """What wandb and mlflow would have, by run: their calls as trainer.reports.trackers makes them."""

    def __init__(self) -> None:
        self.runs: dict[str, list[tuple[int, dict[str, float]]]] = {}
        self.settings: dict[str, dict[str, Any]] = {}
        self.ended: list[str] = []

    def wandb(self) -> ModuleType:
        made = ModuleType("wandb")

        def init(*, id: str, name: str, dir: str, resume: str, config: dict[str, str]) -> Any:
            assert resume == "allow" and Path(dir).is_dir() and id.startswith(name)
            self.settings[id] = config
            log = self.runs.setdefault(id, [])
            return SimpleNamespace(
                log=lambda metrics, step: log.append((step, metrics)), finish=lambda: self.ended.append(id)
            )

        made.init = init  # type: ignore[attr-defined]
        return made

    def mlflow(self) -> tuple[ModuleType, ModuleType]:
        service = self

        class MlflowClient:
            def get_experiment_by_name(self, name: str) -> Any:
                return SimpleNamespace(experiment_id="7") if name == "Default" else None

            def create_run(self, experiment_id: str, run_name: str) -> Any:
                assert experiment_id == "7"
                service.runs[f"id-{run_name}"] = []
                return SimpleNamespace(info=SimpleNamespace(run_id=f"id-{run_name}"))

            def log_param(self, run_id: str, name: str, value: str) -> None:
                service.settings.setdefault(run_id, {})[name] = value

            def log_metric(self, run_id: str, name: str, value: float, step: int) -> None:
                service.runs[run_id].append((step, {name: value}))

            def set_terminated(self, run_id: str) -> None:
                service.ended.append(run_id)

        package, tracking = ModuleType("mlflow"), ModuleType("mlflow.tracking")
        tracking.MlflowClient = MlflowClient  # type: ignore[attr-defined]
        return package, tracking


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    made = Service()
    package, tracking = made.mlflow()
    for module in (made.wandb(), package, tracking):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


@pytest.mark.parametrize(("name", "run"), [("wandb", "run-a"), ("mlflow", "id-run-a")])
def test_a_run_that_goes_on_goes_on_in_its_tracker(name: str, run: str, service: Service, tmp_path: Path) -> None:
    directory = tmp_path / "run-a"
    directory.mkdir()
    for step in (1, 2):  # two processes, one after the other
        with MetricsRecorder(directory, [open_tracker(name, directory, {"steps": "2"})]) as recorder:
            recorder.step(step, {"reward": 0.5, "wall": {"engine": float(step)}, "note": "words", "complete": True})
    run = identity(directory) if name == "wandb" else run
    metrics: dict[int, dict[str, float]] = {}
    for step, reported in service.runs[run]:
        metrics.setdefault(step, {}).update(reported)
    assert metrics == {step: {"reward": 0.5, "wall/engine": float(step)} for step in (1, 2)}
    assert service.settings[run] == {"steps": "2"} and service.ended == [run, run]
    assert len(service.runs) == 1
    assert [line["step"] for line in read_lines(directory / "metrics.jsonl")] == [1, 2]


def test_runs_of_one_name_are_different_runs(tmp_path: Path) -> None:
    one, other = tmp_path / "a" / "20260101-101500", tmp_path / "b" / "20260101-101500"
    for directory in (one, other):
        directory.mkdir(parents=True)
    assert identity(one) != identity(other) and identity(one) == identity(one)
    assert identity(one).startswith(one.name)


def test_the_plot_of_rewards_keeps_evaluations_apart(tmp_path: Path) -> None:
    with MetricsRecorder(tmp_path) as recorder:
        recorder.step(0, {"reward_held_out": 0.1})
        recorder.step(1, {"reward": 0.5})
        recorder.step(1, {"reward_held_out": 0.9})
    drawn: list[tuple[Any, Any]] = []
    axes = SimpleNamespace(
        plot=lambda x, y, *_, **__: drawn.append((x, y)),
        annotate=lambda *_, **__: None, set=lambda **_: None, legend=lambda *_, **__: None, grid=lambda *_, **__: None,
    )  # fmt: skip
    plots._reward(axes, read_lines(tmp_path / "metrics.jsonl"))
    assert drawn[0] == ([1], [0.5]) and drawn[1:3] == [(0, 0.1), (1, 0.9)]


def test_a_tracker_that_fails_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: Any) -> None:
        raise ConnectionError("nobody there")

    with MetricsRecorder(tmp_path, [SimpleNamespace(log=refuse, close=lambda: None)]) as recorder:
        recorder.step(3, {"reward": 1.0})
    assert "did not take the figures of step 3: nobody there" in caplog.text
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 3, "reward": 1.0}]


def test_a_tracker_that_is_not_installed_or_known_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(Invalid, match=r"the tracker wandb needs wandb \(pip install wandb\)"):
        open_tracker("wandb", tmp_path, {})
    with pytest.raises(Invalid, match="no tracker 'wandbb'"):
        make({"task": "x", "trackers": ["wandbb"]})
    assert set(NAMES) == set(TRACKERS) >= set(TrainConfig(task=Path()).trackers)
