"""Inference engines behind one protocol: token ids in; token ids, logprobs and weight-version spans out.

Owns: the wire of an engine, the client, the embedded torch engine, the launcher of a vLLM server, and the
supervisor that restarts either. Does not own: text (I8), trajectories, where the weights come from.
Guarantee: what an engine serves under a version is bit-identical to the published directory, or it serves nothing (I9).
"""
