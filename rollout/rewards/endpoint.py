"""Questions to a model's HTTP endpoint, as judges ask them: tried again, and answered from a file where they can be.

Guarantee: an answer is kept only once it was understood; all tries together end within the limit of the scoring.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import sqlite3
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import TypeVar

import aiohttp
import msgspec

T = TypeVar("T")
TRIES = 4
PAUSE = 0.5  # seconds before the second try; doubled for each that follows
MAX_PAUSE = 20.0  # seconds, whatever the endpoint says
BUSY = {408, 409, 425, 429, 500, 502, 503, 504, 529}
MAX_ANSWER = 4 << 20  # bytes
SCHEMA = "create table if not exists answers (key text primary key, answer blob not null) without rowid"


class EndpointBusy(Exception):
    """It may say something else later. `after`: seconds that it asks for."""

    def __init__(self, message: str, after: float = 0.0):
        super().__init__(message)
        self.after = after


async def answered(
    address: str,
    body: Mapping[str, object],
    read: Callable[[bytes], T],
    *,
    key_variable: str = "",
    tries: int = TRIES,
    limit: float = 120.0,
    cache: str = "",
) -> T:
    """What `read` makes of the answer's bytes. Where it raises ValueError, LookupError, TypeError or an error of
    msgspec's, the question is asked again."""
    key = hashlib.blake2b(json.dumps([address, body], sort_keys=True).encode(), digest_size=16).hexdigest()
    if cache and (existing := await asyncio.to_thread(_get, cache, key)) is not None:
        return read(existing)
    deadline = time.monotonic() + limit
    secret = os.environ.get(key_variable, "")
    headers = {"authorization": f"Bearer {secret}"} if secret else {}
    async with aiohttp.ClientSession(trust_env=True) as session:
        for attempt in range(tries):
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    answer = await _once(session, address, body, headers)
                result = read(answer)
            except (
                *(EndpointBusy, aiohttp.ClientConnectionError, msgspec.MsgspecError),
                *(ValueError, LookupError, TypeError),
            ) as error:
                after = error.after if isinstance(error, EndpointBusy) else 0.0
                pause = min(MAX_PAUSE, max(after, PAUSE * 2**attempt * (0.5 + random.random())))
                if attempt + 1 == tries or time.monotonic() + pause >= deadline:
                    raise RuntimeError(f"{address}, try {attempt + 1}: {error}") from error
                await asyncio.sleep(pause)
            else:
                if cache:
                    await asyncio.to_thread(_put, cache, key, answer)
                return result
    raise ValueError(f"tries is {tries}: ask at least once")


async def _once(
    session: aiohttp.ClientSession, address: str, body: Mapping[str, object], headers: dict[str, str]
) -> bytes:
    async with session.post(address, json=body, headers=headers) as response:
        raw = await response.content.read(MAX_ANSWER)
        while more := await response.content.read(MAX_ANSWER + 1 - len(raw)):
            raw += more
        if response.status in BUSY:
            raise EndpointBusy(f"{response.status} {raw[:200]!r}", _seconds(response.headers.get("retry-after", "")))
        if response.status != 200:
            raise RuntimeError(f"{address} answered {response.status}: {raw[:200]!r}")  # and would again
        return raw


def _seconds(text: str) -> float:
    return float(text) if text.isdecimal() else 0.0


def _get(file: str, key: str) -> bytes | None:
    with closing(_opened(file)) as db:
        row = db.execute("select answer from answers where key = ?", (key,)).fetchone()
    return None if row is None else bytes(row[0])


def _put(file: str, key: str, answer: bytes) -> None:
    with closing(_opened(file)) as db, db:
        db.execute("insert or replace into answers values (?, ?)", (key, answer))


def _opened(file: str) -> sqlite3.Connection:
    db = sqlite3.connect(file, timeout=30)
    db.execute(SCHEMA)
    return db
