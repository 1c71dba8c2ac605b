"""The rollout as a process of its own: its input, what a trainer may request of it, the socket between them."""
