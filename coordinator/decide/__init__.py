"""Decisions of the coordinator: pure functions of a view."""
