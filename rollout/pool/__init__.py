"""Engine servers as one: the pool and its members."""
