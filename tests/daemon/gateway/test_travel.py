"""What a sandbox said to its model, told to another host: as much as fits, and nothing that touches others."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zstandard

from daemon.gateway import travel, wire
from daemon.gateway.journal import Journal, Place, Recorded
from sandbox.errors import Invalid
from sandbox.messages.cluster import Conversation

CHAT = wire.find("POST", "/v1/chat/completions")


@pytest.fixture
async def journals(tmp_path: Path) -> AsyncIterator[tuple[Journal, Journal]]:
    made = Journal(tmp_path / "here"), Journal(tmp_path / "there")
    yield made
    for each in made:
        await each.close()


async def talk(journal: Journal, turns: int, size: int) -> list[int]:
    """A conversation that grows by messages of that size; the last answer is not there yet. Its path."""
    place, said, path = Place(tree="t"), list[dict[str, str]](), list[int]()
    for turn in range(turns):
        said += [{"role": "user", "content": f"{turn} {secrets.token_hex(size)}"}]
        asked = wire.understand(CHAT, json.dumps({"messages": said}).encode())
        options = {"sandbox": "s", "parent": place.tip, "checkpoint": f"c-{turn}", "turn": turn, "place": place}
        number, _ = await journal.begin(asked, open_=(), **options)  # type: ignore[arg-type]
        if turn < turns - 1:
            await journal.answered(number, Recorded(200, {}, f"answer {turn}".encode()), durable=False)
        path.append(number)
    return path


async def test_a_conversation_is_taken_as_it_was_told(journals: tuple[Journal, Journal]) -> None:
    here, there = journals
    await talk(there, 2, 10)  # other numbers are taken there
    path, told = await talk(here, 5, 10), Conversation()
    await here.put_token("s", "secret")
    await here.told("s", path, told)
    taken = await there.taken("s-1", told)
    assert [(step.checkpoint, step.answered) for step in taken] == [(f"c-{n}", n < 4) for n in range(5)]
    assert [step.parent for step in taken] == [None, *(step.id for step in taken[:-1])]
    assert await there.knows_token("s-1", "secret")
    for ours, theirs in zip(path, taken, strict=True):
        before, after = await here.read("s", ours), await there.read("s-1", theirs.id)
        assert (before.request, before.response, before.key) == (after.request, after.response, after.key)


async def test_the_newest_travel_as_far_as_they_fit(journals: tuple[Journal, Journal]) -> None:
    here, there = journals
    path, told = await talk(here, 6, travel.MOST // 5), Conversation()
    await here.told("s", path, told)
    assert 0 < len(told.exchanges) < 6 and sum(map(len, told.texts.values())) <= travel.MOST
    assert [each.checkpoint for each in told.exchanges][:1] == ["c-5"]
    taken = await there.taken("s-1", told)
    assert taken[-1].checkpoint == "c-5" and await there.read("s-1", taken[-1].id)


async def test_nothing_is_taken_whose_hash_is_not_its_own(journals: tuple[Journal, Journal]) -> None:
    here, there = journals
    path, told = await talk(here, 2, 10), Conversation()
    await here.told("s", path, told)
    for text in (zstandard.ZstdCompressor().compress(b'{"role": "user", "content": "other"}'), b"no zstd"):
        told.texts[next(iter(told.texts))] = text
        with pytest.raises(Invalid):
            await there.taken("s-1", told)
    assert (await there.load())[1] == []
