"""Rollouts, engines and jobs on a virtual clock, decided by the same functions that decide in a live run."""
