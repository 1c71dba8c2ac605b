"""Batches: from samples to tensors that a model reads.

::

    trajectories ─▶ samples ─▶ refuse what is broken ─▶ plan: micro-batches by token budget ─▶ pack: no padding
"""
