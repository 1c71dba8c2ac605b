"""The verbs about environments, models and training runs."""
