"""What the request at hand is for, passed by the caller to the router, past the engines between them.

A context variable: each trajectory is played in a task of its own, and what lies between (a pace, a supervisor) need
not know of it.
"""

from __future__ import annotations

from contextvars import ContextVar

KIND: ContextVar[str] = ContextVar("environment that a request is for", default="")
