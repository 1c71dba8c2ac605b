"""Plug-ins for tools that other people already have: each module is one tool's, and is loaded by that tool.

No module here is imported by another room, and each imports its tool, so it loads only where that is installed.
"""
