"""FixTheService: an environment whose every episode holds turns of all four verdicts.

Owns: what `pagurus train` finds in a folder: the environment, and in ``start/`` the policy that its runs begin with.
Beside them lie the words that have a token of their own, the scripted demonstrations that this policy was fitted to
(`python -m examples.fit`), and the twin, on which the environment runs without sandboxes.
"""

from __future__ import annotations

from .demonstrations import demonstrate
from .environment import FixTheService
from .scenario import WORDS
from .twin import Twin

ENVIRONMENT = FixTheService

__all__ = ["ENVIRONMENT", "WORDS", "FixTheService", "Twin", "demonstrate"]
