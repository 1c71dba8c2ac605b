"""Sparse values in checkpoint coordinates through a model's own loader: a tensor full of NaN says what stays."""

from typing import Any, NamedTuple

import torch


class CheckpointWeightPatch(NamedTuple):
    name: str
    shape: tuple
    dtype: Any
    values: Any
    indices: Any = None


@torch.no_grad()
def load_checkpoint_weight_patches(model, patches, *, validate_unique_indices=True):
    copy = torch.Tensor.copy_

    def masked(target, source, non_blocking=False):
        return torch.where(torch.isnan(source), target, source.to(target.dtype), out=target)

    for patch in patches:
        flat = torch.full((int(torch.tensor(patch.shape).prod()),), float("nan"), dtype=patch.dtype)
        flat[patch.indices] = patch.values
        torch.Tensor.copy_ = masked
        try:
            model.load_weights([(patch.name, flat.view(patch.shape))])
        finally:
            torch.Tensor.copy_ = copy
