"""What a sandbox said to its model, told to another host: as much as fits, and nothing that touches others."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import blake3
import msgspec
import pytest
import zstandard

from daemon.gateway import travel, wire
from daemon.gateway.journal import ConversationJournal, JournalCursor, RecordedAnswer
from sandbox.errors import Invalid
from sandbox.messages.cluster import ConversationExport

CHAT = wire.find("POST", "/v1/chat/completions")


@pytest.fixture
async def journals(tmp_path: Path) -> AsyncIterator[tuple[ConversationJournal, ConversationJournal]]:
    made = ConversationJournal(tmp_path / "here"), ConversationJournal(tmp_path / "there")
    yield made
    for item in made:
        await item.close()


async def talk(journal: ConversationJournal, turns: int, size: int) -> list[int]:
    """A conversation that grows by messages of that size; the last answer is not there yet. Its path."""
    place, said, path = JournalCursor(tree="t"), list[dict[str, str]](), list[int]()
    for turn in range(turns):
        said += [{"role": "user", "content": f"{turn} {secrets.token_hex(size)}"}]
        requested = wire.understand(CHAT, json.dumps({"messages": said}).encode())
        options = {"sandbox": "s", "parent": place.head, "checkpoint": f"c-{turn}", "turn": turn, "place": place}
        number, _ = await journal.begin(requested, open_=(), **options)  # type: ignore[arg-type]
        if turn < turns - 1:
            await journal.answered(number, RecordedAnswer(200, {}, f"answer {turn}".encode()), durable=False)
        path.append(number)
    return path


async def test_a_conversation_is_taken_as_it_was_told(
    journals: tuple[ConversationJournal, ConversationJournal],
) -> None:
    here, there = journals
    await talk(there, 2, 10)  # other numbers are taken there
    path, reported = await talk(here, 5, 10), ConversationExport()
    await here.put_token("s", "secret")
    await here.reported("s", path, reported)
    _, taken = await there.taken("s-1", "tree", reported)
    assert [(step.checkpoint, step.answered) for step in taken] == [(f"c-{n}", n < 4) for n in range(5)]
    assert [step.parent for step in taken] == [None, *(step.id for step in taken[:-1])]
    assert await there.knows_token("s-1", "secret")
    for ours, theirs in zip(path, taken, strict=True):
        before, after = await here.read("s", ours), await there.read("s-1", theirs.id)
        assert (before.request, before.response, before.key) == (after.request, after.response, after.key)


async def test_the_newest_travel_as_far_as_they_fit(journals: tuple[ConversationJournal, ConversationJournal]) -> None:
    here, there = journals
    path, reported = await talk(here, 6, travel.MAX_BYTES // 5), ConversationExport()
    await here.reported("s", path, reported)
    assert 0 < len(reported.exchanges) < 6 and sum(map(len, reported.texts.values())) <= travel.MAX_BYTES
    assert [item.checkpoint for item in reported.exchanges][:1] == ["c-5"]
    _, taken = await there.taken("s-1", "tree", reported)
    assert taken[-1].checkpoint == "c-5" and await there.read("s-1", taken[-1].id)


async def test_a_daemon_that_dies_after_an_arrival_knows_how_far_the_sandbox_has_come(
    journals: tuple[ConversationJournal, ConversationJournal],
) -> None:
    here, there = journals
    path, reported = await talk(here, 3, 10), ConversationExport()
    await here.reported("s", path, reported)
    _, taken = await there.taken("s-1", "tree", reported)
    places, _ = await there.load()  # as the next daemon does, before the agent has asked for anything
    assert places == {"s-1": JournalCursor(tree="tree", head=taken[-1].id, cursor=2)}


async def test_what_travels_is_bounded_whatever_was_said(
    journals: tuple[ConversationJournal, ConversationJournal],
) -> None:
    """A long conversation mentions its texts in each exchange; one answer may be as large as all that may travel."""
    here, there = journals
    place, same = JournalCursor(tree="t"), [{"role": "user", "content": "a"}] * 5000
    for turn in range(20):  # each is small, and mentions thousands of texts
        requested = wire.understand(CHAT, json.dumps({"messages": same, "user": str(turn)}).encode())
        number, _ = await here.begin(
            requested, sandbox="s", parent=place.head, checkpoint=None, turn=turn, open_=(), place=place
        )
    path, reported = [step.id for _, _, step in (await here.load())[1]], ConversationExport()
    await here.reported("s", path, reported)
    assert (
        len(reported.exchanges) == 3
        and len(msgspec.json.encode(reported)) < 2 * travel.MAX_BYTES + 64 * travel.MAX_MENTIONS
    )
    await here.answered(number, RecordedAnswer(200, {}, secrets.token_bytes(5 << 20)), durable=False)
    await here.reported("s", path, reported := ConversationExport())
    assert len(msgspec.json.encode(reported)) < 10_000 and reported.exchanges[0].state == "requested"
    _, taken = await there.taken("s-1", "tree", reported)
    assert not taken[0].answered and (await there.read("s-1", taken[0].id)).request


async def test_an_answer_that_is_larger_than_all_else_travels_alone(
    journals: tuple[ConversationJournal, ConversationJournal],
) -> None:
    here, there = journals
    path, reported, answer = await talk(here, 2, 10), ConversationExport(), secrets.token_bytes(travel.MAX_BYTES + 1)
    await here.answered(path[-1], RecordedAnswer(200, {"content-type": "x"}, answer), durable=False)
    await here.reported("s", path, reported)
    _, taken = await there.taken("s-1", "tree", reported)
    assert [step.answered for step in taken] == [True]
    assert await there.answer(taken[0].id) == RecordedAnswer(200, {"content-type": "x"}, answer)


BOMB = zstandard.ZstdCompressor().compress(bytes(travel.MAX_UNPACKED + 1))
EMPTY = zstandard.ZstdCompressor().compress(b"")


@pytest.mark.parametrize(
    "field",
    [
        {"response": BOMB},
        {"response": EMPTY[:3]},
        {"response": None},
        {"envelope": BOMB},
        {"envelope": EMPTY},
        {"envelope": zstandard.ZstdCompressor().compress(b"[]")},
        {"headers": b"\xff"},
        {"headers": None},
        {"status": None},
    ],
)
async def test_an_exchange_that_could_not_be_read_later_is_not_taken(
    journals: tuple[ConversationJournal, ConversationJournal], field: dict[str, Any]
) -> None:
    here, there = journals
    path, reported = await talk(here, 2, 10), ConversationExport()
    await here.reported("s", path, reported)
    assert reported.exchanges[1].state == "answered"
    reported.exchanges[1] = msgspec.structs.replace(reported.exchanges[1], **field)
    with pytest.raises(Invalid):
        await there.taken("s-1", "tree", reported)
    assert (await there.load())[1] == []


async def test_only_headers_that_an_agent_may_see_are_taken(
    journals: tuple[ConversationJournal, ConversationJournal],
) -> None:
    here, there = journals
    path, reported = await talk(here, 1, 10), ConversationExport()
    hostile = {"content-type": "text/plain", "transfer-encoding": "chunked", "retry-after": "1\r\nx: y"}
    await here.answered(path[0], RecordedAnswer(200, hostile, b"hi"), durable=False)
    await here.reported("s", path, reported)
    _, taken = await there.taken("s-1", "tree", reported)
    assert (await there.answer(taken[0].id)).headers == {"content-type": "text/plain"}


async def test_texts_that_unpack_to_too_much_together_are_refused(
    journals: tuple[ConversationJournal, ConversationJournal],
) -> None:
    reported = ConversationExport()
    for number in range(travel.MAX_UNPACKED // wire.MAX_BODY + 1):
        text = b'"' + str(number).ljust(wire.MAX_BODY - 2).encode() + b'"'
        reported.texts[blake3.blake3(text).digest()] = zstandard.ZstdCompressor().compress(text)
    with pytest.raises(Invalid, match="unpacks"):
        await journals[0].taken("s-1", "tree", reported)


async def test_nothing_is_taken_whose_hash_is_not_its_own(
    journals: tuple[ConversationJournal, ConversationJournal],
) -> None:
    here, there = journals
    path, reported = await talk(here, 2, 10), ConversationExport()
    await here.reported("s", path, reported)
    for text in (zstandard.ZstdCompressor().compress(b'{"role": "user", "content": "other"}'), b"no zstd"):
        reported.texts[next(iter(reported.texts))] = text
        with pytest.raises(Invalid):
            await there.taken("s-1", "tree", reported)
    assert (await there.load())[1] == []
