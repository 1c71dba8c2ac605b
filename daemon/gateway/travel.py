"""The conversation of a sandbox that continues at another host: as much of it as its agent may request again.

Guarantee: what is sent fits into a request for the other host, whatever an agent and its model have said. What is
taken is a path of its own, under numbers of this host. A text counts under its own hash, so nothing that another host
sends changes what sandboxes here have said; and nothing is unpacked beyond what it may take.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

import blake3
import msgspec
import zstandard

from daemon.gateway.replay import ReplayExchange
from daemon.gateway.wire import MAX_ANSWER, MAX_BODY, reported
from sandbox.errors import Invalid
from sandbox.messages.cluster import ConversationExport, ReportedExchange

MAX_BYTES = 256 << 10  # bytes of exchanges and texts that travel
ROW = 256  # bytes that an exchange counts in addition to its content
MAX_MENTIONS = 16_384  # of texts, in all exchanges that travel
MAX_ALONE = 2 << 20  # bytes of the newest answer, which travels where all else would be too much
MAX_UNPACKED = 64 << 20  # bytes of all that is unpacked of a conversation
_COLUMNS = (
    "checkpoint, turn, key, path, state, started, ended, status, requested, answered, recorded, headers, envelope, "
    "response, request_bytes, response_bytes"
)
_NAMES = _COLUMNS.split(", ")
_NOTHING = zstandard.ZstdCompressor().compress(b"{}")  # an envelope that holds nothing
_NO_WAITS = msgspec.msgpack.encode([])  # who waited at the other host waits no more


def read(database: sqlite3.Connection, sandbox: str, path: Sequence[int], conversation: ConversationExport) -> None:
    """Fill in the newest exchanges of the path, the newest first, and the token of the agent."""
    size = unpacked = mentions = 0
    for number in reversed(path):
        row = database.execute(f"SELECT {_COLUMNS} FROM exchanges WHERE id = ?", (number,)).fetchone()
        parts = database.execute(
            "SELECT hash, data FROM parts JOIN texts USING (hash) WHERE exchange = ? ORDER BY position", (number,)
        ).fetchall()
        exchange = ReportedExchange(parts=[name for name, _ in parts], **dict(zip(_NAMES, row, strict=True)))
        texts = {name: data for name, data in parts if name not in conversation.texts}
        packed = (exchange.envelope, exchange.response or b"", *texts.values())
        size += ROW + sum(map(len, (exchange.headers or b"", *packed, *texts)))
        unpacked += sum(zstandard.frame_content_size(item) for item in packed if item)
        mentions += len(parts)
        if size > MAX_BYTES or unpacked > MAX_UNPACKED or mentions > MAX_MENTIONS:
            if not conversation.exchanges:
                conversation.exchanges.append(_answer_alone(exchange))
            break
        conversation.exchanges.append(exchange)
        conversation.texts |= texts
    row = database.execute("SELECT hash FROM tokens WHERE sandbox = ?", (sandbox,)).fetchone()
    conversation.token = b"" if row is None else row[0]


def _answer_alone(exchange: ReportedExchange) -> ReportedExchange:
    """Without the request; an answer that is too long too is requested again."""
    exchange.envelope, exchange.parts = _NOTHING, []
    if len(exchange.response or b"") + len(exchange.headers or b"") > MAX_ALONE:
        exchange.state, exchange.ended, exchange.status = "requested", None, None
        exchange.headers = exchange.response = None
    return exchange


def check(conversation: ConversationExport) -> None:
    """Raises Invalid unless all of it can be read, and is what it says. Takes time: all of it is unpacked."""
    left = MAX_UNPACKED
    for name, data in conversation.texts.items():
        text = _unpacked(data, min(MAX_BODY, left))
        left -= len(text)
        if blake3.blake3(text).digest() != name:
            raise Invalid("a text of the conversation does not match its hash")
        _decoded(msgspec.json.decode, text, msgspec.Raw)
    for exchange in conversation.exchanges:
        envelope = _unpacked(exchange.envelope, min(MAX_BODY, left))
        left -= len(envelope)
        _decoded(msgspec.json.decode, envelope, dict[str, msgspec.Raw])
        if exchange.state != "answered":
            exchange.headers = exchange.response = None
            continue
        if exchange.status is None or exchange.headers is None or exchange.response is None:
            raise Invalid("the conversation lacks an announced answer")
        left -= len(_unpacked(exchange.response, min(MAX_ANSWER, left)))
        headers = _decoded(msgspec.msgpack.decode, exchange.headers, dict[str, str])
        exchange.headers = msgspec.msgpack.encode(reported(headers))


def _unpacked(data: bytes, limit: int) -> bytes:
    """The size that a frame says it has is looked at first: a decompressor goes by that, whatever its limit."""
    try:
        if not 0 <= (size := zstandard.frame_content_size(data)) <= limit:
            raise Invalid(f"a part of the conversation unpacks to {size} bytes, of {limit} that are left for it")
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise Invalid(f"a part of the conversation cannot be read: {error}") from None


def _decoded(decode: Callable[..., Any], data: bytes, form: Any) -> Any:
    try:
        return decode(data, type=form)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Invalid(f"a part of the conversation cannot be read: {error}") from None


def write(database: sqlite3.Connection, sandbox: str, conversation: ConversationExport) -> list[ReplayExchange]:
    """Take the exchanges of a conversation that was checked; the path that they are, the oldest first."""
    database.executemany("INSERT OR IGNORE INTO texts VALUES (?, ?)", conversation.texts.items())
    path: list[ReplayExchange] = []
    for exchange in reversed(conversation.exchanges):
        parent = path[-1].id if path else None
        values = [getattr(exchange, name) for name in _NAMES]
        number = database.execute(
            f"INSERT INTO exchanges (sandbox, parent, main, open, {_COLUMNS}) VALUES (?, ?, 1, ?{', ?' * len(_NAMES)})",
            (sandbox, parent, _NO_WAITS, *values),
        ).lastrowid
        assert number is not None
        if all(name in conversation.texts for name in exchange.parts):
            mentions = [(number, position, name) for position, name in enumerate(exchange.parts)]
            database.executemany("INSERT INTO parts VALUES (?, ?, ?)", mentions)
        path.append(
            ReplayExchange(
                id=number,
                key=exchange.key,
                parent=parent,
                checkpoint=exchange.checkpoint,
                answered=exchange.state == "answered",
                turn=exchange.turn,
            )
        )
    if conversation.token:
        database.execute("INSERT OR REPLACE INTO tokens VALUES (?, ?)", (sandbox, conversation.token))
    return path
