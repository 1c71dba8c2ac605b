"""How much of its conversation a sandbox may have written down."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daemon.gateway import conversation
from daemon.gateway.conversation import Ledger, LiveConversation
from daemon.gateway.journal import JournalCursor
from daemon.gateway.replay import ReplayExchange
from sandbox.errors import NoSpace
from sandbox.messages import Gateway


def line(ledger: Ledger, directory: Path) -> LiveConversation:
    live: Any = SimpleNamespace(row=SimpleNamespace(id="s-1"))
    journal, host = SimpleNamespace(path=directory / "gateway.sqlite"), SimpleNamespace(live_sandboxes={"s-1": live})
    handler: Any = SimpleNamespace(ledger=ledger, journal=journal, host=host)
    return LiveConversation("s-1", Gateway(upstream="model"), JournalCursor(tree=""), handler)


def test_exchanges_are_counted_for_each_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "MAX_EXCHANGES", 2)
    ledger = Ledger()
    mine = line(ledger, tmp_path)
    for number, (sandbox, main) in enumerate([("s-1", True), ("s-2", True), ("s-2", False), ("s-1", False)]):
        mine.need_space()
        ledger.add(sandbox, ReplayExchange(number, b"key"), main=main)
    with pytest.raises(NoSpace, match="called its model 2 times"):
        mine.need_space()
    ledger.drop({0, 3})
    mine.need_space()
    assert dict(ledger.count) == {"s-2": 2}


def test_the_hosts_disk_is_left_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daemon.checkpoints.capture.SPACE_RETAINED", 1 << 62)
    with pytest.raises(NoSpace, match="MiB more are needed"):
        line(Ledger(), tmp_path).need_space()
