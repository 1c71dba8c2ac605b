"""The processes of each part of a job.

::

    run: supervisor ─▶ rollout ──────── TLS ────────▶ engine-0, engine-1, ...: supervisor ─▶ keeper ─▶ engine
                          ▲ TLS
    trainer: supervisor ──┴▶ trainer                  all of them read and write the run directory
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coordinator import local
from coordinator.jobs.shape import ENGINE, TRAINER
from daemon.auth.tls import self_signed
from rollout.engine import tls


def make_key(run: Path) -> None:
    """Certificate and key by which the parts of a job on several machines know each other, if there is none yet."""
    self_signed(tls.directory_of(run), "localhost")


@dataclass(frozen=True)
class PartProcesses:
    """What is kept alive for a part. `directory`: where its processes are written down."""

    directory: Path
    programs: Mapping[str, Sequence[str]]
    standbys: Sequence[str] = field(default=local.STANDBYS)


def processes(run: Path, part: str, others: Sequence[str], address: str) -> PartProcesses:
    """`others`: parts of the same job. `address`: of this machine, for the others."""
    if part == TRAINER:
        argv = [sys.executable, "-m", "trainer", str(run), "--elsewhere", "--at", address]
        return PartProcesses(local.part_of(run, part), {TRAINER: argv}, (TRAINER,))
    if part.startswith(ENGINE):
        argv = [sys.executable, "-m", "rollout.service.keeper", str(run), part.removeprefix(ENGINE), "--at", address]
        return PartProcesses(local.part_of(run, part), {"keeper": argv}, ())
    programs = dict(local.programs(run))
    if TRAINER in others:
        del programs["trainer"]
        programs["rollout"] = [*programs["rollout"], "--at", address]
    if any(item.startswith(ENGINE) for item in others):
        programs["rollout"] = [*programs["rollout"], "--placed"]
    return PartProcesses(run, programs)
