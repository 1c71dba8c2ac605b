"""A run that takes a minute, and a look into its databases. Not a test module."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

from trainer.config import TrainConfig

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fix_the_service"


def small(out: Path, **changes: Any) -> TrainConfig:
    options: dict[str, Any] = {
        "task": EXAMPLE, "steps": 2, "groups": 2, "size": 2, "concurrency": 4, "held_out": 2, "faults": 2,
        "pace": 0.0, "out": out,
    }  # fmt: skip
    return TrainConfig(**{**options, **changes})


def rows(directory: Path, file: str, query: str) -> int:
    """A count in a database that another process writes."""
    path = directory / "rollout" / file
    if not path.exists():
        return 0
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)) as db:
        try:
            return int(db.execute(query).fetchone()[0])
        except sqlite3.OperationalError:  # its tables are being made
            return 0
