"""Random programs in real sandboxes, and the truth that verdicts are compared with."""
