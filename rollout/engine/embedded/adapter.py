"""An adapter (LoRA) next to the weights of the embedded engine: from version to version the adapter alone changes.

Guarantee: the base model's weights are never written to; the layer computes base + scaling * up @ down in the engine's
own precision, as the trainer does.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from rollout.engine.embedded.pretrained import load
from rollout.weights import adapter
from sandbox.errors import Invalid


class LoraLinear(nn.Linear):
    """A linear layer, and next to it two small matrices: down [r, in], up [out, r]."""

    def __init__(self, layer: nn.Linear, rank: int, scaling: float):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.scaling = layer.in_features, layer.out_features, scaling
        self.weight, self.bias = layer.weight, layer.bias
        self.down = nn.Parameter(layer.weight.new_zeros(rank, layer.in_features))
        self.up = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + self.scaling * F.linear(F.linear(x, self.down), self.up)


def load_served(
    directory: Path, base: Path | None = None, *, device: str = "cpu", dtype: str = "float32", paged: bool = False
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model of a directory, or of an adapter in it next to its base; and by published name what versions change."""
    config = adapter.config_of(directory)
    if config is None:
        model = load(directory, device=device, dtype=dtype, paged=paged)
        return model, dict(model.state_dict())
    result = adapter.base_of(directory, base)
    assert result is not None, "the directory has an adapter"
    model = load(result, device=device, dtype=dtype, paged=paged)
    pairs = load_file(directory / adapter.WEIGHTS)
    weights: dict[str, Tensor] = {}
    for module in sorted({adapter.module_of(name) for name in pairs}):
        parent, _, last = module.rpartition(".")
        layer = model.get_submodule(module)
        if not isinstance(layer, nn.Linear):
            raise Invalid(f"an adapter of {module}, which is no matrix", hint="train adapters of matrices")
        adapted = LoraLinear(layer, config.r, config.scaling)
        setattr(model.get_submodule(parent), last, adapted)
        weights |= dict(zip(adapter.names_of(module), (adapted.down.data, adapted.up.data), strict=True))
    for name, tensor in weights.items():
        tensor.copy_(pairs[name])
    return model, weights
