"""The HTTP API of a coordinator: its routes, what it shows of itself, its description."""
