"""FinishTheMigration: the harder environment. Several faults at once, of which the silent ones spoil data for good.

Owns: what `pagurus train` finds in a folder: the environment, and in ``start/`` the policy that its runs begin with.
Beside them lie the words that have a token of their own, the scripted demonstrations that this policy was fitted to
(`python -m examples.fit`), and the twin, on which the environment runs without sandboxes.
"""

from __future__ import annotations

from .demonstrations import demonstrate
from .environment import FinishTheMigration
from .scenario import WORDS
from .twin import Twin

ENVIRONMENT = FinishTheMigration

__all__ = ["ENVIRONMENT", "WORDS", "FinishTheMigration", "Twin", "demonstrate"]
