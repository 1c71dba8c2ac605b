"""Compose files: read into a :class:`~sandbox.messages.Composition`, and what must be built, pulled and copied for it.

::

    compose.yaml ─ values ─▶ places and text ─ variables ─▶ extends, include ─ merge ─▶ services ─▶ Project
    .env, env_file ──────────────────┘

Nothing here talks to a host. Files are read, no more: those that are given, and those that they name.
"""
