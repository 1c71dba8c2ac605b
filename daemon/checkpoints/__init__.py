"""Taking checkpoints: in which order, how, and how they become durable."""
