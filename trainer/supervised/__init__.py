"""Learning from text that was written before: supervised fine-tuning, and preferences between two answers."""
