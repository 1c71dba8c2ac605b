"""The verbs about sandboxes and their states."""
