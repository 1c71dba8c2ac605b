"""A whole run whose ranks are on hosts of their own: agents on the loopback, killed one after another."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from daemon.auth.tls import self_signed
from rollout.store.samples import SampleStore
from rollout.weights.export import export
from rollout.weights.store import VersionStore
from tests.support.daemon_host import Daemon, free_port
from tests.support.programs import Program
from tests.support.small_run import EXAMPLE, rows, small
from trainer.config import open_run
from trainer.distributed.head import TLS, TOKEN
from trainer.distributed.host_fleet import read_address
from trainer.settings import HostSettings

LOOPBACK = "127.0.0.1"
SECRET = "a token"
LONG = 500.0  # seconds, beside other tests
CONSUMED = "select count(*) from prompts where state='consumed'"


def until(condition: Callable[[], bool], process: Program, log: Path) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.02)


@contextmanager
def agent(port: int, directory: Path, certificate: Path) -> Iterator[Program]:
    argv = [sys.executable, "-m", "trainer.distributed.agent", "--head", f"https://{LOOPBACK}:{port}"]
    argv += ["--directory", str(directory), "--name", directory.name]
    program = Program(argv, env={**os.environ, TOKEN: SECRET, TLS: str(certificate)})
    try:
        yield program
    finally:
        program.destroy()


def test_a_run_goes_on_with_the_hosts_that_are_left(
    daemon: Daemon, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two agents one takes part; it is killed, then the other one. Each prompt counts once, no version is lost."""
    monkeypatch.setenv(TOKEN, SECRET)
    port, certificate = free_port(), tmp_path / "tls"
    self_signed(certificate, "localhost")
    hosts = HostSettings(count=2, agents=("b", "a"), address=LOOPBACK, port=port, tls=str(certificate), wait=20.0)
    directory, _ = open_run(small(tmp_path / "runs", steps=3, held_out=1, faults=0, ranks=2, hosts=hosts))
    with (
        agent(port, tmp_path / "a", certificate) as first,
        agent(port, tmp_path / "b", certificate) as second,
    ):
        until(lambda: (tmp_path / "a").exists() and (tmp_path / "b").exists(), first, Path(os.devnull))
        process = Program([sys.executable, "-m", "coordinator.local", str(directory)], cwd=EXAMPLE.parent.parent)
        try:
            log = directory / "rollout.log"
            until(lambda: rows(directory, "samples.sqlite", CONSUMED) >= 2, process, log)
            second.destroy()
            until(lambda: rows(directory, "samples.sqlite", CONSUMED) >= 4, process, log)
            first.destroy()
            assert process.wait(LONG) == 0, log.read_text()[-2000:]
        finally:
            process.end()
    said = capfd.readouterr().out
    lines = ["b and this one", "host b gave no sign", "a and this one", "host a gave no sign", "this one alone"]
    places = [said.find(line) for line in lines]
    assert -1 not in places and places == sorted(places), said[-4000:]
    existing = read_address(directory / "roles")
    assert existing is not None and (existing.url, existing.token) == (f"https://{LOOPBACK}:{port}", SECRET)
    assert (directory / "roles" / "hosts.json").stat().st_mode & 0o077 == 0
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["policy_version"], summary["trajectories_lost"]) == (3, 0)
    store = SampleStore(directory / "rollout")
    assert (store.account().consumed, store.account().given_up) == (6, 0)
    store.close()
    versions = VersionStore(directory / "weights")
    for ref in versions.versions():
        assert all(versions.has(name) for name in versions.manifest(ref).refs())
    assert export(directory, tmp_path / "model") == 3
