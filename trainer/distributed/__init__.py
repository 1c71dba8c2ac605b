"""Ranks: the processes that train one model together.

One process alone needs nothing of this but `ALONE`.
"""
