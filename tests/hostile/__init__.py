"""Hostile acts, by what they attack."""
