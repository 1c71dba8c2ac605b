"""Where the figures of steps go besides `metrics.jsonl`: TensorBoard, Weights & Biases, MLflow, by their names.

Guarantee: a process that continues a run continues in the same tracker run, at the steps after those that it has; a
tracker that cannot be reached when the run begins is reported before anything is spent.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from sandbox import durable
from sandbox.errors import Invalid


class Tracker(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class _TensorBoard:
    """Event files in ``tensorboard/`` of the run directory."""

    def __init__(self, run: Path, config: Mapping[str, str]):
        from torch.utils.tensorboard import SummaryWriter  # seconds to import: only a run pays

        self._board = SummaryWriter(str(run / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, number in metrics.items():
            self._board.add_scalar(name, number, step)
        self._board.flush()

    def close(self) -> None:
        self._board.close()


def identity(run: Path) -> str:
    """Of a run directory, the same for every process that continues it, on any host. Directories are named by the
    second: two runs may have one name."""
    existing = run / "tracker.id"
    if not existing.exists():
        durable.publish(existing, f"{run.name}-{secrets.token_hex(4)}".encode())
    return existing.read_text()


class _Wandb:
    """Server, project and key are those of its own environment variables; the run is called like the run directory."""

    def __init__(self, run: Path, config: Mapping[str, str]):
        import wandb

        self._run = wandb.init(id=identity(run), name=run.name, dir=str(run), resume="allow", config=dict(config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    """Server and experiment are those of its own environment variables; else ``mlruns/`` of the working directory."""

    def __init__(self, run: Path, config: Mapping[str, str]):
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()
        existing = run / "mlflow.id"
        if existing.exists():
            self._id = existing.read_text().strip()
            return
        experiment = self._client.get_experiment_by_name(os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default"))
        made = self._client.create_run(experiment.experiment_id if experiment else "0", run_name=run.name)
        self._id = made.info.run_id
        for name, value in config.items():
            self._client.log_param(self._id, name, value)
        durable.publish(existing, self._id.encode())

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, number in metrics.items():
            self._client.log_metric(self._id, name.replace("+", "plus"), number, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._id)


TRACKERS: dict[str, Callable[[Path, Mapping[str, str]], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "mlflow": _Mlflow,
}


def open_tracker(name: str, run: Path, config: Mapping[str, str]) -> Tracker:
    """The tracker of this name, for this run."""
    try:
        return TRACKERS[name](run, config)
    except ModuleNotFoundError as error:
        raise Invalid(f"the tracker {name} needs {error.name}", hint=f"pip install {error.name}") from None
