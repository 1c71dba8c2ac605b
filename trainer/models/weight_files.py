"""`WeightFiles`: tensors of a model directory, read slice by slice.

Guarantee: of a file only what is read comes into memory, and little more than `MAPPED` bytes of it stay mapped.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from sandbox.errors import Invalid, NotFound

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAPPED = 4 << 20  # bytes that are read before a file is opened again, which forgets them
Bounds = Sequence[tuple[int, int]]  # of each dimension: from, to


class WeightFiles:
    """``files.read("lm_head.weight", [(0, 10), (0, 64)])``"""

    def __init__(self, directory: Path):
        """One file, or several that an index names. Raises Invalid, NotFound."""
        self.directory = directory
        self._files: dict[str, Path] = {}  # by name of the tensor
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in self._paths():
            try:
                with safe_open(path, "pt") as file:
                    for name in file.keys():  # noqa: SIM118
                        self._files[name] = path
                        self._shapes[name] = tuple(file.get_slice(name).get_shape())
            except (OSError, SafetensorError) as error:
                raise Invalid(f"{path} cannot be read: {error}", hint="download the model again") from None
        self._open: tuple[Path, safe_open] | None = None
        self._read = 0  # bytes of the open file

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, part: Bounds | None = None) -> Tensor:
        """In the file's kind of number. None: complete."""
        file = self._file(self._files[name])
        if part:
            tensor = file.get_slice(name)  # type: ignore[no-untyped-call]
            result: Tensor = tensor[tuple(slice(first, last) for first, last in part)]
        else:
            result = file.get_tensor(name)  # type: ignore[no-untyped-call]
        self._read += result.nbytes
        return result

    def close(self) -> None:
        self._open, self._read = None, 0

    def _file(self, path: Path) -> safe_open:
        if self._open is None or self._open[0] != path or self._read > MAPPED:
            self._open, self._read = (path, safe_open(path, "pt")), 0
        return self._open[1]

    def _paths(self) -> list[Path]:
        if (self.directory / SINGLE).exists():
            return [self.directory / SINGLE]
        try:
            named = json.loads((self.directory / INDEX).read_bytes())["weight_map"].values()
        except FileNotFoundError:
            raise NotFound(
                f"{self.directory} has no {SINGLE} and no {INDEX}", hint="save the model with safetensors"
            ) from None
        except (ValueError, LookupError, AttributeError) as error:
            raise Invalid(f"{self.directory / INDEX} is damaged: {error}", hint="download the model again") from None
        return [self.directory / name for name in sorted(set(named))]
