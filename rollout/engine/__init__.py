"""Inference engines behind one protocol: token ids in; token ids, logprobs and weight-version spans out.

Guarantee: what an engine serves under a version is bit-identical to the published directory, or it serves nothing (I9).
"""
