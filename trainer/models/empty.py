"""`EmptyModel`: a model without memory, and which tensors of its directory fill which of its own.

Guarantee: what a filled model computes is what `trainer.models.load.load` gives: the names and the combinations of
tensors are those of transformers, buffers that no file has are computed as transformers does, what is tied stays tied.
A tensor that no file fills is refused, by name.

::

    EmptyModel(directory) ─▶ shard ─▶ fill: memory for the shards ─▶ of each tensor the slices that make up the shard
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from rollout.engine.embedded.model import Qwen3
from sandbox.errors import Invalid
from trainer.models.load import Lora, configuration, drawn_adapters, empty, need_exchangeable, plain_name
from trainer.models.weight_files import Bounds, WeightFiles

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter

Shard = tuple[Tensor, Bounds]  # the memory of this rank's part of a tensor, and where in the complete one that is
MAX_ROWS = 1 << 12  # of a matrix that are compared at once


@dataclass(frozen=True)
class TensorCombination:
    """Tensors of the files that make up one of the model, or several."""

    converter: WeightConverter
    sources: dict[str, list[str]] = field(default_factory=dict)  # names in the files, by the pattern that they match

    def convert(
        self, first: str, model: nn.Module, read: Callable[[str], Tensor], part: slice = slice(None)
    ) -> dict[str, Tensor]:
        """By name in the model, of which `first` is one. `part`: of each list of sources."""
        made = deepcopy(self.converter)
        for pattern, names in self.sources.items():
            for name in names[part]:
                made.add_tensor(first, name, pattern, partial(read, name))  # type: ignore[arg-type]
        result = made.convert(first, model=model, config=model.config)
        return {name: values[0] if isinstance(values, list) else values for name, values in result.items()}

    def stacks(self, count: int) -> bool:
        """Whether the sources are `count` parts of the result's first dimension each."""
        from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

        first, *rest = self.converter.operations
        return (
            isinstance(first, MergeModulelist)
            and first.dim == 0
            and all(len(names) == count for names in self.sources.values())
            and all(
                (isinstance(item, Concatenate) and item.dim > 0)
                or (isinstance(item, Transpose) and min(item.dim0, item.dim1) > 0)
                for item in rest
            )
        )


class EmptyModel:
    """``made = EmptyModel(directory)``; shard ``made.model``; ``made.fill(root, device, shard_of)``."""

    def __init__(self, directory: Path, *, lora: Lora | None = None, packs: bool = True):
        """Raises Invalid, also for quantised tensors, whose parts cannot be read alone; NotFound."""
        if configuration(directory).get("quantization_config"):
            raise Invalid(f"{directory} is quantised", hint="save it without quantisation, or train on one rank")
        self.model = empty(directory, lora=lora, packs=packs, meta=True)
        if packs and not isinstance(self.model, Qwen3):
            need_exchangeable(self.model)
        _compute_buffers(self.model)
        self._files = WeightFiles(directory)
        self._direct: dict[str, str] = {}  # name in the model -> in the files
        self._combined: dict[str, TensorCombination] = {}  # by the first name in the model that it gives
        covered = self._assign_own() if isinstance(self.model, Qwen3) else self._assign()
        self._need_all(covered)

    def fill(self, root: nn.Module, device: torch.device, shard_of: Callable[[Tensor], Shard]) -> None:
        """`root`: the module that was sharded with the model in it."""
        _make_memory(root, device)
        tensors = self._tensors()
        drawn = drawn_adapters(self.model)
        with torch.no_grad():
            for name, source in self._direct.items():
                target, part = shard_of(tensors[name])
                if target.numel():
                    target.copy_(self._files.read(source, part))
            for name, combination in self._combined.items():
                self._combine(name, combination, tensors, shard_of)
            for name, values in drawn:
                target, part = shard_of(tensors[name])
                target.copy_(values[_slices(part)])
        self._files.close()

    # ------------------------------------------------------------------ which tensor fills which

    def _assign_own(self) -> set[str]:
        """Of our own Qwen3, whose names are those of the file."""
        names = {name for name in self._tensors() if ".lora_" not in name}
        sources = {name: name for name in self._files.names}
        if "lm_head.weight" not in names:  # tied
            sources.pop("lm_head.weight", None)
        elif "lm_head.weight" not in sources:
            sources["lm_head.weight"] = "model.embed_tokens.weight"
        if different := sorted(sources.keys() ^ names):
            raise Invalid(
                f"{self._files.directory} has other weights than its config.json says: {different[0]}", hint="mend it"
            )
        self._direct, there = sources, self._tensors()
        for name, source in sources.items():
            self._need_shape(name, self._files.shape(source), there)
        return names

    def _assign(self) -> set[str]:
        """As transformers names and combines them."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        model = cast("PreTrainedModel", self.model)
        there = self._tensors()
        mapping = get_model_conversion_mapping(model)
        renamings = [item for item in mapping if isinstance(item, WeightRenaming)]
        converters = [item for item in mapping if isinstance(item, WeightConverter)]
        by_pattern = {pattern: item for item in converters for pattern in item.source_patterns}
        prefix = model.base_model_prefix
        covered = set()
        for source in sorted(self._files.names, key=dot_natural_key):
            name, pattern = rename_source_key(source, renamings, converters, prefix, there)
            if name not in there and source in there:
                name, pattern = source, None
            if name not in there:
                continue  # transformers passes it over too
            covered.add(name)
            if pattern is None:
                self._direct[name] = source
                self._need_shape(name, self._files.shape(source), there)
                continue
            if name not in self._combined:
                self._combined[name] = TensorCombination(by_pattern[pattern])
            self._combined[name].sources.setdefault(pattern, []).append(source)
        return covered | self._given(there)

    def _given(self, there: Mapping[str, Tensor]) -> set[str]:
        """Names that combinations give, found with tensors without memory. Raises Invalid for other shapes."""
        result = set()
        for first, combination in self._combined.items():
            made = combination.convert(
                first, self.model, lambda name: torch.empty(self._files.shape(name), device="meta")
            )
            for name, values in made.items():
                self._need_shape(name, tuple(values.shape), there)
                result.add(name)
        return result

    def _need_all(self, covered: set[str]) -> None:
        """Raises Invalid where a weight has no source, or one that is tied has two that differ."""
        named: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if ".lora_" not in name:
                named.setdefault(id(parameter), []).append(plain_name(name))
        for names in named.values():
            sources = [self._direct[name] for name in names if name in self._direct]
            if not covered & set(names):
                raise Invalid(f"{self._files.directory} has no {names[0]}", hint="save the model with all weights")
            if len(set(sources)) > 1 and not all(self._same(sources[0], other) for other in sources[1:]):
                raise Invalid(
                    f"{names[0]} and {names[1]} differ, and config.json says that they are tied",
                    hint="set tie_word_embeddings to false in config.json",
                )

    def _need_shape(self, name: str, shape: tuple[int, ...], there: Mapping[str, Tensor]) -> None:
        if tuple(shape) != tuple(there[name].shape):
            raise Invalid(
                f"{name} is of shape {list(shape)}, by config.json {list(there[name].shape)}", hint="mend config.json"
            )

    def _same(self, left: str, right: str) -> bool:
        """Whether two tensors of the files are equal, a few rows of them at a time."""
        shape = self._files.shape(left)
        if shape != self._files.shape(right):
            return False
        rest = [(0, size) for size in shape[1:]]
        parts = [[(at, min(at + MAX_ROWS, shape[0])), *rest] for at in range(0, shape[0], MAX_ROWS)]
        return all(torch.equal(self._files.read(left, part), self._files.read(right, part)) for part in parts)

    # ------------------------------------------------------------------ reading

    def _combine(
        self,
        first: str,
        combination: TensorCombination,
        tensors: Mapping[str, Tensor],
        shard_of: Callable[[Tensor], Shard],
    ) -> None:
        """Of what is stacked, such as experts, only this rank's part is read."""
        target, part = shard_of(tensors[first])
        stacked = combination.stacks(tensors[first].shape[0])
        if stacked and not target.numel():
            return
        chosen = slice(*part[0]) if stacked else slice(None)
        for name, values in combination.convert(first, self.model, self._files.read, chosen).items():
            target, part = shard_of(tensors[name])
            own = _slices(part)
            target.copy_(values[(slice(None), *own[1:]) if stacked else own])

    def _tensors(self) -> dict[str, Tensor]:
        """Parameters, and buffers of saves, by the names that they have without adapters."""
        state = self.model.state_dict(keep_vars=True)
        return {plain_name(name): tensor for name, tensor in state.items()}


def _slices(part: Bounds) -> tuple[slice, ...]:
    return tuple(slice(first, last) for first, last in part)


def _compute_buffers(model: nn.Module) -> None:
    """Gives an empty model its buffers, which it computes from its configuration: no file has most of them."""
    if isinstance(model, Qwen3):
        model.reset_positions()
        return
    for module in model.modules():
        module._is_hf_initialized = False  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    model.initialize_weights()  # type: ignore[operator]


def _make_memory(root: nn.Module, device: torch.device) -> None:
    """For what has none yet. What is tied stays so."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    root._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    for (first, name), *others in places.values():
        for module, other in others:
            module._parameters[other] = first._parameters[name]
