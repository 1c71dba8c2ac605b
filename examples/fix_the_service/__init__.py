"""FixTheService: an environment whose every episode holds turns of all four verdicts.

Owns: what `pagurus train` asks of an example folder: the environment, the words that deserve a token of
their own, and the scripted demonstrations. Does not own: how a policy learns from them.
"""

from __future__ import annotations

from .demonstrations import demonstrate
from .environment import FixTheService
from .scenario import WORDS

ENVIRONMENT = FixTheService

__all__ = ["ENVIRONMENT", "WORDS", "FixTheService", "demonstrate"]
