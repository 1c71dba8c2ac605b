"""What was pulled, written into the weights that an engine computes with.

Guarantee: after `StagedChanges.apply` the parameters are what a full load of the mirror would give, bit for bit. All
that can be done before is done in `prepare`: the pause is the writing alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollout.weights.mirror import Table, Write
from sandbox.errors import EngineFailed

WORD = torch.int16
PUBLISHED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True)
class StagedChanges:
    """Changes on the device of the weights, ready to be written: pairs of (target, positions, values)."""

    changes: list[tuple[Tensor, Tensor | None, Tensor]]

    def apply(self) -> None:
        with torch.inference_mode():
            for target, positions, values in self.changes:
                if positions is None:
                    target.copy_(values)
                elif target.is_cpu:
                    target.numpy()[positions.numpy()] = values.numpy()  # quicker than torch on one core
                else:
                    target[positions] = values


def prepare(parameters: Mapping[str, Tensor], dtypes: Mapping[str, str], writes: Sequence[Write]) -> StagedChanges:
    """`dtypes`: of each published tensor, as safetensors spells it. Raises EngineFailed for a tensor that is not here.

    A published bfloat16 that is computed with in float32 is widened, which is exact.
    """
    changes = []
    for write in writes:
        convert = _conversion(parameters, dtypes, write.name)
        target, values = convert(torch.from_numpy(write.values.astype(np.int16, copy=False).view(np.int16).copy()))
        positions = None if write.positions is None else torch.from_numpy(write.positions).to(target.device)
        changes.append((target, positions, values.to(target.device)))
    return StagedChanges(changes)


def everything(
    parameters: Mapping[str, Tensor], dtypes: Mapping[str, str], tables: Mapping[str, Table]
) -> StagedChanges:
    """All of a mirror."""
    return prepare(parameters, dtypes, [Write(name, None, table.reshape(-1)) for name, table in tables.items()])


def _conversion(
    parameters: Mapping[str, Tensor], dtypes: Mapping[str, str], name: str
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """How words of a published tensor become elements of ours: the flat target, and the values for it."""
    parameter = parameters.get(name)
    if parameter is None or name not in dtypes:
        raise EngineFailed(f"{name} was published, but this engine has no such weight", hint="publish its own model")
    flat = parameter.detach().view(-1)
    published = PUBLISHED[dtypes[name]]
    if flat.dtype == published:
        words = flat.view(WORD)
        return lambda values: (words, values)
    if published == torch.bfloat16 and flat.dtype == torch.float32:
        return lambda values: (flat, values.view(torch.bfloat16).float())
    raise EngineFailed(
        f"{name} is published as {published} and computed with as {flat.dtype}", hint="publish it in that dtype"
    )
