"""The experts that an engine chose for each token of a sequence: what a trainer replays. Pure.

Guarantee: of a token that several answers report, the first report stays: it is of the pass that sampled what follows.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

from sandbox.errors import Invalid

#: By `model_type`, how the names of routers end; transformers' return logits, weights and chosen experts.
ROUTERS = {"deepseek_v3": ".mlp.gate", "qwen3_moe": ".mlp.gate"}
Choices = NDArray[np.unsignedinteger]  # [tokens, layers, experts of a token]


def need_routers(kind: str, purpose: str) -> None:
    """Raises Invalid for a model, by its `model_type`, whose routers are not known. `purpose`: the key that needs
    them."""
    if kind not in ROUTERS:
        raise Invalid(
            f"{purpose} needs a mixture of experts whose routers are known, not a {kind}",
            hint=f"leave out {purpose}, or take one of: {', '.join(sorted(ROUTERS))}",
        )


class RoutedExperts(msgspec.Struct, frozen=True, kw_only=True):
    """Of the tokens from `start` on. Example: ``RoutedExperts(start=0, layers=2, top_k=1, data=bytes([3, 0]))``."""

    start: int
    layers: int  # of the model, those without experts included where the engine reports them
    top_k: int  # experts that a token has in a layer
    wide: bool = False  # two bytes each, little-endian; else one
    data: bytes

    @classmethod
    def of(cls, start: int, choices: NDArray[np.integer]) -> RoutedExperts:
        """choices [tokens, layers, top_k], each from 0 on"""
        wide = bool(choices.size) and int(choices.max()) > 255
        stored = np.ascontiguousarray(choices, "<u2" if wide else "u1")
        return cls(start=start, layers=choices.shape[1], top_k=choices.shape[2], wide=wide, data=stored.tobytes())

    @classmethod
    def read(cls, text: str, start: int) -> RoutedExperts:
        """As :meth:`written`, or vLLM, writes them. Raises ValueError."""
        content = io.BytesIO(base64.b64decode(text, validate=True))
        choices = np.lib.format.read_array(content, allow_pickle=False)
        if choices.ndim != 3 or choices.dtype.kind not in "iu" or (choices.size and not choices.min() >= 0):
            raise ValueError(f"{choices.dtype} of shape {choices.shape}")
        return cls.of(start, choices)

    def written(self) -> str:
        """base64 of a .npy"""
        content = io.BytesIO()
        np.lib.format.write_array(content, self.choices, allow_pickle=False)
        return base64.b64encode(content.getvalue()).decode()

    @property
    def choices(self) -> Choices:
        """[tokens, layers, top_k]. Raises ValueError where the bytes have another number."""
        return np.frombuffer(self.data, "<u2" if self.wide else "u1").reshape(-1, self.layers, self.top_k)

    @property
    def end(self) -> int:
        return self.start + len(self.data) // self._token

    @property
    def _token(self) -> int:
        """Bytes of one."""
        return max(1, self.layers * self.top_k * (1 + self.wide))

    def within(self, start: int, end: int) -> RoutedExperts:
        """What it has of the tokens ``[start, end)``."""
        first = min(max(start, self.start), self.end)
        last = max(first, min(end, self.end))
        data = self.data[(first - self.start) * self._token : (last - self.start) * self._token]
        return msgspec.structs.replace(self, start=first, data=data)

    def moved(self, by: int) -> RoutedExperts:
        return msgspec.structs.replace(self, start=self.start + by)


def within(parts: Iterable[RoutedExperts], start: int, end: int) -> list[RoutedExperts]:
    """What they have of the tokens ``[start, end)``."""
    return [part for item in parts if (part := item.within(start, end)).data]


def extend(parts: list[RoutedExperts], answer: RoutedExperts | None, begin: int, end: int) -> None:
    """Adds to `parts` what an answer reports of a sequence that lies at ``[begin, end)`` and is not there yet."""
    if answer is None:
        return
    first = max(begin, parts[-1].end if parts else 0)
    parts += within([answer.moved(begin)], first, end)
