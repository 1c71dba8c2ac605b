"""Content of checkpoints by its hash, on disk and on the wire."""
