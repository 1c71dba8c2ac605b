"""Cases of the corpus whose outcome is another one here, each with its reason (docs/images.md), and the recorded ones."""

from __future__ import annotations

DIFFERENCES: dict[str, str] = {}

#: Part of `make test`, against what the reference made of them (recorded.json).
RECORDED: tuple[str, ...] = ()
