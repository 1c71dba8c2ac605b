"""Decisions of the rollout as pure functions of a view: no I/O, no clock, no torch."""
