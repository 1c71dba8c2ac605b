"""From settings to optimisers: AdamW, Muon for the matrices of layers, AdamW with its state in 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sandbox.errors import Invalid
from trainer.settings import OptimiserSettings

CRITIC = "critic."  # prefix of the value head's parameters
FACTOR = "factor"  # of a group: its rate is that of the step times this


def make(module: nn.Module, settings: OptimiserSettings, *, critic_rate: float = 0.0) -> list[torch.optim.Optimizer]:
    """Of all trained parameters. `critic_rate`: of the value head, where it has one of its own."""
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    head = [parameter for name, parameter in named if name.startswith(CRITIC)]
    rest = [(name, parameter) for name, parameter in named if not name.startswith(CRITIC)]
    matrices: list[nn.Parameter] = []
    if settings.kind == "muon":
        matrices = [parameter for name, parameter in rest if parameter.ndim == 2 and not _of_vocabulary(name)]
    chosen = {id(parameter) for parameter in matrices}
    groups = [
        {"params": [parameter for _, parameter in rest if id(parameter) not in chosen], FACTOR: 1.0},
        {"params": head, FACTOR: critic_rate / settings.rate if critic_rate else 1.0},
    ]
    made: list[torch.optim.Optimizer] = []
    if any(group["params"] for group in groups):
        made.append(_adamw([group for group in groups if group["params"]], settings))
    if matrices:
        # Updates of the size that AdamW's have (0.2 √max(n, m) RMS), so that one rate serves both.
        made.append(
            torch.optim.Muon(
                [{"params": matrices, FACTOR: 1.0}],
                lr=settings.rate,
                momentum=settings.momentum,
                weight_decay=settings.decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    return made


def set_rate(optimisers: Sequence[torch.optim.Optimizer], rate: float) -> None:
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = rate * group.get(FACTOR, 1.0)


def _of_vocabulary(name: str) -> bool:
    """Embedding and head, which Muon does not serve."""
    return any(part in name for part in ("embed", "lm_head", "wte", "wpe"))


def _adamw(groups: list[dict[str, Any]], settings: OptimiserSettings) -> torch.optim.Optimizer:
    options: dict[str, Any] = {
        "lr": settings.rate, "betas": settings.betas, "eps": settings.epsilon, "weight_decay": settings.decay,
    }  # fmt: skip
    if settings.kind == "adamw8bit":
        try:
            from bitsandbytes.optim import AdamW8bit
        except ImportError:
            raise Invalid(
                "optimiser.kind adamw8bit needs bitsandbytes", hint="pip install bitsandbytes, or choose adamw"
            ) from None
        eight: torch.optim.Optimizer = AdamW8bit(groups, **options)
        return eight
    meshes = {
        parameter.device_mesh for group in groups for parameter in group["params"] if isinstance(parameter, DTensor)
    }
    several = len(meshes) > 1  # then not even on a GPU many parameters at once: they have no mesh in common
    return torch.optim.AdamW(groups, foreach=False if several else None, **options)
