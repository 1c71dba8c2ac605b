"""Every state of a process: what is promised of it, and what is seen."""
