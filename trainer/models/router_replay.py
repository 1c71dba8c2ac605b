"""Router replay: tokens go to the experts that the engine chose for them, as weights of today weigh these.

Engine and trainer round differently, and a router that is nearly undecided then sends a token elsewhere: its
log-probability under the same weights is another one (arXiv 2510.11370). Replay fixes the choice alone; the router's
scores, and their gradient, are those of the trainer.

Guarantee: of a token whose experts the engine did not report, the router chooses as without replay.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from rollout.engine.embedded.routers import config_of, routers
from rollout.experts import need_routers
from sandbox.errors import Invalid
from trainer.models.balance import SCORING, Scoring


class Router(Protocol):
    """What transformers calls it; some also scale the weights, by `routed_scaling_factor`."""

    norm_topk_prob: bool


class RouterReplay:
    """``replay = RouterReplay(model, "qwen3_moe"); replay.experts = packed.experts; model(...)``"""

    def __init__(self, model: nn.Module, kind: str):
        """Raises Invalid for a model whose routers are not known."""
        need_routers(kind, "objective.router_replay")
        self._scoring = SCORING[kind]
        config = config_of(model)
        self._total, self._top_k = config.num_hidden_layers, config.num_experts_per_tok
        self.layers: list[int] = []  # that have a router
        #: [N, layers, top_k], -1: not reported. Stays until the next forward pass, as activations are computed again.
        self.experts: Tensor | None = None
        for layer, router in routers(model, kind):
            router.register_forward_hook(partial(self._replay, len(self.layers)))
            self.layers.append(layer)

    def use(self, experts: Tensor | None) -> None:
        """For the forward passes to come: [N, layers, top_k] of all layers, or of those alone that have a router.

        Raises Invalid for another shape.
        """
        counts = (self._total, len(self.layers))
        if experts is not None and (experts.shape[1] not in counts or experts.shape[2] != self._top_k):
            raise Invalid(
                f"the engine reports {experts.shape[2]} experts in {experts.shape[1]} layers, "
                f"the model has {self._top_k} in {len(self.layers)} of {self._total}",
                hint="serve the model that is trained",
            )
        self.experts = experts

    def _replay(
        self, number: int, router: Router, given: object, result: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        if self.experts is None:
            return None
        logits, weights, own = result
        layer = number if self.experts.shape[1] == len(self.layers) else self.layers[number]
        reported = self.experts[:, layer].to(own.dtype)
        index = torch.where(reported < 0, own, reported)
        return logits, weighed(logits, index, self._scoring, router).to(weights.dtype), index


def weighed(logits: Tensor, index: Tensor, scoring: Scoring, router: Router) -> Tensor:
    """logits [N, E], index [N, K] -> [N, K]: what a router of transformers gives these experts."""
    scores = logits.float().sigmoid() if scoring == "sigmoid" else logits.float().softmax(-1)
    chosen = scores.gather(1, index)
    if router.norm_topk_prob:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + (1e-20 if scoring == "sigmoid" else 0.0))
    result: Tensor = chosen * float(getattr(router, "routed_scaling_factor", 1.0))
    return result
