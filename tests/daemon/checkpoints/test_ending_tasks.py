"""Checkpoints while programs and threads start and end all the time."""

from __future__ import annotations

import asyncio

import pytest

from sandbox.criu import dump
from sandbox.criu.gate.hints import hint_for

#: Children with threads that all end at once: CRIU meets a first thread that has ended before the others.
CHURN = """python3 -c '
import _thread, os, time
while True:
    child = os.fork()
    if not child:
        for _ in range(6):
            _thread.start_new_thread(time.sleep, (9,))
        os._exit(0)
    os.waitpid(child, 0)
'"""


async def test_tasks_that_end_refuse_no_checkpoint(sb) -> None:
    for _ in range(3):
        await sb.processes.start(CHURN, ends_turn=False)
    await sb.processes.start("while :; do /bin/true; /bin/true & wait; done", ends_turn=False)
    for _ in range(12):
        await sb.checkpoint()
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("(criu/seize.c:882): Zombies with threads are not supported", dump.TasksEnded),
        ("(criu/proc_parse.c:99): Can't open 4711: No such file or directory", dump.TasksEnded),
        ("Can't open 4711/task/4711/children on procfs: No such file or directory", dump.TasksEnded),
        ("(criu/sk-inet.c:185): inet: In-flight connection (l) for 2bd9ea", dump.UnacceptedConnection),
        ("(soccr/soccr.c:371): \trecv failed (113, want 2): Invalid argument", dump.PartlyAcknowledged),
        ("Can't open 12/map_files on procfs: Permission denied", None),
        ("Can't open /dev/null: No such file or directory", None),
        ("(criu/fsnotify.c:1): Can't dump that handle", dump.UnknownWatch),
    ],
)
def test_the_kinds_of_failed_dumps(words: str, kind: type[Exception] | None) -> None:
    assert dump.kind_of(words) is (kind or dump.CheckpointFailed)


def test_what_lasts_is_named() -> None:
    assert "first thread" in hint_for("Zombies with threads are not supported")
