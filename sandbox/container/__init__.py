"""One sandbox while it lives: namespaces, limits, and the programs in it."""
