"""What `--dry-run` prints: the plan, with the memory and the time that it will take. Nothing is started or written."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from rollout.decide.engines.device_memory import describe_memory
from rollout.decide.engines.devices import describe
from rollout.engine import gpus
from rollout.environments import directory as task
from trainer import estimate
from trainer.config import TrainConfig, need_startable
from trainer.distributed.host_fleet import PORT, default_address
from trainer.distributed.mesh import fitting_hosts
from trainer.machine import devices
from trainer.models.load import empty
from trainer.objectives import Objective, build
from trainer.settings import flat
from trainer.steps import work_plan


def preview(config: TrainConfig) -> int:
    """What a run of this configuration would do and take."""
    start, held_out = need_startable(config)
    shown = Table(
        title=f"plan of {task.load(config.task).name}; nothing was started", show_header=False, title_justify="left"
    )
    shown.add_column()
    shown.add_column(overflow="fold")
    for name, value in flat(config):
        shown.add_row(name, "" if value is None else str(value))
    shown.add_row("[bold]objective, resolved[/bold]", resolved(build(config.objective, length=config.max_length)))
    shown.add_row("[bold]evaluations[/bold]", "\n".join(split.says for split in held_out))
    existing = gpus.visible()
    placement, needed = devices(config, start)
    rows = describe(placement, existing) if existing else [("devices", "CPU: no GPU is visible")]
    rows += describe_hosts(config)
    for name, value in rows + (describe_memory(placement, existing, needed) if needed else []):
        shown.add_row(f"[bold]{name}[/bold]", value)
    for name, value in estimate.table(estimated(config, start)):
        shown.add_row(f"[bold]{name}[/bold]", value)
    Console().print(shown)
    return 0


def describe_hosts(config: TrainConfig) -> list[tuple[str, str]]:
    """Rows for people: (machine, its ranks), and what is left when one is lost; none for a run on one machine."""
    hosts, ranks = config.hosts, config.ranks // config.hosts.count
    if hosts.count == 1:
        return []
    address = hosts.address or default_address()
    rows = [("host 0", f"this machine, {address}: {_ranks(0, ranks)}, batches, saves, weights")]
    for number in range(1, hosts.count):
        name = hosts.agents[number - 1] if hosts.agents else "any"
        rows.append((f"host {number}", f"agent {name}: {_ranks(number * ranks, ranks)}"))
    standby = hosts.agents[hosts.count - 1 :]
    rows += [("standby", ", ".join(standby))] if standby else []
    left = fitting_hosts(hosts.count - 1, ranks, **msgspec.structs.asdict(config.mesh))
    fewer = f"{left * ranks} ranks on {left} hosts, from the last save" if left else "the run stops: the mesh needs all"
    rows.append(("if a host is lost", f"after {hosts.wait:g} s without another one, {fewer}"))
    scheme = "https" if hosts.tls else "http"
    head = f"{scheme}://{address}:{PORT if hosts.port is None else hosts.port or 'PORT'}"
    return [*rows, ("agents", f"python -m trainer.distributed.agent --head {head} --directory DIRECTORY")]


def _ranks(first: int, count: int) -> str:
    return f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"


def resolved(objective: Objective) -> str:
    """Every part of it that is there."""
    parts = ((item.name, getattr(objective, item.name)) for item in dataclasses.fields(objective))
    return "\n".join(f"{name}: {value}" for name, value in parts if name != "source" and value not in (None, (), False))


def estimated(config: TrainConfig, start: Path) -> estimate.Estimate:
    """For a rank of this run, where every trajectory is as long as it may be."""
    flops = estimate.measure_flops(bf16=config.bf16)
    plan = work_plan(config, Path())
    objective = build(config.objective)
    with estimate.ghostly():
        other = objective.advantage.baseline == "teacher" and Path(config.objective.teacher)
        read = empty(other or start) if other or objective.kl is not None else None
        return estimate.estimate(
            empty(start, lora=plan.lora),
            budget=config.optimiser.budget,
            longest=config.max_length,
            tokens=config.groups * config.size * config.max_length,
            recompute=config.recompute,
            flops=flops,
            ranks=config.ranks // config.mesh.replicate,
            bf16=config.bf16,
            reference=0 if read is None else sum(parameter.numel() for parameter in read.parameters()),
        )
