"""Many creations at once: each is answered, or told to come again; none is dropped."""

from __future__ import annotations

import asyncio
import collections

import pytest
from aiohttp import ClientSession, ClientTimeout, TCPConnector

from tests.daemon.e2b.conftest import Served

AT_ONCE = 150


@pytest.mark.long
@pytest.mark.timeout(1500)
async def test_150_creations_at_once(served: Served, key: str) -> None:
    body = {"templateID": "base", "timeout": 3600, "allow_internet_access": False}
    statuses: collections.Counter[int] = collections.Counter()
    connector, patience = TCPConnector(limit=0), ClientTimeout(total=1200)
    async with ClientSession(headers={"X-API-KEY": key}, connector=connector, timeout=patience) as session:

        async def create() -> str | None:
            async with session.post(f"{served.url}/v2/sandboxes", json=body) as answer:
                statuses[answer.status] += 1
                if answer.status == 429:
                    assert int(answer.headers["Retry-After"]) >= 1
                    return None
                assert answer.status == 201, await answer.text()
                return str((await answer.json())["sandboxID"])

        made = [number for number in await asyncio.gather(*(create() for _ in range(AT_ONCE))) if number]
        assert sum(statuses.values()) == AT_ONCE and statuses.keys() <= {201, 429}
        assert len(set(made)) == statuses[201] >= 1
        for number in made:
            async with session.delete(f"{served.url}/sandboxes/{number}") as answer:
                assert answer.status == 204
