"""Shares of a packed micro-batch: each token is somewhere once, and sees what it saw."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.batches.context import share
from trainer.batches.pack import AttentionRuns, PackedBatch, pack
from trainer.batches.sample import Sample


def batch(families: list[tuple[int, list[int]]]) -> PackedBatch:
    """Of each family the tokens that its members begin with alike, and how many each has after them. No token twice."""
    samples, sizes, at = [], [], 0
    for prefix, rests in families:
        beginning = list(range(at, at + prefix))
        at += prefix
        for rest in rests:
            tokens = beginning + list(range(at, at + rest))
            at += rest
            samples.append(Sample(tokens=tokens, mask=[0] + [1] * (len(tokens) - 1), logprobs=[-1.0] * len(tokens)))
        sizes.append((len(rests), prefix if len(rests) > 1 else 0))
    return pack(samples, sizes)


def seen(runs: AttentionRuns, queries: list[int], keys: list[int]) -> dict[int, list[int]]:
    """By token, what it sees, in order."""
    parts = [keys[end - size : end] for size, end in zip(runs.parts, accumulate(runs.parts), strict=True)]
    result, at = {}, 0
    for count, numbers in zip(runs.queries, runs.visible, strict=True):
        sees = [key for number in numbers for key in parts[number]]
        for row in range(count):
            result[queries[at + row]] = sees[: len(sees) - count + row + 1]
        at += count
    return result


FAMILIES = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=3)), min_size=1, max_size=4
)


@given(FAMILIES, st.sampled_from([2, 3, 4]))
def test_a_share_sees_what_the_complete_batch_does(families: list[tuple[int, list[int]]], parts: int) -> None:
    packed = batch(families)
    shares = [share(packed, part, parts) for part in range(parts)]
    assert len({len(one.tokens) for one, _ in shares}) == 1
    # What fills it up has token 0 in each place: count it apart, by its segment.
    names = [
        torch.where(one.segment < len(packed.lengths), one.tokens, -1 - torch.arange(len(one.tokens))).tolist()
        for one, _ in shares
    ]
    keys = [token for one in names for token in one]
    expected = seen(packed.runs, packed.tokens.tolist(), packed.tokens.tolist())
    got = {}
    for (one, _), own in zip(shares, names, strict=True):
        got |= {token: sees for token, sees in seen(one.runs, own, keys).items() if token >= 0}
    assert got == expected
    positions = [one.positions.tolist() for one, _ in shares]
    placed = dict(zip(keys, [position for one in positions for position in one], strict=True))
    assert all(placed[t] == p for t, p in zip(packed.tokens.tolist(), packed.positions.tolist(), strict=True))


@pytest.mark.parametrize("parts", [2, 4])
def test_each_sampled_token_is_scored_by_one_rank(parts: int) -> None:
    packed = batch([(5, [3, 4]), (2, [20])])
    shares = [share(packed, part, parts) for part in range(parts)]
    own = torch.cat([mine for _, mine in shares])
    assert sorted(own.tolist()) == list(range(len(packed.targets)))
    for one, mine in shares:
        assert torch.equal(one.targets, packed.targets[mine]) and torch.equal(one.sequence, packed.sequence[mine])
        assert torch.equal(one.tokens[one.predicting], packed.tokens[packed.predicting[mine]])
