"""No secret of an upstream's request comes back in its answer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from daemon.gateway.masking import SecretMask

SECRET = "sk-0123456789"


@given(st.lists(st.sampled_from([b"a", b"sk-", b"sk-0123", b"456789", SECRET.encode(), b"\xff"]), max_size=20))
def test_chunks_are_masked_as_the_whole(chunks: list[bytes]) -> None:
    mask = SecretMask([SECRET])
    out = b"".join([*map(mask.feed, chunks), mask.end()])
    assert out == b"".join(chunks).replace(SECRET.encode(), b"*" * len(SECRET))


def test_only_the_beginning_of_a_secret_waits() -> None:
    mask = SecretMask([SECRET])
    assert mask.feed(b"data: x\n\n") == b"data: x\n\n"
    assert (mask.feed(b"data: sk-01"), mask.feed(b"x"), mask.end()) == (b"data: ", b"sk-01x", b"")


def test_short_values_are_no_secrets() -> None:
    mask = SecretMask(["1", "org-1"])
    assert mask.feed(b"org-1: 1") == b"org-1: 1"
    assert mask.text("org-1") == "org-1"
