"""The Python SDK of a sandbox host. Import from :mod:`sandbox`."""
