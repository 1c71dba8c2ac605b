"""Observations are bounded, whatever their text and tokenizer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollout.decide.observed import middle_cut

TEXTS = st.text(max_size=200).flatmap(lambda text: st.integers(1, 40).map(lambda times: text * times))


def test_the_beginning_and_the_end_stay() -> None:
    assert middle_cut("a" * 100, 40, len) == "aaaaaaa\n[86 characters left out]\naaaaaaa"
    assert middle_cut("short", 40, len) == "short"


@given(TEXTS, st.integers(32, 300))
def test_no_text_is_longer_than_its_bound(text: str, limit: int) -> None:
    for count in (len, lambda said: len(said.encode()), lambda said: -(-len(said) // 4)):
        cut = middle_cut(text, limit, count)
        assert count(cut) <= limit
        assert cut == text or "characters left out" in cut


def test_text_beyond_all_tokens_is_not_tokenised() -> None:
    longest = 0

    def count(text: str) -> int:
        nonlocal longest
        longest = max(longest, len(text))
        return -(-len(text) // 4)

    assert count(middle_cut("ab" * 10_000_000, 100, count)) <= 100
    assert longest < 20_000
