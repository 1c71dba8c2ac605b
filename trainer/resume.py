"""The trainer's own save: everything that a killed run needs to go on where it was.

Owns: `<run>/resume/`. Does not own: published weights, the ledger of prompts (rollout).
Guarantee: a save is visible only when complete (written aside, synced, renamed); after `kill -9` at any instant
`load` returns the state after some optimiser step, with the batch that this step consumed named in it, so that
the ledger learns of it exactly once. Called resume state, never checkpoint: checkpoints are of sandboxes.
"""

from __future__ import annotations

import io
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainer.publish import need_finite, sync_folder

KEEP = 2


@dataclass(slots=True)
class State:
    """After optimiser step number `step` (0: fitted to the demonstrations, no GRPO yet)."""

    step: int
    version: int  # of the weights that follow from it
    model: dict[str, Any]
    optimiser: dict[str, Any]
    random: torch.Tensor  # torch's generator
    consumed: list[str] = field(default_factory=list)  # prompts of the step's batch
    totals: dict[str, Any] = field(default_factory=dict)  # counters of the run so far, as report.Totals


def save(folder: Path, state: State) -> None:
    """Writes `state` as the newest save below `folder`; older ones but the last are collected."""
    need_finite(state.model)
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / ".new"
    content = io.BytesIO()  # torch's own writer turns a full disk into an error without a number
    torch.save({name: getattr(state, name) for name in State.__slots__}, content)
    with aside.open("wb") as out:
        out.write(content.getbuffer())
        out.flush()
        os.fsync(out.fileno())
    aside.rename(folder / f"step-{state.step:06d}.pt")
    sync_folder(folder)
    for old in _saves(folder)[:-KEEP]:
        old.unlink(missing_ok=True)


def load(folder: Path) -> State | None:
    """The newest save, or None where there is none yet."""
    saves = _saves(folder)
    if not saves:
        return None
    return State(**torch.load(saves[-1], weights_only=True))


def discard(folder: Path) -> None:
    """Forgets every save: the run has ended well."""
    shutil.rmtree(folder, ignore_errors=True)


def _saves(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.pt"))
