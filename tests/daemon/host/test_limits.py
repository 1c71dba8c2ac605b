"""The limits that the daemon itself runs under."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from tests.support.daemon_host import IMAGE, Daemon, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


async def test_a_shell_with_few_descriptors_does_not_limit_the_sandboxes(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    daemon = Daemon(tmp_path / "host")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        try:
            daemon.start()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert daemon.process is not None
        assert resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
        async with daemon.client() as host, host.create(IMAGE) as sandbox:
            assert (await sandbox.exec("ulimit -Sn; ulimit -Hn")).text == "4096\n4096\n"  # of Limits.open_files
    finally:
        daemon.clean()
