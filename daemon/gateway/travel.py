"""The conversation of a sandbox that goes on at another host: as much of it as its agent may ask for again.

Owns: the rows that are told and taken. Does not own: which exchange is the last (:mod:`daemon.gateway.conversation`).

Guarantee: what is taken is a path of its own, under numbers of this host. A text counts under its own hash, so nothing
that another host tells changes what sandboxes here have said.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import blake3
import zstandard

from daemon.gateway.replay import Step
from daemon.gateway.wire import BODY_MOST
from sandbox.errors import Invalid
from sandbox.messages.cluster import Conversation, ToldExchange

MOST = 256 << 10  # bytes of exchanges and texts that travel
_COLUMNS = (
    "checkpoint, turn, key, path, state, started, ended, status, asked, answered, recorded, open, headers, envelope, "
    "response, request_bytes, response_bytes"
)
_NAMES = _COLUMNS.split(", ")


def read(database: sqlite3.Connection, sandbox: str, path: Sequence[int], conversation: Conversation) -> None:
    """Fill in the newest exchanges of the path, the newest first, and the token of the agent."""
    size = 0
    for number in reversed(path):
        row = database.execute(f"SELECT {_COLUMNS} FROM exchanges WHERE id = ?", (number,)).fetchone()
        parts = database.execute(
            "SELECT hash, data FROM parts JOIN texts USING (hash) WHERE exchange = ? ORDER BY position", (number,)
        ).fetchall()
        fields = dict(zip(_NAMES, row, strict=True))
        told = ToldExchange(number=number, parts=[name for name, _ in parts], **fields)
        texts = {name: data for name, data in parts if name not in conversation.texts}
        size += sum(map(len, (told.envelope, told.response or b"", told.headers or b"", *texts, *texts.values())))
        if size > MOST and conversation.exchanges:
            break
        conversation.exchanges.append(told)
        if size <= MOST:  # of one exchange that is larger the answer travels, and not what was asked
            conversation.texts |= texts
    row = database.execute("SELECT hash FROM tokens WHERE sandbox = ?", (sandbox,)).fetchone()
    conversation.token = b"" if row is None else row[0]


def write(database: sqlite3.Connection, sandbox: str, conversation: Conversation) -> list[Step]:
    """Take the exchanges; the path that they are, the oldest first. Raises Invalid."""
    for name, data in conversation.texts.items():
        try:
            text = zstandard.ZstdDecompressor().decompress(data, max_output_size=BODY_MOST)
        except zstandard.ZstdError as error:
            raise Invalid(f"a text of the conversation cannot be read: {error}") from None
        if blake3.blake3(text).digest() != name:
            raise Invalid("a text of the conversation is another one than its hash says")
        database.execute("INSERT OR IGNORE INTO texts VALUES (?, ?)", (name, data))
    path: list[Step] = []
    for told in reversed(conversation.exchanges):
        parent = path[-1].id if path else None
        values = [getattr(told, name) for name in _NAMES]
        values[_NAMES.index("open")] = b"\x90"  # none: who waited for those waits no more
        number = database.execute(
            f"INSERT INTO exchanges (sandbox, parent, main, {_COLUMNS}) VALUES (?, ?, 1{', ?' * len(_NAMES)})",
            (sandbox, parent, *values),
        ).lastrowid
        assert number is not None
        known = [name for name in told.parts if name in conversation.texts]
        mentions = [(number, at, name) for at, name in enumerate(known if len(known) == len(told.parts) else [])]
        database.executemany("INSERT INTO parts VALUES (?, ?, ?)", mentions)
        path.append(
            Step(
                id=number,
                key=told.key,
                parent=parent,
                checkpoint=told.checkpoint,
                answered=told.state == "answered",
                turn=told.turn,
            )
        )
    if conversation.token:
        database.execute("INSERT OR REPLACE INTO tokens VALUES (?, ?)", (sandbox, conversation.token))
    return path
