"""What a daemon keeps is its own, and what a sandbox puts in its way holds it up nowhere."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
from pathlib import Path

from tests.hostile.daemon import EXCHANGE
from tests.support.daemon_host import IMAGE, Daemon

NOBODY = 65_534


def open_to_others(top: Path) -> list[str]:
    """What somebody else could read or write below a directory, by looking. Sockets ask who comes."""
    code = (
        "import os, sys\n"
        "for folder, folders, files in os.walk(sys.argv[1], onerror=lambda e: None):\n"
        "    for name in files:\n"
        "        path = os.path.join(folder, name)\n"
        "        if os.access(path, os.R_OK) or os.access(path, os.W_OK): print(path)\n"
    )
    done = subprocess.run(
        ["python3", "-c", code, str(top)], user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, check=True
    )
    return done.stdout.decode().split()


async def test_state_and_run_directory_are_the_daemons_alone(own: Daemon) -> None:
    own.stop()
    for path in (own.state, own.state / "pool.btrfs", own.state / "catalogue.sqlite", own.state / "pages"):
        path.chmod(path.stat().st_mode | 0o055)
    for directory in (own.root, *own.root.parents):
        if directory.stat().st_uid == os.geteuid() and not directory.stat().st_mode & 0o001:
            directory.chmod(directory.stat().st_mode | 0o011)  # nothing above hides it
    own.start()
    assert stat.S_IMODE(own.state.stat().st_mode) == 0o700
    assert stat.S_IMODE((own.state / "pool.btrfs").stat().st_mode) == 0o600
    for name in ("catalogue.sqlite", "gateway.sqlite"):
        for path in own.state.glob(f"{name}*"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    async with own.client() as host:
        sandbox = await host.create(IMAGE)
        await sandbox.checkpoint()
        assert open_to_others(own.run) == []
        assert open_to_others(own.state) == []
        assert {stat.S_IMODE(path.stat().st_mode) for path in (own.run / "sandboxes").iterdir()} <= {0o711}
        await sandbox.remove()


async def test_a_daemon_ends_while_a_sandbox_puts_fifos_in_the_way_of_comparisons(own: Daemon) -> None:
    async with own.client() as host:
        sandbox = await host.create(IMAGE)
        write = "for n in range(200): open(f'/race/a{n}', 'w').write('%s')"
        await sandbox.exec(["python3", "-c", "import os; os.mkdir('/race')\n" + write % "x"])
        before = await sandbox.checkpoint()
        fifos = "for n in range(200): os.mkfifo(f'/race/b{n}')"
        await sandbox.exec(["python3", "-c", f"import os\n{write % 'y'}\n{fifos}"])
        await sandbox.files.write("/race.py", EXCHANGE)
        racer = await sandbox.processes.start(["python3", "/race.py", "/race/a", "/race/b", "200"])
        async for _ in racer.stream():
            break
        for result in await asyncio.gather(*(sandbox.diff(before) for _ in range(8))):
            assert {change.path for change in result} <= {f"/race/{side}{n}" for side in "ab" for n in range(200)} | {
                "/race.py"
            }
    assert own.stop() == 0
