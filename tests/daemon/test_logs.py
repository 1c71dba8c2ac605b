"""The daemon's log at a terminal and elsewhere, and what it says when it ends."""

from __future__ import annotations

import contextvars
import json
import logging
import os
import pty
import signal
import subprocess
import sys

import pytest

from daemon.app import farewell
from daemon.auth.access import CALLER, Caller
from daemon.logs import (
    LINES_PER_S,
    MAX_EXISTING,
    MAX_LINES,
    MAX_SHARE,
    MAX_TEXT,
    JsonLines,
    LogRateLimit,
    PlainFormatter,
)
from tests.support.daemon_host import Daemon


def test_a_line_for_a_person() -> None:
    record = logging.LogRecord("pagurus.host", logging.WARNING, "", 0, "died: \x1b[2J%s", ("why",), None)
    record.sandbox = "s-1"
    said = PlainFormatter().format(record)
    assert said.endswith("  warning: died: \N{REPLACEMENT CHARACTER}[2Jwhy  (sandbox s-1)") and said.isprintable()


def _record(sandbox: str = "s-1", line: int = 1, level: int = logging.WARNING) -> logging.LogRecord:
    record = logging.LogRecord("pagurus.gateway", level, "", line, "refused: %s", ("x" * 20_000,), None)
    if sandbox:
        record.sandbox = sandbox
    return record


def test_a_sandbox_cannot_flood_the_log() -> None:
    now = [0.0]
    limit = LogRateLimit(lambda: now[0])
    assert sum(limit.filter(_record()) for _ in range(1000)) == MAX_LINES
    assert limit.filter(_record("s-2")) and limit.filter(_record("")), "others' lines are written"
    assert limit.filter(_record(level=logging.DEBUG))
    now[0] += 1 / LINES_PER_S
    again = _record()
    assert limit.filter(again) and not limit.filter(_record())
    assert json.loads(JsonLines().format(again))["left_out"] == 1000 - MAX_LINES
    assert f"{1000 - MAX_LINES} lines like this left out" in PlainFormatter().format(again)
    assert len(JsonLines().format(again)) < MAX_TEXT + 200


def test_nor_by_lines_of_many_places() -> None:
    limit = LogRateLimit(lambda: 0.0)
    assert sum(limit.filter(_record(line=number)) for number in range(5000)) == MAX_SHARE
    assert limit.filter(_record("s-2"))


def test_an_owner_has_one_share_for_all_its_sandboxes() -> None:
    limit = LogRateLimit(lambda: 0.0)

    def within() -> int:
        CALLER.set(Caller(token="t", owner="o", scope="exec", everything=False))
        return sum(limit.filter(_record(f"s-{number}")) for number in range(5000))

    assert contextvars.copy_context().run(within) == MAX_SHARE
    assert len(limit._existing) <= MAX_EXISTING


@pytest.mark.parametrize("terminal", [True, False])
def test_json_is_for_programs(terminal: bool) -> None:
    program = "from daemon import logs; import logging; logs.to_stderr('info'); logging.getLogger('x').info('hello')"
    ours, theirs = pty.openpty() if terminal else os.pipe()
    subprocess.run([sys.executable, "-c", program], stderr=theirs, check=True)
    said = os.read(ours, 4096).decode()
    os.close(ours)
    os.close(theirs)
    assert said.rstrip().endswith("  hello") if terminal else json.loads(said)["message"] == "hello"


@pytest.mark.parametrize(("living", "said"), [(0, "no sandbox is left"), (1, "1 sandbox lives on"), (7, "7 sandboxes")])
def test_what_becomes_of_the_sandboxes(living: int, said: str) -> None:
    assert said in farewell(living)


async def test_ctrl_c_leaves_them_alive_and_says_so(own: Daemon) -> None:
    async with own.client() as host:
        sandbox = await host.create("debian", name="web")
    assert own.process is not None
    own.process.send_signal(signal.SIGINT)
    assert own.process.wait(240) == 0
    own.process = None
    messages = [json.loads(line)["message"] for line in own.log.read_text().splitlines() if line.startswith("{")]
    assert messages[-1].startswith("stopped; 1 sandbox lives on") and "pagurus rm --all" in messages[-1]
    own.start("--pool-size", "3GiB")
    async with own.client() as host:
        assert (await (await host.get("web")).exec("echo alive")).text == "alive\n"
        assert sandbox.id == (await host.get("web")).id
    assert (own.state / "pool.btrfs").stat().st_size >= 3 << 30
    assert os.statvfs(own.state / "pool").f_blocks * os.statvfs(own.state / "pool").f_frsize >= 3 << 30
