"""The rollout as a process of its own: what it is told, what a trainer may ask of it, the socket between them."""
