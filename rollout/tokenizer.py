"""The tokenizer of a model directory, as the rollout needs it."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as _Tokenizer

from rollout.pool.partial_text import UNFINISHED

MAX_CHARACTER = 4  # tokens of one character, which has four bytes at most


class DirectoryTokenizer:
    """Example: ``load("runs/x/policy").encode("$ ")``"""

    def __init__(self, tokenizer: _Tokenizer):
        self.tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def pieces(self, ids: list[int]) -> list[str]:
        """What each token adds to the text. A character of several tokens comes with the last of them; bytes that are
        no character come as replacement characters."""
        result, context, read = [], 0, 0
        for end in range(1, len(ids) + 1):
            before, now = self.decode(ids[context:read]), self.decode(ids[context:end])
            if now.endswith(UNFINISHED) and end - read < MAX_CHARACTER:
                result.append("")
                continue
            result.append(now[len(before) :])
            context, read = read, end
        return result


def load(directory: Path | str) -> DirectoryTokenizer:
    return DirectoryTokenizer(_Tokenizer.from_file(str(Path(directory) / "tokenizer.json")))
