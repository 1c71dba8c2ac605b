"""A directory for PYTHONPATH that makes ranks fail on certain tokens. Not a test module."""

from __future__ import annotations

from pathlib import Path

RAISES, HANGS = 38, 37  # tokens

SITE = f"""
import sys
if "trainer.distributed.worker" in sys.orig_argv:
    import time
    from trainer.models.scorer import Scorer
    plain = Scorer.forward
    def forward(self, packed):
        if (packed.tokens == {HANGS}).any():
            time.sleep(3)
        if (packed.tokens == {RAISES}).any():
            raise IndexError("index out of range in self")
        return plain(self, packed)
    Scorer.forward = forward
"""


def directory(tmp_path: Path) -> Path:
    """Ranks that are started with it raise on a token, and take 3 s over another one."""
    made = tmp_path / "site"
    made.mkdir()
    (made / "sitecustomize.py").write_text(SITE)
    return made
