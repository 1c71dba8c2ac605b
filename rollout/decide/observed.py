"""How much of an observation a model reads. Pure.

Guarantee: what is left counts at most `limit` tokens, keeps beginning and end, and says how much is missing.
"""

from __future__ import annotations

from collections.abc import Callable

LONGEST_TOKEN = 64  # characters: more text than this per token is never tokenised
ROUNDS = 24


def middle_cut(text: str, limit: int, count: Callable[[str], int]) -> str:
    """`text`, or its beginning and its end with a note between them. `count`: tokens of a text.

    Example: ``middle_cut("a" * 100, 40, len) == "aaaaaaa\\n[86 characters left out]\\naaaaaaa"``
    """
    if len(text) <= limit and len(text.encode()) <= limit:
        return text  # no tokenizer makes more tokens than bytes
    if len(text) <= limit * LONGEST_TOKEN and count(text) <= limit:
        return text
    low, high = 0, min(len(text) // 2, limit * LONGEST_TOKEN)  # characters that stay at each end
    for _ in range(ROUNDS):
        if low >= high:
            break
        half = (low + high + 1) // 2
        if count(_cut(text, half)) <= limit:
            low = half
        else:
            high = half - 1
    return _cut(text, low)


def _cut(text: str, half: int) -> str:
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n[{left_out} characters left out]\n{text[len(text) - half :]}"
