"""Held-out episodes during and after training: when they are played, what is recorded, the best version."""
