"""Every prompt is accounted for exactly once, also across a kill."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.ledger import Ledger
from sandbox.errors import Conflict


def total(ledger: Ledger) -> int:
    return sum(ledger.counts().values())


def test_the_life_of_a_prompt(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite")
    assert [prompt.id for prompt in ledger.issue([7, 8, 9])] == ["p000000", "p000001", "p000002"]
    first, second = ledger.take(), ledger.take()
    assert first is not None and second is not None and (first.seed, second.seed) == (7, 8)
    ledger.claim([first.id], 0)
    ledger.consume([first.id])
    ledger.give_up(second.id, "timeout")
    assert ledger.counts() == {"queued": 1, "in_flight": 0, "claimed": 0, "consumed": 1, "given_up": 1}
    assert ledger.reasons() == {"timeout": 1} and ledger.issued() == 3
    ledger.close()


@pytest.mark.parametrize("move", ["requeue", "give_up", "claim", "consume"])
def test_illegal_moves_name_the_state(tmp_path: Path, move: str) -> None:
    ledger = Ledger(tmp_path / "l.sqlite")
    (prompt,) = ledger.issue([1])
    ledger.take()
    ledger.claim([prompt.id], 0)
    ledger.consume([prompt.id])
    act = {
        "requeue": lambda: ledger.requeue(prompt.id, "x"),
        "give_up": lambda: ledger.give_up(prompt.id, "x"),
        "claim": lambda: ledger.claim([prompt.id], 1),
        "consume": lambda: ledger.consume([prompt.id]),
    }[move]
    with pytest.raises(Conflict, match="is consumed"):
        act()
    ledger.close()


def test_a_batch_is_claimed_whole_or_not_at_all(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite")
    one, two = ledger.issue([1, 2])
    ledger.take()
    with pytest.raises(Conflict):
        ledger.claim([one.id, two.id], 0)
    assert ledger.counts()["in_flight"] == 1
    ledger.close()


@given(saved=st.integers(0, 3), consumed=st.integers(0, 3))
@settings(deadline=None, max_examples=20)
def test_recovery_agrees_with_what_the_trainer_saved(tmp_path_factory, saved: int, consumed: int) -> None:
    """Three steps were claimed, `consumed` of them booked, the trainer's state on disk holds `saved`."""
    ledger = Ledger(tmp_path_factory.mktemp("ledger") / "l.sqlite")
    ledger.issue(range(5))
    for step in range(3):
        prompt = ledger.take()
        assert prompt is not None
        ledger.claim([prompt.id], step)
        if step < consumed:
            ledger.consume([prompt.id])
    ledger.take()
    ledger.recover(saved)
    counts = ledger.counts()
    assert (counts["consumed"], counts["queued"]) == (saved, 5 - saved) and total(ledger) == 5
    ledger.close()


def test_a_killed_process_loses_no_prompt(tmp_path: Path) -> None:
    """SIGKILL in the middle of a stream of moves; the next start finds every prompt in one state."""
    path = tmp_path / "l.sqlite"
    code = (
        "import os, signal, sys\nfrom rollout.ledger import Ledger\n"
        f"ledger = Ledger({str(path)!r})\nledger.issue(range(20))\n"
        "for n in range(7):\n    p = ledger.take()\n    ledger.claim([p.id], n)\n"
        "    ledger.consume([p.id]) if n < 4 else 0\n"
        "ledger.take()\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).resolve().parents[2], check=False)
    assert done.returncode == -9
    ledger = Ledger(path)
    assert ledger.recover(5) == 3  # claimed for steps 5 and 6, and the one in flight
    assert ledger.counts() == {"queued": 15, "in_flight": 0, "claimed": 0, "consumed": 5, "given_up": 0}
    ledger.close()
