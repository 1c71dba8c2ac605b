"""The power goes in the middle of a write: what the daemon called durable is there, and the catalogue is old or new."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from daemon.catalogue import CheckpointRow
from sandbox import Verdict
from sandbox.messages import CheckpointState
from sandbox.tree import btrfs, hashing
from sandbox.tree.pool import BtrfsPool
from tests.crash.power.blockdev import _RECORD, CRASH_STATES, FLUSH, SECTOR, WRITE, Disk, available, cuts, events
from tests.crash.power.examine import contents
from tests.crash.power.story import EMPTY, NEVER, Ledger, Life, Story, Transaction
from tests.support.daemon_host import image_tree, missing

CHECKOUT = Path(__file__).resolve().parents[3]


def written(log: Path, records: list[tuple[int, int, bytes]]) -> None:
    log.write_bytes(b"".join(_RECORD.pack(kind, offset, len(data)) + data for kind, offset, data in records))


def some_log(chance: random.Random, log: Path) -> list[tuple[int, int, bytes]]:
    """Writes and flushes of a disk of 20 sectors; some writes overlap, some change nothing."""
    records = []
    for _ in range(40):
        if chance.random() < 0.25:
            records.append((FLUSH, 0, b""))
        else:
            data = bytes([chance.randrange(4)]) * SECTOR * chance.randrange(1, 4)
            records.append((WRITE, chance.randrange(16) * SECTOR, data))
    written(log, records)
    return records


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("crash_states", [1, len(CRASH_STATES)])
def test_a_cut_keeps_what_was_flushed_and_any_part_of_the_rest(tmp_path: Path, seed: int, crash_states: int) -> None:
    chance = random.Random(seed)
    log, image = tmp_path / "log", tmp_path / "image"
    records = some_log(chance, log)
    image.write_bytes(bytes(20 * SECTOR))
    every = list(events(log))
    assert [(e.kind, e.offset, e.length) for e in every] == [(k, o, len(d)) for k, o, d in records]
    behind = {event.end: record for event, record in zip(every, records, strict=True)}
    disk, states = Disk(image, log), {}
    kinds: dict[int, list[str]] = {event.end: [] for event in every}
    for cut in cuts(log, chance, crash_states):
        kinds[cut.position].append(cut.name)
        flushed, pending = bytearray(20 * SECTOR), []
        for event in every:
            kind, offset, data = behind[event.end]
            if event.end <= cut.base and kind == WRITE:
                flushed[offset : offset + len(data)] = data
            elif cut.base < event.end <= cut.position:
                pending.append((offset, data))
        state = disk.state(cut)
        disk.make(cut, tmp_path / "cut")
        result = (tmp_path / "cut").read_bytes()
        for sector in range(20):
            here = slice(sector * SECTOR, (sector + 1) * SECTOR)
            legal = {bytes(flushed[here])}
            for where, what in pending:
                if where <= sector * SECTOR < where + len(what):
                    legal.add(what[sector * SECTOR - where :][:SECTOR])
            assert result[here] in legal
        assert states.setdefault(state, result) == result  # equal states are equal disks,
    assert len(states) == len(set(states.values()))  # and equal disks are equal states
    disk.close()
    for event in every:
        expected = ["flushed"] if event.kind == FLUSH else sorted(CRASH_STATES)
        assert len(kinds[event.end]) == (1 if event.kind == FLUSH else crash_states)
        assert crash_states == 1 or sorted(kinds[event.end]) == expected


def row(name: str, *, label: str | None = None, state: CheckpointState = CheckpointState.DURABLE) -> CheckpointRow:
    return CheckpointRow(id=name, sandbox="s", number=1, state=state, verdict=Verdict.FILES, label=label)


def test_what_came_back_is_one_of_the_catalogues_that_there_were() -> None:
    ledger = Ledger(
        [
            Transaction(begun=10, committed=20, durable=True, mark="a"),
            Transaction(begun=30, committed=40, durable=False, mark="b"),
            Transaction(begun=50, committed=60, durable=True, mark="c"),
            Transaction(begun=70, committed=80, durable=True, mark="a"),  # as it was before
        ]
    )
    allowed = {
        5: {EMPTY},
        15: {EMPTY, "a"},
        25: {"a"},
        35: {"a", "b"},
        45: {"a", "b"},  # committed, but nobody asked for it to be durable
        55: {"a", "b", "c"},
        65: {"c"},
        75: {"c", "a"},
        85: {"a"},
    }
    for position, marks in allowed.items():
        assert {
            result for result in (EMPTY, "a", "b", "c", "none of them") if not ledger.wrong(result, position)
        } == marks
    assert [ledger.newest(position) for position in (5, 15, 45, 55, 85)] == [EMPTY, "a", "b", "c", "a"]


def test_what_came_back_is_what_clients_were_told() -> None:
    story = Story()
    story.checkpoints["c"] = [Life(durable=10, leaving=20, gone=30), Life(begun=40, durable=50)]
    story.labels["c"] = [(11, 12, "one"), (14, 16, "two")]
    here, absent = {"c": row("c", label="two")}, {}
    verdicts = {
        5: (True, True),  # (may be there, may be absent)
        15: (True, False),
        25: (True, True),
        35: (False, True),
        45: (True, True),
        55: (True, False),
    }
    for position, expected in verdicts.items():
        assert (not story.wrong(here, position), not story.wrong(absent, position)) == expected
    assert story.wrong({"c": row("c", label="two", state=CheckpointState.CAPTURED)}, 15)
    assert not story.wrong({"c": row("c", label="one")}, 15)  # "two" was asked for, but not answered
    assert story.wrong({"c": row("c", label="one")}, 17)
    assert Life().durable == NEVER


@pytest.mark.skipif(bool(missing() or available()), reason=missing() or available())
def test_a_daemon_that_loses_its_power_keeps_what_it_called_durable() -> None:
    """A few of the cuts that `pagurus bench powercut` makes: every one of them is the bench's business."""
    if image_tree().name != "debian" or not image_tree().exists():
        pytest.skip("the bench runs on the image debian")
    program = [sys.executable, "-m", "pagurus", "bench", "powercut", "--json"]
    program += ["--cuts", "6", "--turns", "5", "--daemons", "1"]
    done = subprocess.run(program, capture_output=True, text=True, cwd=CHECKOUT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["old_or_new"] == result["old"] + result["new"] == result["complete"] == result["cuts"] == 6
    assert result["transactions"] > 10
    assert result["answers"] >= 5
    assert result["flushes"] > 50


def test_files_that_nobody_hashed_yet_are_compared_with_what_they_held(tmp_path: Path) -> None:
    """The examination itself can fail: a durable row whose snapshot lacks a byte, and one that nothing is known of."""
    state = tmp_path / "state"
    pool = BtrfsPool(state, size=256 << 20).ensure()
    try:
        (state / "checkpoints").mkdir(exist_ok=True)
        tree = pool.sandboxes / "s-1"
        pool.create_tree(tree)
        (tree / "upper" / "f").write_bytes(b"as it was")
        retained = pool.checkpoints / "c-1"
        btrfs.snapshot(tree, retained, readonly=True)
        rows = {
            "c-1": CheckpointRow(
                id="c-1", sandbox="s-1", number=1, state=CheckpointState.DURABLE, verdict=Verdict.FILES, files="c-1"
            )
        }
        held = {"c-1": hashing.digest(retained, None)}
        assert contents(rows, state, held) == []
        with pytest.raises(ValueError, match="nothing is known"):
            contents(rows, state, {})
        btrfs.delete_subvolume(retained)
        (tree / "upper" / "f").write_bytes(b"as it is!")
        btrfs.snapshot(tree, retained, readonly=True)
        assert any("upper/f" in item for item in contents(rows, state, held))
        btrfs.delete_subvolume(retained)
        assert contents(rows, state, held) == ["file snapshot c-1 is missing"]
    finally:
        pool.close()
