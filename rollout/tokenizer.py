"""The tokenizer of a model directory, as the rollout needs it.

Owns: loading ``tokenizer.json``. Does not own: when text is tokenised (once, when it enters a trajectory: I8).
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as _Tokenizer


class DirectoryTokenizer:
    """Example: ``load("runs/x/policy").encode("$ ")``"""

    def __init__(self, tokenizer: _Tokenizer):
        self.tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def load(directory: Path | str) -> DirectoryTokenizer:
    return DirectoryTokenizer(_Tokenizer.from_file(str(Path(directory) / "tokenizer.json")))
