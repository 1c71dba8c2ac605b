"""All hostile acts, by room."""

from __future__ import annotations

from bench import _hostile_trees
from bench.hostile import calls, files, host, limits, network
from bench.hostile.act import ACTS

ROOMS = (calls, files, host, network, limits, _hostile_trees)

__all__ = ["ACTS", "ROOMS"]
