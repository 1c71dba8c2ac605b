"""Whether a checkpoint can be restored is tried beside the sandbox, and nothing of the trial runs or is left."""

from __future__ import annotations

import pytest

from daemon.catalogue import CheckpointRow
from daemon.host.prove import untried
from sandbox import Client, Sandbox
from sandbox.criu.carried import settings
from sandbox.messages import CheckpointState, Verdict
from tests.support.daemon_host import Daemon

REAL_TIME = 1 << 13  # a class of input and output that a program in a sandbox cannot have: it is not restored
TELLING = "(while sleep 0.02; do echo run >> /ran; done) >/dev/null 2>&1 &"


async def test_a_checkpoint_is_proved_and_nothing_of_it_runs(sb: Sandbox, host: Client) -> None:
    await sb.exec(TELLING)
    saved = await sb.checkpoint(wait="durable")
    assert saved.proved_at is None
    before = {info.id for info in await host.sandboxes()}
    (report,) = await host.store.verify(saved, restore=True)
    assert (report.damage, report.notes) == ([], ["restored and compared"])
    (row,) = [row for row in await sb.tree() if row.id == saved.id]
    assert row.proved_at is not None and row.refuted is None
    assert {info.id for info in await host.sandboxes()} == before
    assert (await sb.exec("tail -n 1 /ran")).text == "run\n"


async def test_a_checkpoint_that_cannot_come_back_is_refuted(sb: Sandbox, host: Client, daemon: Daemon) -> None:
    await sb.exec("sleep 1000 >/dev/null 2>&1 &")
    saved = await sb.checkpoint(wait="durable")  # its images stay where they are now
    changed = settings.KernelSettings(tasks=[settings.TaskSettings(thread=1, io_priority=REAL_TIME)])
    for directory in [path.parent for path in daemon.run.rglob("pstree.img")]:
        (directory / settings.FILE).unlink(missing_ok=True)
        settings.write(directory, changed)
    (report,) = await host.store.verify(saved, restore=True)
    assert "io_priority" in report.damage[0]
    (row,) = [row for row in await sb.tree() if row.id == saved.id]
    assert row.proved_at is None and "io_priority" in (row.refuted or "")
    assert (await sb.exec("pgrep -c sleep")).text == "1\n"


def _row(number: int, sandbox: str, **settings: object) -> CheckpointRow:
    existing = {"state": CheckpointState.DURABLE, "verdict": Verdict.PROCESSES, "dump": str(number), **settings}
    return CheckpointRow(id=str(number), sandbox=sandbox, number=number, **existing)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "target"),
    [
        ([], None),
        ([_row(1, "a"), _row(2, "a")], "2"),
        ([_row(1, "a"), _row(2, "b"), _row(3, "b", proved_at=1.0)], "1"),
        ([_row(1, "a", refuted="no"), _row(2, "a", damaged=True), _row(3, "a", dump="1")], None),
        ([_row(1, "a", state=CheckpointState.CAPTURED), _row(2, "a", dump=None)], None),
    ],
)
def test_what_is_tried_next(rows: list[CheckpointRow], target: str | None) -> None:
    result = untried(rows)
    assert (result and result.id) == target
