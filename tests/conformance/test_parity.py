"""The same command in a sandbox and in Docker's default container: outputs and exit codes are the same.

Needs Debian's docker.io (dockerd is started here, without a network) and an image tree with the programs, which
PAGURUS_PARITY_TREE names: `make test-parity` makes both.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.messages import Limits
from tests.conformance.parity_programs import DIFFERENCES, PROGRAMS
from tests.support.container_support import Maker
from tests.support.programs import Program

pytestmark = pytest.mark.long
TREE = os.environ.get("PAGURUS_PARITY_TREE", "")
NAME = "parity"


class Docker:
    """A dockerd of our own below `root`, without a network."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.socket = f"unix://{root}/docker.sock"
        places = [
            f"--data-root={root}/data",
            f"--exec-root={root}/exec",
            f"--pidfile={root}/pid",
            f"--host={self.socket}",
        ]
        bare = ["--bridge=none", "--iptables=false", "--ip6tables=false", "--storage-driver=overlay2"]
        with (root / "dockerd.log").open("wb") as log:
            self.process = Program(["/usr/sbin/dockerd", *places, *bare], stdout=log, stderr=log)
        deadline = time.monotonic() + 120
        while self.run("info").returncode:
            assert self.process.poll() is None and time.monotonic() < deadline, (root / "dockerd.log").read_text()[
                -2000:
            ]
            time.sleep(0.1)

    def run(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        command = ["/usr/bin/docker", "-H", self.socket, *words]
        return subprocess.run(command, capture_output=True, check=False, timeout=300)

    def bring(self, tree: str) -> None:
        with Program(["tar", "-C", tree, "-c", "."], stdout=subprocess.PIPE) as tar:
            command = ["/usr/bin/docker", "-H", self.socket, "import", "-", NAME]
            subprocess.run(command, stdin=tar.stdout, check=True, stdout=subprocess.DEVNULL)

    def close(self) -> None:
        self.process.end()
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            if line.split()[1].startswith(str(self.root)):
                subprocess.run(["umount", "-l", line.split()[1]], check=False)
        shutil.rmtree(self.root, ignore_errors=True)


@pytest.fixture(scope="module")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Docker]:
    if not TREE or not Path("/usr/sbin/dockerd").exists():
        pytest.skip("needs Debian's docker.io and a tree: run `make test-parity`")
    made = Docker(tmp_path_factory.mktemp("docker"))
    try:
        made.bring(TREE)
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("name", PROGRAMS, ids=lambda name: name.replace(" ", "-"))
async def test_runs_as_in_docker(docker: Docker, maker: Maker, name: str) -> None:
    line = PROGRAMS[name]
    sandbox = await maker.create(image=Path(TREE), limits=Limits(memory="2GiB"))
    done = await sandbox.exec(["/bin/sh", "-c", line], timeout=240)
    target = docker.run("run", "--rm", "--network", "none", "--memory", "2g", NAME, "/bin/sh", "-c", line)
    here, there = (done.exit_code, done.stdout), (target.returncode, target.stdout)
    if name in DIFFERENCES:
        assert here != there, f"no difference any more: remove it from the list, and from docs/parity.md ({here})"
    else:
        assert here == there, (done.stderr, target.stderr)
