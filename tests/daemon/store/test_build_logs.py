"""What builds say is kept: while they run, when they are over, and across a daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemon.store import build_logs
from daemon.store.build_logs import BuildLogs
from sandbox import Client
from sandbox.errors import Invalid, NotFound
from sandbox.messages.images import BuildInfo, BuildLines, BuildReport
from tests.support.daemon_host import Daemon

DOCKERFILE = "FROM debian\nRUN echo from-the-step; echo more\n"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def logs(tmp_path: Path, clock: Clock) -> BuildLogs:
    return BuildLogs(tmp_path / "builds", clock)


def test_a_build_is_reported_and_over(logs: BuildLogs, clock: Clock) -> None:
    build = logs.begin("mine").id
    logs.report(build, BuildReport(lines=["one", "two"]))
    part = logs.lines(build, 1)
    assert (part.lines, part.next, part.build.state) == (["two"], 2, "running")
    clock.now += 5
    logs.report(build, BuildReport(lines=["three"], state="failed", error="line 2: no"))
    (info,) = logs.all()
    assert (info.state, info.error, info.lines, info.ended_at) == ("failed", "line 2: no", 3, 1005.0)
    assert logs.lines(build, 3).lines == [] and logs.lines(build, 99).next == 3


def test_the_next_daemon_knows_them(logs: BuildLogs, tmp_path: Path, clock: Clock) -> None:
    first, second = logs.begin("first").id, logs.begin("second").id
    logs.report(first, BuildReport(lines=["x"], state="done"))
    with (tmp_path / "builds" / f"{second}.jsonl").open("ab") as file:
        file.write(b'{"lines": ["half')
    (tmp_path / "builds" / "b-0000000000.jsonl").write_bytes(b"nothing of ours\n")
    again = BuildLogs(tmp_path / "builds", clock)
    assert {info.id: info.state for info in again.all()} == {first: "done", second: "running"}
    assert again.lines(first, 0).lines == ["x"]


def test_a_client_that_went_away_leaves_a_lost_build(logs: BuildLogs, clock: Clock) -> None:
    build = logs.begin("mine").id
    clock.now += build_logs.SILENT - 1
    logs.report(build, BuildReport())
    clock.now += build_logs.SILENT - 1
    assert logs.all()[0].state == "running"
    clock.now += 2
    assert logs.all()[0].state == "lost"
    assert logs.report(build, BuildReport(lines=["back"])).state == "running"


def test_logs_are_bounded(logs: BuildLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_logs, "MAX_LOG", 10_000)
    monkeypatch.setattr(build_logs, "MAX_BUILDS", 3)
    build = logs.begin("loud").id
    for _ in range(50):
        logs.report(build, BuildReport(lines=["x" * 1000]))
    assert (tmp_path / "builds" / f"{build}.jsonl").stat().st_size < 12_000 and logs.all()[0].cut
    others = [logs.begin(f"other{number}").id for number in range(3)]
    assert [info.id for info in logs.all()] == others[::-1]
    with pytest.raises(NotFound):
        logs.report(build, BuildReport())
    assert len(list((tmp_path / "builds").iterdir())) == 3


async def test_a_real_build_has_its_log(host: Client, daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    said: list[str] = []
    await host.images.build("logged", tmp_path, output=said.append)
    build = (await host.call("GET", "/v1/builds", list[BuildInfo]))[0]
    assert (build.name, build.state) == ("logged", "done")
    log = await host.call("GET", f"/v1/builds/{build.id}/log", BuildLines)
    assert log.lines == said and any("from-the-step" in line for line in said)
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN exit 3\n")
    with pytest.raises(Invalid):
        await host.images.build("broken", tmp_path)
    build = (await host.call("GET", "/v1/builds", list[BuildInfo]))[0]
    assert (build.name, build.state) == ("broken", "failed") and "line 2" in build.error
    await host.images.remove("logged")
