"""Checkpoints as content: kept, verified, removed, exported, imported."""
