"""The catalogue: one change is all or nothing, also when the process dies in the middle (I3)."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from daemon.catalogue import (
    Catalogue,
    CheckpointRow,
    SandboxRow,
    drop_checkpoint,
    drop_sandbox,
    put_checkpoint,
    put_sandbox,
    put_turn,
)
from sandbox.criu.open_files import OpenFiles
from sandbox.errors import Closed, PagurusError
from sandbox.messages import CheckpointState, Effects, SandboxState, TurnInfo, Verdict
from tests.support.programs import Program


def sandbox(name: str = "s-1", **fields) -> SandboxRow:
    given = {
        "image": "debian",
        "state": SandboxState.RUNNING,
        "created_at": 1.0,
        "uid_base": 1 << 20,
        "head": "c-0",
        "origin": "c-0",
    }
    return SandboxRow(id=name, hostname=name, tree=f"{name}.0", **{**given, **fields})


def checkpoint(name: str, number: int, **fields) -> CheckpointRow:
    given = {"sandbox": "s-1", "state": CheckpointState.CAPTURED, "verdict": Verdict.BOTH}
    return CheckpointRow(id=name, number=number, **{**given, **fields})


async def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    files = {"/var/log/x": ((1, 2, 3, 4, 5), None), "/usr/bin/y": ((1, 2, 3, 4, 5), (5, 4, 3, 2, 1))}
    held = OpenFiles(files, {"/etc": 7})
    one, two = checkpoint("c-2", 2, held=held, parent="c-1"), checkpoint("c-1", 1, label="start")
    catalogue = Catalogue(tmp_path / "c.sqlite")
    assert catalogue.load() == ([], [])
    await catalogue.write([put_sandbox(sandbox()), put_checkpoint(one), put_checkpoint(two)], durable=True)
    await catalogue.close()
    again = Catalogue(tmp_path / "c.sqlite")
    assert again.load() == ([sandbox()], [two, one])
    await again.write([*drop_sandbox("s-1"), drop_checkpoint("c-1")])
    await again.close()
    third = Catalogue(tmp_path / "c.sqlite")
    assert third.load() == ([], [one])
    await third.close()


async def test_turns_are_kept_in_order(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path / "c.sqlite")
    turns = [
        TurnInfo(
            sandbox="s-1", turn=n, command="ls", started_at=0.0, duration=0.1, exit_code=0, verdict=Verdict.NONE,
            reason="nothing", effects=Effects(forks=n),
        )
        for n in range(1, 6)
    ]  # fmt: skip
    catalogue.later([put_turn(turn) for turn in turns])
    await catalogue.write([])
    assert await catalogue.turns("s-1") == turns
    assert await catalogue.turns("s-1", limit=2) == turns[-2:]
    await catalogue.close()


async def test_turns_that_are_still_being_written_are_read_too(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path / "c.sqlite")
    await catalogue.write([])
    turn = TurnInfo(
        sandbox="s-1", turn=1, command="ls", started_at=0.0, duration=0.1, exit_code=0, verdict=Verdict.NONE,
        reason="nothing",
    )  # fmt: skip
    other = sqlite3.connect(tmp_path / "c.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")  # the writer cannot commit
    catalogue.later([put_turn(turn)])
    catalogue._flush()  # as the timer does
    asyncio.get_running_loop().call_later(0.1, other.execute, "ROLLBACK")
    assert await catalogue.turns("s-1") == [turn]
    await catalogue.close()
    assert await catalogue.turns("s-1") == [turn]
    other.close()


async def test_a_refused_change_leaves_nothing_and_others_alone(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path / "c.sqlite")
    bad = [put_sandbox(sandbox("s-bad")), ("INSERT INTO sandboxes VALUES (NULL, NULL, NULL, NULL)", ())]
    refused, fine = await asyncio.gather(
        catalogue.write(bad), catalogue.write([put_sandbox(sandbox())]), return_exceptions=True
    )
    assert isinstance(refused, PagurusError)
    assert fine is None
    await catalogue.close()
    again = Catalogue(tmp_path / "c.sqlite")
    assert [row.id for row in again.load()[0]] == ["s-1"]
    await again.close()


async def test_another_schema_is_refused_with_a_hint(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "c.sqlite")
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(PagurusError, match="schema 99"):
        Catalogue(tmp_path / "c.sqlite")


async def test_close_is_idempotent_and_final(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path / "c.sqlite")
    await catalogue.close()
    await catalogue.close()
    with pytest.raises(Closed, match="closed"):
        catalogue.later([])


WRITER = """
import asyncio, sys
from pathlib import Path
from daemon.catalogue import Catalogue, put_checkpoint, put_sandbox
from tests.daemon.test_catalogue import checkpoint, sandbox

async def main():
    catalogue = Catalogue(Path(sys.argv[1]))
    for number in range(1, 1_000_000):
        row = sandbox(head=f"c-{number}", turn=number)
        await catalogue.write([put_sandbox(row), put_checkpoint(checkpoint(f"c-{number}", number))], durable=number % 2)
        print(number, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("after", [1, 7, 40])
def test_kill_9_leaves_the_old_or_the_new_catalogue(tmp_path: Path, after: int) -> None:
    """Every change writes a sandbox and the checkpoint that it names: never one without the other."""
    path = tmp_path / "c.sqlite"
    writer = Program([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None
        reported = [int(writer.stdout.readline()) for _ in range(after)]
    finally:
        os.kill(writer.pid, signal.SIGKILL)
        rest = writer.stdout.read().split() if writer.stdout else []
        writer.end()
    last = max([*reported, *map(int, rest)])
    (row,), checkpoints = asyncio.run(_loaded(path))
    assert row.turn >= last
    assert row.head == checkpoints[-1].id
    assert [c.number for c in checkpoints] == list(range(1, row.turn + 1))


async def _loaded(path: Path) -> tuple[list[SandboxRow], list[CheckpointRow]]:
    catalogue = Catalogue(path)
    try:
        return catalogue.load()
    finally:
        await catalogue.close()
