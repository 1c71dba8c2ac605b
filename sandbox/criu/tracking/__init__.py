"""Which pages of a sandbox's memory were written since its last checkpoint, and captures that hold only those."""
