"""Numbers within bounds, as types: what a setting may be is in its type, and nowhere else. Pure."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0.0)]
NotNegative = Annotated[float, Meta(ge=0.0)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
Decay = Annotated[float, Meta(ge=0.0, lt=1.0)]
