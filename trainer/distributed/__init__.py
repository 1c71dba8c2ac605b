"""Ranks: the processes that train one model together.

Owns: who takes part, how a model is sharded over them, who hangs or died, saves that all of them write.
Does not own: what is computed. One process alone needs nothing of this but `ALONE`.
"""
