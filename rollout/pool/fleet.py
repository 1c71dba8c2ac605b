"""Engines whose machines a trainer shares, as a rollout's controller sees them."""

from __future__ import annotations

from typing import Protocol

from rollout.decide.view import FleetView


class Fleet(Protocol):
    """A `Pool`."""

    def fleet(self) -> FleetView: ...

    def rest(self, stay: int) -> None:
        """All but `stay` until the next version; their requests continue at these."""
