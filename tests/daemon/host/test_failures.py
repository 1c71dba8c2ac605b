"""What goes wrong is said, costs nothing that was there before, and is made up for by the next turn."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

import aiohttp
import pytest

from sandbox import CheckpointFailed, Client, Limits, NoSpace, SandboxDead, Verdict
from sandbox.messages import CheckpointState, SandboxState
from sandbox.tree.pool import BtrfsPool
from tests.support.daemon_host import ASLEEP, IMAGE, Daemon, missing, tasks_of, until

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

# A process that CRIU refuses to dump: it holds a pipe that keeps packets apart.
STRANGE = """
import os, time
ends = os.pipe2(os.O_DIRECT)
open("/strange", "w").close()
while not os.path.exists("/enough"):
    time.sleep(0.01)
for end in ends:
    os.close(end)
os.unlink("/strange")
"""


@pytest.fixture
def small(tmp_path_factory: pytest.TempPathFactory):
    """A daemon whose pool holds half a GiB."""
    daemon = Daemon(tmp_path_factory.mktemp("host"))
    try:
        BtrfsPool(daemon.state, size=512 << 20).ensure()
        yield daemon.start()
    finally:
        daemon.clean()


async def test_a_full_disk_is_said_and_costs_nothing(small: Daemon) -> None:
    async with small.client() as host, host.create(IMAGE, limits=Limits(disk=None)) as sandbox:
        before = await sandbox.durable(await sandbox.exec("echo kept > /kept"))
        limit = BtrfsPool(small.state).usage().free - (32 << 20)  # less is left than a checkpoint may leave
        flood = await sandbox.exec(f"head -c {limit} /dev/zero > /flood && sync")
        assert (flood.exit_code, flood.verdict) == (0, Verdict.FILES)
        with pytest.raises(CheckpointFailed, match=r"MiB more are needed"):
            await sandbox.captured(flood)
        with pytest.raises(NoSpace, match=r"MiB more are needed"):
            await host.create(IMAGE)

        # The sandbox goes on, the next answer says what happened, the older checkpoint is whole. With the
        # flood gone again, nothing is left that would have to be captured.
        relief = await sandbox.exec("rm /flood; cat /kept")
        assert relief.text == "kept\n"
        assert "MiB more are needed" in (relief.checkpoint_error or "")
        assert (relief.verdict, relief.checkpoint) == (Verdict.NONE, before.id)
        assert (await host.checkpoint(before)).state is CheckpointState.DURABLE
        await sandbox.restore(before)
        assert await sandbox.files.read("/kept") == b"kept\n"


async def test_a_failed_dump_names_the_reason_and_stays_owed(host: Client) -> None:
    async with host.create(IMAGE) as sandbox:
        await sandbox.files.write("/strange.py", STRANGE)
        strange = await sandbox.exec(
            "setsid python3 /strange.py >/dev/null 2>&1 & until [ -e /strange ]; do sleep 0.01; done"
        )
        assert strange.verdict.processes
        with pytest.raises(CheckpointFailed, match="packetized"):
            await sandbox.captured(strange)
        (failed,) = [info for info in await sandbox.tree() if info.state is CheckpointState.FAILED]
        assert (failed.id, failed.turn) == (strange.checkpoint, 1)

        later = await sandbox.exec("touch /enough; while [ -e /strange ]; do sleep 0.01; done")
        assert "packetized" in (later.checkpoint_error or "")
        assert later.verdict is Verdict.BOTH  # what the failed one did not capture is owed
        assert (await sandbox.captured(later)).state in (CheckpointState.CAPTURED, CheckpointState.DURABLE)
        assert (await sandbox.exec("true")).checkpoint_error is None
        assert (await host.statistics()).checkpoints_failed >= 1


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/v1/sandboxes", b"{", 400, "invalid"),
        ("POST", "/v1/sandboxes", b'{"image": 3}', 400, "invalid"),
        ("POST", "/v1/sandboxes", b'{"image": "../../etc"}', 404, "image_not_found"),
        ("POST", "/v1/sandboxes", b'{"image": "debian", "what": 1}', 400, "invalid"),
        ("POST", "/v1/sandboxes", b'{"image": "debian", "workdir": "tmp"}', 400, "invalid"),
        ("POST", "/v1/sandboxes", rb'{"image": "debian", "workdir": "/\u0000"}', 400, "invalid"),
        ("POST", "/v1/sandboxes", rb'{"image": "debian", "env": {"A": "\u0000"}}', 400, "invalid"),
        ("POST", "/v1/sandboxes", b'{"image": "debian", "env": {"A=B": ""}}', 400, "invalid"),
        ("POST", "/v1/sandboxes", b'{"image": "debian", "user": "\\u0000"}', 400, "invalid"),
        ("POST", "/v1/sandboxes", b'{"image": "debian", "limits": {"memory": "much"}}', 400, "invalid"),
        ("GET", "/v1/sandboxes/s-none", b"", 404, "not_found"),
        ("POST", "/v1/sandboxes/s-none/exec", b'{"command": "true"}', 404, "not_found"),
        ("GET", "/v1/checkpoints/c-none", b"", 404, "not_found"),
        ("GET", "/v1/checkpoints/c-none?wait=ever", b"", 400, "invalid"),
        ("POST", "/v1/checkpoints/c-none/fork", b'{"count": 1}', 404, "not_found"),
        ("GET", "/v1/nothing", b"", 404, "invalid"),
        ("PATCH", "/v1/sandboxes", b"", 405, "invalid"),
    ],
)
async def test_a_bad_request_gets_an_error_of_the_table(
    daemon: Daemon, method: str, path: str, body: bytes, status: int, code: str
) -> None:
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(daemon.socket))) as session,
        session.request(method, f"http://daemon{path}", data=body) as response,
    ):
        result = json.loads(await response.read())
    assert (response.status, result["code"]) == (status, code)
    assert result["message"]


async def test_everything_is_there_for_curl(daemon: Daemon, host: Client) -> None:
    async with host.create(IMAGE) as sandbox:
        url = f"http://daemon/v1/sandboxes/{sandbox.id}/exec"
        answer = subprocess.run(  # noqa: ASYNC221
            ["curl", "-s", "--unix-socket", daemon.socket, "--json", '{"command": "echo hi; exit 3"}', url],
            capture_output=True,
            check=True,
        )
        result = json.loads(answer.stdout)
        assert (result["exit_code"], result["stdout"], result["verdict"]) == (3, "aGkK", "none")


async def test_memory_and_processes_are_limited_and_said(host: Client) -> None:
    async with host.create(IMAGE, limits=Limits(memory="64MiB", processes=32)) as sandbox:
        hungry = await sandbox.exec(["python3", "-c", "x = b'x' * 500_000_000"])
        assert (hungry.exit_code, hungry.oom_killed) == (137, True)
        bomb = await sandbox.exec("for i in $(seq 100); do sleep 1000 & done; echo on", timeout=240)
        assert b"fork" in bomb.stderr
        await sandbox.restore((await sandbox.tree())[0])
        assert (await sandbox.exec("echo fine")).text == "fine\n"


async def test_a_sandbox_whose_shim_died_is_dead_and_comes_back(own: Daemon) -> None:
    async with own.client() as host, host.create(IMAGE) as sandbox:
        await sandbox.exec(f"setsid sleep 1000000 > /dev/null 2>&1 & echo kept > /kept; {ASLEEP}")
        before = await sandbox.checkpoint(wait="durable")
        for verify in (False, True):
            assert tasks_of(sandbox.id)
            os.kill(shim_of(own, sandbox.id), signal.SIGKILL)
            await until(lambda: dead(host, sandbox.id), "dead")
            with pytest.raises(SandboxDead):
                await sandbox.exec("true")
            await sandbox.restore(before, verify=verify)
            result = await sandbox.exec("cat /kept; pgrep -c sleep")
            assert result.stdout == b"kept\n1\n"


async def test_a_restore_right_after_the_death_of_the_shim_succeeds(own: Daemon) -> None:
    """Whoever comes before the daemon has noticed anything."""
    async with own.client() as host, host.create(IMAGE) as sandbox:
        await sandbox.durable(
            await sandbox.exec(f"echo kept > /kept; setsid sleep 1000000 > /dev/null 2>&1 & {ASLEEP}")
        )
        for _ in range(3):
            os.kill(shim_of(own, sandbox.id), signal.SIGKILL)
            await sandbox.restore()
            assert (await sandbox.exec("cat /kept; pgrep -c sleep")).stdout == b"kept\n1\n"


async def dead(host: Client, sandbox: str) -> bool:
    return (await host.get(sandbox)).info.state is SandboxState.DEAD and not tasks_of(sandbox)


def shim_of(daemon: Daemon, sandbox: str) -> int:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if os.readlink(entry / "fd/1") == str(daemon.run / "sandboxes" / sandbox / "shim.log"):
                    return int(entry.name)
    raise AssertionError("it has no shim")
