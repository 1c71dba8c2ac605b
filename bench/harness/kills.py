"""kill -9 of the daemon, again and again, while 16 sandboxes work: is anything lost, doubled or left behind?

Each sandbox has a worker that runs commands, one after another; each appends its own number to a file there. The
SDK sends a call again when its connection breaks. At the end the file must hold every number that was answered,
once, in order; a number whose call was told as Interrupted may be there, once, or not. A process that was started
before the first kill must be the same one still. Each sandbox also has a session whose shell counts its commands in a
variable: each must be answered with the next number, whatever happened to the daemon meanwhile. Every worker takes a
checkpoint now and then; another one makes and removes sandboxes all the time: none of them may exist twice.

`sandboxes_lost`: sandboxes that do not answer, whose process is another, or whose file lacks an answered number.
`sessions_broken`: sessions that refused a command or counted wrong.
`answers_doubled`: numbers that stand in a file twice, answers for another call, commands of a session carried out
twice, sandboxes made twice.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any

from bench.harness.own_daemon import IMAGE, BenchHost
from sandbox import Client, Interrupted, Sandbox
from sandbox.errors import PagurusError
from sandbox.sdk.sessions import Session

CROWD = 16
PAUSE = (0.02, 0.4)  # seconds that a daemon lives after it serves, at least and at most
PROGRESS = CROWD  # commands that it answers before it is killed again,
MAX_PROGRESS = 10.0  # unless that takes so many seconds
CHECKPOINT_INTERVAL = 25  # commands
SESSION_INTERVAL = 3  # commands
STAY = "setsid sh -c 'while :; do sleep 1000; done' >/dev/null 2>&1 & echo $!"


@dataclass
class Record:
    """What one worker sent, and what it heard."""

    sandbox: Sandbox
    survivor: str  # "pid started" of the process that stays
    session: Session
    counted: int = 0  # commands of the session
    broken: list[str] = field(default_factory=list)  # what was wrong with the session
    answered: list[int] = field(default_factory=list)
    unknown: set[int] = field(default_factory=set)
    wrong: int = 0  # answers for another call
    refused: list[str] = field(default_factory=list)


async def kills_part(host: BenchHost, options: argparse.Namespace) -> dict[str, Any]:
    chance = random.Random(1)
    async with host.client() as client:
        records = [await _begin(client) for _ in range(CROWD)]
        stop, churn = asyncio.Event(), Churn(client)
        work = [asyncio.ensure_future(_work(record, stop)) for record in records]
        work.append(asyncio.ensure_future(churn.work(stop)))
        starts, done = [], 0
        try:
            for _ in range(options.kills):
                await _lives(records, chance.uniform(*PAUSE))
                await asyncio.to_thread(host.kill)
                starts.append(await asyncio.to_thread(host.start))
                done += 1
        finally:
            stop.set()
            await asyncio.gather(*work)
        verdicts = [await _judge(record) for record in records]
        doubled = await churn.doubled({record.sandbox.id for record in records})
        for record in records:
            await record.sandbox.remove()
    return {
        "daemon_kills": done,
        "kill_sandboxes": CROWD,
        "kill_commands": sum(len(record.answered) for record in records),
        "kill_session_commands": sum(record.counted for record in records),
        "sessions_broken": sum(1 for record in records if record.broken),
        "kill_session_troubles": sorted({text for record in records for text in record.broken})[:5],
        "kill_interrupted": sum(len(record.unknown) for record in records),
        "kill_created": churn.made,
        "sandboxes_lost": sum(1 for lost, _, _ in verdicts if lost),
        "answers_doubled": sum(doubled for _, doubled, _ in verdicts) + doubled,
        "kill_restart_s_p50": round(sorted(starts)[len(starts) // 2], 3) if starts else None,
        "kill_refused": sorted({text for record in records for text in record.refused})[:5] + churn.refused[:3],
        "kill_troubles": [text for _, _, text in verdicts if text][:5],
    }


async def _lives(records: list[Record], pause: float) -> None:
    """Let the daemon live until `pause` seconds have passed and some commands have been answered."""
    before, began = _done(records), time.monotonic()
    while time.monotonic() - began < pause or _done(records) < before + PROGRESS:
        if time.monotonic() - began > MAX_PROGRESS:
            return
        await asyncio.sleep(min(0.01, pause))


def _done(records: list[Record]) -> int:
    return sum(len(record.answered) + len(record.unknown) for record in records)


async def _begin(client: Client) -> Record:
    sandbox = await client.create(IMAGE)
    pid = (await sandbox.exec(STAY)).text.strip()
    return Record(sandbox, await _process(sandbox, pid), await sandbox.sessions.open())


async def _process(sandbox: Sandbox, pid: str) -> str:
    """A process of the sandbox, told from a later one of the same number."""
    done = await sandbox.exec(f"cut -d' ' -f1,22 /proc/{pid}/stat")
    return done.text.strip()


async def _work(record: Record, stop: asyncio.Event) -> None:
    number = 0
    while not stop.is_set():
        number += 1
        if number % SESSION_INTERVAL == 0:
            await _count(record)
        try:
            done = await record.sandbox.exec(f"echo {number} >> /log; echo {number}")
            record.answered.append(number)
            record.wrong += done.text != f"{number}\n"
            if number % CHECKPOINT_INTERVAL == 0:
                await record.sandbox.checkpoint()
        except Interrupted:
            record.unknown.add(number)
        except PagurusError as error:
            record.unknown.add(number)
            record.refused.append(f"{type(error).__name__}: {error.message}")
            await asyncio.sleep(0.05)


async def _count(record: Record) -> None:
    """One command of the session: it must be carried out once, and answered."""
    try:
        said = (await record.session.exec("n=$((n+1)); echo $n")).text.strip()
    except PagurusError as error:
        record.broken.append(f"{type(error).__name__}: {error.message}")
        return
    expected, record.counted = record.counted + 1, record.counted + 1
    if said != str(expected):
        record.wrong += said.isdecimal() and int(said) > expected
        record.broken.append(f"answered {said!r} instead of {expected}")
        record.counted = int(said) if said.isdecimal() else record.counted


class Churn:
    """Makes and removes sandboxes all the time."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.made = 0
        self.refused: list[str] = []

    async def work(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                sandbox = await self._client.create(IMAGE)
                self.made += 1
                await self._remove(sandbox.id)
            except PagurusError as error:
                self.refused.append(f"churn: {type(error).__name__}: {error.message}")
                await asyncio.sleep(0.05)

    async def _remove(self, sandbox: str) -> None:
        """Removal takes no key: it is asked for until the sandbox is gone."""
        for _ in range(200):
            try:
                await (await self._client.get(sandbox)).remove()
            except PagurusError as error:
                if error.code == "not_found":
                    return
                await asyncio.sleep(0.05)

    async def doubled(self, existing: set[str]) -> int:
        """Sandboxes that nobody was told of."""
        strays = [info.id for info in await self._client.sandboxes() if info.id not in existing]
        for sandbox in strays:
            await self._remove(sandbox)
        return len(strays)


async def _judge(record: Record) -> tuple[bool, int, str]:
    """(lost, doubled, what is wrong) of one sandbox."""
    try:
        text = (await record.sandbox.exec("cat /log", output_limit=16 << 20)).text
        survivor = await _process(record.sandbox, record.survivor.split()[0])
        back = await record.sandbox.restore(verify=True)
    except PagurusError as error:
        return True, record.wrong, f"{record.sandbox.id}: {error}"
    lines = [int(line) for line in text.split()]
    result = set(lines)
    missing = [number for number in record.answered if number not in result]
    strange = result - set(record.answered) - record.unknown
    troubles = [
        f"lacks {missing[:5]}" if missing else "",
        f"has {sorted(strange)[:5]}, which were never sent" if strange else "",
        f"its process {record.survivor} is {survivor}" if survivor != record.survivor else "",
        "is not equal after a restore" if not back.verified else "",
        "is out of order" if lines != sorted(lines) else "",
    ]
    said = "; ".join(filter(None, troubles))
    return bool(said), len(lines) - len(result) + record.wrong, f"{record.sandbox.id}: {said}" if said else ""
