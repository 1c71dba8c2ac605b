"""File trees of sandboxes: read, written, compared, snapshotted; never opened by path string."""
