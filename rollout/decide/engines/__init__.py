"""Decisions about the engines of a pool: which one gets a request, how much one serves rollouts, when one turns to
other work."""
