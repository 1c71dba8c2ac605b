"""Decisions about the engines of a pool: which one gets a request, what one lends, when one turns to other work."""
