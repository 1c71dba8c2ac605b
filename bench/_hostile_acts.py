"""All hostile acts, by room."""

from __future__ import annotations

from bench import _hostile_calls, _hostile_files, _hostile_host, _hostile_limits, _hostile_network, _hostile_trees
from bench._hostile import ACTS

ROOMS = (_hostile_calls, _hostile_files, _hostile_host, _hostile_network, _hostile_limits, _hostile_trees)

__all__ = ["ACTS", "ROOMS"]
