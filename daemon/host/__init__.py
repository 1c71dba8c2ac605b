"""Authority over all sandboxes of one host: create, restore, expire, remove."""
