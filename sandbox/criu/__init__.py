"""Processes of a sandbox into CRIU's image files and back, and whether they came back equal."""
