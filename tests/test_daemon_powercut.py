"""The power goes in the middle of a write: what the daemon called durable is there, and the catalogue is old or new."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from daemon_host import image_tree, missing

from bench._blockdev import _RECORD, FLUSH, SECTOR, WRITE, Disk, available, cuts, events

CHECKOUT = Path(__file__).resolve().parent.parent


def written(log: Path, records: list[tuple[int, int, bytes]]) -> None:
    log.write_bytes(b"".join(_RECORD.pack(kind, offset, len(data)) + data for kind, offset, data in records))


@pytest.mark.parametrize("seed", range(5))
def test_a_cut_keeps_what_was_flushed_and_any_part_of_the_rest(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    records, number = [], 0
    for _ in range(60):
        if chance.random() < 0.25:
            records.append((FLUSH, 0, b""))
        else:
            number += 1
            data = bytes([number]) * SECTOR * chance.randrange(1, 4)
            records.append((WRITE, chance.randrange(16) * SECTOR, data))
    log, image = tmp_path / "log", tmp_path / "image"
    written(log, records)
    image.write_bytes(bytes(20 * SECTOR))
    assert [(e.kind, e.offset, e.length) for e in events(log)] == [(k, o, len(d)) for k, o, d in records]
    disk, flushed, pending = Disk(image, log), bytearray(20 * SECTOR), []
    for (kind, offset, data), cut in zip(records, cuts(log, chance), strict=True):
        if kind == FLUSH:
            for where, what in pending:
                flushed[where : where + len(what)] = what
            pending = []
        else:
            pending.append((offset, data))
        disk.make(cut, tmp_path / "cut")
        found = (tmp_path / "cut").read_bytes()
        for sector in range(20):
            here = slice(sector * SECTOR, (sector + 1) * SECTOR)
            legal = {bytes(flushed[here])}
            for where, what in pending:
                if where <= sector * SECTOR < where + len(what):
                    legal.add(what[sector * SECTOR - where :][:SECTOR])
            assert found[here] in legal
    disk.close()


@pytest.mark.skipif(bool(missing() or available()), reason=missing() or available())
def test_a_daemon_that_loses_its_power_keeps_what_it_called_durable() -> None:
    """A few of the cuts that `pagurus bench powercut` makes: every one of them is the bench's business."""
    if image_tree().name != "debian" or not image_tree().exists():
        pytest.skip("the bench runs on the image debian")
    program = [sys.executable, "-m", "bench.powercut", "--json", "--cuts", "6", "--turns", "4", "--daemons", "1"]
    done = subprocess.run(program, capture_output=True, text=True, cwd=CHECKOUT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["old_or_new"] == result["whole"] == result["cuts"] == 6
    assert result["answers"] >= 5
    assert result["flushes"] > 50
