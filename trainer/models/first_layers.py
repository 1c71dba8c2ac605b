"""A large model by its first layers: as many as have one of each kind.

Guarantee: what is made has the model's own weights of these layers, its embeddings and its head. Two layers are of one
kind if the names and shapes of their tensors and everything that the configuration says of single layers are equal.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from sandbox.errors import Invalid
from trainer.models.load import configuration
from trainer.models.weight_files import WeightFiles

LARGE = 2 << 30  # weights; 8 GiB in fp32
MIN_LAYERS = 2
_TENSOR = re.compile(r"^(.*?)\.layers\.(\d+)\.(.*)$")
_NUMBER = re.compile(r"\.\d+\.")  # of an expert


def shorten(directory: Path, place: Path) -> int | None:
    """Makes a model directory in the empty `place`; how many layers it has. None, and nothing made, where the model is
    not large or has no two layers of one kind. Raises Invalid, NotFound."""
    files, content = WeightFiles(directory), configuration(directory)
    text = content.get("text_config") or content
    total = text.get("num_hidden_layers")
    if not isinstance(total, int) or sum(math.prod(files.shape(name)) for name in files.names) <= LARGE:
        return None
    derived = _of_single_layers(directory, total)
    kinds = [kind for layer, kind in sorted(_kinds(files, total, derived).items())]
    count = max(MIN_LAYERS, max((kinds.index(kind) + 1 for kind in kinds), default=total))
    if len(kinds) != total or count >= total:
        return None
    lists = {name for name, value in text.items() if isinstance(value, list) and len(value) == total}
    text |= {name: derived.get(name, text.get(name))[:count] for name in lists | derived.keys()}  # type: ignore[index]
    text["num_hidden_layers"] = count
    (place / "config.json").write_text(json.dumps(content))
    for path in directory.iterdir():
        if path.name != "config.json" and path.suffix in (".json", ".safetensors", ".py"):
            (place / path.name).symlink_to(path.resolve())
    return count


def _of_single_layers(directory: Path, total: int) -> dict[str, list[Any]]:
    """What transformers makes of the configuration, by name: one value for each layer."""
    from transformers import AutoConfig  # seconds to import

    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        raise Invalid(f"transformers cannot load {directory}: {error}", hint="try it there first") from None
    return {
        name: list(value)
        for name, value in config.to_dict().items()
        if isinstance(value, (list, tuple)) and len(value) == total
    }


def _kinds(files: WeightFiles, total: int, derived: dict[str, list[Any]]) -> dict[int, Hashable]:
    """Of each layer, what makes its kind."""
    tensors: dict[int, set[tuple[str, str, tuple[int, ...]]]] = {}
    for name in files.names:
        if (match := _TENSOR.match(name)) is not None and int(match.group(2)) < total:
            rest = _NUMBER.sub(".N.", match.group(3))
            tensors.setdefault(int(match.group(2)), set()).add((match.group(1), rest, files.shape(name)))
    return {
        layer: (frozenset(existing), *(str(values[layer]) for _, values in sorted(derived.items())))
        for layer, existing in tensors.items()
    }
