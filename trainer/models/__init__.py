"""Models: directories in the Hugging Face layout, and what the trainer wants of them.

Owns: fresh policies, loading, attention that keeps packed trajectories apart, log-probabilities of sampled tokens,
adapters, export. Does not own: the definition of our small Qwen3 (rollout.engine.model: the engine's and ours are one).
"""
