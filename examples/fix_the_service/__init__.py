"""FixTheService: an environment whose every episode holds turns of all four verdicts.

Owns: what `pagurus train` finds in a folder: the environment, and in ``start/`` the policy that its runs begin with.
Beside them lie the words that have a token of their own, the scripted demonstrations, and how the policy was fitted to
them (``fit.py``), which a run does not need.
"""

from __future__ import annotations

from .demonstrations import demonstrate
from .environment import FixTheService
from .scenario import WORDS

ENVIRONMENT = FixTheService

__all__ = ["ENVIRONMENT", "WORDS", "FixTheService", "demonstrate"]
