"""One whole stream of a checkpoint, made of streams that each lack what the one before had.

Pure: bytes in, bytes out. Guarantee: what comes out is whole, or Protocol is raised before its end is returned; each
stream is read to its end, so damage anywhere in it is found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from blake3 import blake3

from sandbox.content import transfer
from sandbox.content.page_hashes import HASH, PAGE
from sandbox.content.transfer import FrameKind
from sandbox.errors import Protocol

NO_HASH = bytes(HASH)
END = bytes([FrameKind.END]) + HASH.to_bytes(4, "little")  # of a stream; its hash follows


def joined(streams: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """The newest stream first, then the one that it builds upon, and so on."""
    writer, target = transfer.TransferWriter(), ExpectedContent()
    for number, stream in enumerate(streams):
        reader, came = transfer.Reader(), set[bytes]()
        for data in stream:
            for kind, value in reader.feed(data):
                if kind is FrameKind.PART:
                    if value.content in target.contents:
                        came.add(value.content)
                        yield writer.frame(kind, msgspec.msgpack.encode(value))
                elif kind is FrameKind.PAGES:
                    if result := target.taken(value):
                        yield writer.pages(result)
                elif number == 0:
                    yield target.noted(writer, kind, value)
        reader.finish()
        target.contents -= came  # only now: a content comes in many pieces
    if target.contents or target.pages:
        raise Protocol("the streams of a checkpoint lack something", hint="use an older copy")
    yield writer.end()


class ExpectedContent:
    """What the checkpoint needs and has not come yet."""

    def __init__(self) -> None:
        self.contents: set[bytes] = set()
        self.pages: set[bytes] = set()

    def noted(self, writer: transfer.TransferWriter, kind: FrameKind, value: Any) -> bytes:
        """The frame, as it came; what it announces is wanted."""
        match kind:
            case FrameKind.HEAD:
                return writer.start(value)
            case FrameKind.LIST:
                if value.count >= 0:
                    raise Protocol("a stream of a store has pages as changes", hint="use an older copy")
                self.pages |= {value.hashes[at : at + HASH] for at in range(0, len(value.hashes), HASH)} - {NO_HASH}
            case _:
                self.contents |= {item.content for item in value if item.size}
        return writer.frame(kind, msgspec.msgpack.encode(value))

    def taken(self, data: bytes) -> bytes:
        """Those of some pages that are still wanted."""
        result = []
        for page in (data[at : at + PAGE] for at in range(0, len(data), PAGE)):
            digest = blake3(page).digest()
            if digest in self.pages:
                self.pages.remove(digest)
                result.append(page)
        return b"".join(result)


class StreamChecker:
    """Follows a stream that passes by, and knows at its end whether it was whole."""

    def __init__(self) -> None:
        self._hash, self._last = blake3(), b""

    def feed(self, data: bytes) -> None:
        both = self._last + data
        retained = len(END) + HASH
        self._hash.update(both[:-retained])
        self._last = both[-retained:]

    def finish(self) -> None:
        """Raises Protocol unless the stream was whole."""
        if self._last != END + self._hash.digest():
            raise Protocol("the stream broke off", hint="export and send it again")
