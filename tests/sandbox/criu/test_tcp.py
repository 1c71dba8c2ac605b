"""Bytes on their way between two ends of a connection, as two dumps of one state have them."""

from __future__ import annotations

import base64
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sandbox.criu import tcp


def stream(start: int, unread: bytes, written: int, unacknowledged: bytes) -> dict[str, Any]:
    """The JSON of an image: bytes received up to number `start`, written up to `written`."""
    return {
        "inq_seq": start % (1 << 32), "inq_len": len(unread), "outq_seq": written % (1 << 32),
        "outq_len": len(unacknowledged),
        "extra": {"inq": base64.encodebytes(unread).decode(), "outq": base64.encodebytes(unacknowledged).decode()},
    }  # fmt: skip


@given(st.binary(max_size=20), st.integers(0, (1 << 32) - 1), st.data())
def test_bytes_on_their_way_are_the_same_wherever_they_are(sent: bytes, first: int, data: st.DataObject) -> None:
    read = data.draw(st.integers(0, len(sent)))
    said = set()
    for _ in range(3):  # the receiver has got more or less of it, and acknowledged more or less of that
        got = data.draw(st.integers(read, len(sent)))
        acknowledged = data.draw(st.integers(0, got))
        receiver = stream(first + got, sent[read:got], 5, b"")
        said.add(tcp.under_way(receiver, stream(5, b"", first + len(sent), sent[acknowledged:])))
    assert said == {sent[read:].hex()}


def test_the_end_of_a_stream_is_no_byte() -> None:
    """A peer has sent "bcd" from number 6 on, and its end; the socket has got one byte, all three, or the end too."""
    fin_wait, established, close_wait = 4, tcp.ESTABLISHED, tcp.CLOSE_WAIT
    sender = stream(5, b"", 10, b"bcd")
    received = [(stream(7, b"b", 5, b""), established), (stream(9, b"bcd", 5, b""), established)]
    received += [(stream(10, b"bcd", 5, b""), close_wait)]
    assert {tcp.under_way(one, sender, (state, fin_wait)) for one, state in received} == {b"bcd".hex()}


def test_ends_that_were_read_at_two_instants_are_known_by_their_numbers() -> None:
    states = tcp.ESTABLISHED, tcp.ESTABLISHED
    assert tcp.missing(stream(6, b"", 5, b""), stream(5, b"", 9, b"bcd"), states) == 3
    acknowledged = stream(5, b"", 9, b"")  # dumped after the socket, when the bytes had arrived
    assert tcp.missing(stream(6, b"", 5, b""), acknowledged, states) > acknowledged["outq_len"]


def test_without_the_other_end_both_queues_count() -> None:
    one, other = stream(5, b"a", 9, b"bc"), stream(5, b"a", 9, b"bd")
    assert tcp.under_way(one) != tcp.under_way(other)
