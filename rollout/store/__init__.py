"""What the rollout has on disk: prompts, samples, batches, the journal of turns, the log of decisions."""
