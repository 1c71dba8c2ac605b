"""Streams that build upon one another become one whole stream, or an error."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from blake3 import blake3

from sandbox.content import transfer
from sandbox.content.joined import StreamChecker, joined
from sandbox.content.page_hashes import PAGE
from sandbox.content.transfer import Entry, FrameKind, ImageFile, TransferHeader
from sandbox.errors import Protocol
from sandbox.messages import Verdict


def state(number: int) -> tuple[dict[str, bytes], list[bytes]]:
    """Files and pages of the state with this number: each shares most with the one before."""
    files = {"same": b"s" * 10, "now": bytes([number]) * (transfer.PART_SIZE + 5), "empty": b""}
    return files, [bytes([page]) * PAGE for page in (1, 2, number + 10)] + [bytes(PAGE)]


def stream(number: int, since: int | None = None) -> bytes:
    """A stream of that state, as an export makes it."""
    files, pages = state(number)
    had_files, had_pages = ({}, []) if since is None else state(since)
    writer = transfer.TransferWriter()
    head = TransferHeader(
        id=f"c-{number:06}", sandbox="s-000001", verdict=Verdict.BOTH, image="i", image_digest="0" * 64, template={}
    )
    entries = [Entry(parent=0, name=b"", kind="d")]
    entries += [
        Entry(parent=0, name=name.encode(), kind="f", size=len(data), content=blake3(data).digest() if data else b"")
        for name, data in files.items()
    ]
    parts = [writer.start(head), writer.entries(entries), writer.images([ImageFile("core.img", 0, b"\0" * 32)])]
    hashes = b"".join(bytes(32) if page == bytes(PAGE) else blake3(page).digest() for page in pages)
    parts += list(writer.pages_of("pages-1.img", hashes))
    for data in [data for data in files.values() if data and data not in had_files.values()]:
        for at in range(0, len(data), transfer.PART_SIZE):
            parts.append(writer.part(blake3(data).digest(), at, data[at : at + transfer.PART_SIZE]))
    parts.append(writer.pages(b"".join(page for page in pages[:3] if page not in had_pages)))
    return b"".join([*parts, writer.end()])


def pieces(data: bytes) -> Iterator[bytes]:
    for at in range(0, len(data), 1000):
        yield data[at : at + 1000]


def content(data: bytes) -> tuple[list[tuple[FrameKind, object]], dict[bytes, bytes], set[bytes]]:
    """(what it announces, its contents, its pages)."""
    reader, reported, contents, pages = (
        transfer.Reader(),
        list[tuple[FrameKind, object]](),
        dict[bytes, bytes](),
        set[bytes](),
    )
    for kind, value in reader.feed(data):
        if kind is FrameKind.PART:
            contents[value.content] = contents.get(value.content, b"") + transfer.unpack(value.packed, value.size)
        elif kind is FrameKind.PAGES:
            pages |= {value[at : at + PAGE] for at in range(0, len(value), PAGE)}
        else:
            reported.append((kind, value))
    reader.finish()
    return reported, contents, pages


def test_the_newest_state_is_made_of_what_each_stream_has() -> None:
    streams = [stream(2, since=1), stream(1, since=0), stream(0)]
    assert len(streams[0]) < len(streams[2])
    assert content(b"".join(joined(map(pieces, streams)))) == content(stream(2))


@pytest.mark.parametrize("streams", [[stream(2, since=1)], [stream(2, since=1), stream(0)[:-1]]])
def test_what_is_not_whole_has_no_end(streams: list[bytes]) -> None:
    came = bytearray()
    with pytest.raises(Protocol):
        for data in joined(map(pieces, streams)):
            came += data
    with pytest.raises(Protocol):
        content(bytes(came))


def test_a_stream_that_passes_by_is_known_to_be_whole() -> None:
    complete = stream(0)
    for data, expected in ((complete, True), (complete[:-1], False), (complete + b"x", False), (b"", False)):
        checked = StreamChecker()
        for piece in pieces(data):
            checked.feed(piece)
        if expected:
            checked.finish()
        else:
            with pytest.raises(Protocol):
                checked.finish()
