"""Batches: from samples to tensors that a model reads.

Owns: what a sample is and when it is refused, which samples share a micro-batch, packed tensors. Does not own: what
they teach (objectives), the model.

::

    trajectories ─▶ samples ─▶ refuse what is broken ─▶ plan: micro-batches by token budget ─▶ pack: no padding
"""
