"""Which experts the routers of a mixture choose, recorded while the model computes."""

from __future__ import annotations

import re
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from rollout.experts import ROUTERS, need_routers

_LAYER = re.compile(r"\.layers\.(\d+)\.")


class MixtureConfig(Protocol):
    """What transformers says of a mixture of experts."""

    num_hidden_layers: int
    num_experts_per_tok: int


def config_of(model: nn.Module) -> MixtureConfig:
    """Of a kind that has routers."""
    return cast("MixtureConfig", model.config)


def routers(model: nn.Module, kind: str) -> list[tuple[int, nn.Module]]:
    """The number of each layer that has a router, and the router, of a kind that has some."""
    result = []
    for name, module in model.named_modules():
        match = _LAYER.search(f".{name}")
        if match is not None and name.endswith(ROUTERS[kind]):
            result.append((int(match.group(1)), module))
    return result


class ExpertRecord:
    """``record = ExpertRecord(model); model(...); record.taken()``"""

    def __init__(self, model: nn.Module):
        """Raises Invalid for a model whose routers are not known."""
        kind = str(getattr(model.config, "model_type", "dense model"))
        need_routers(kind, "objective.router_replay")
        config = config_of(model)
        self.layers, self.top_k = config.num_hidden_layers, config.num_experts_per_tok
        self._chosen: dict[int, Tensor] = {}  # [N, top_k] of each layer that has a router
        for layer, router in routers(model, kind):
            router.register_forward_hook(partial(self._note, layer))

    def _note(self, layer: int, router: nn.Module, given: object, result: tuple[Tensor, Tensor, Tensor]) -> None:
        self._chosen[layer] = result[2]

    def taken(self) -> Tensor:
        """[N, layers, top_k] int16, of the last forward pass; 0 in layers without a router."""
        count, device = (chosen := next(iter(self._chosen.values()))).shape[0], chosen.device
        result = torch.zeros(count, self.layers, self.top_k, dtype=torch.int16, device=device)
        for layer, index in self._chosen.items():
            result[:, layer] = index.to(torch.int16)
        return result
