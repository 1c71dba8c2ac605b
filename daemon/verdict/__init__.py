"""From what the kernel saw in a turn to its verdict."""
