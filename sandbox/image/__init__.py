"""Images that sandboxes start from: where they come from, and how they are stored."""
