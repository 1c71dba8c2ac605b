"""The same command in a sandbox and in Docker's default container: outputs and exit codes are the same.

Needs Debian's docker.io (dockerd is started here, without a network) and an image tree with the programs, which
PAGURUS_PARITY_TREE names: `make test-parity` makes both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.messages import Limits
from tests.conformance.parity_programs import DIFFERENCES, PROGRAMS
from tests.support import dockerd
from tests.support.container_support import Maker

pytestmark = pytest.mark.long
TREE = os.environ.get("PAGURUS_PARITY_TREE", "")
NAME = "parity"


@pytest.fixture(scope="module")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dockerd.Docker]:
    if not TREE or not dockerd.PROGRAM.exists():
        pytest.skip("needs Debian's docker.io and a tree: run `make test-parity`")
    made = dockerd.Docker(tmp_path_factory.mktemp("docker"))
    try:
        made.bring(Path(TREE), NAME)
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("name", PROGRAMS, ids=lambda name: name.replace(" ", "-"))
async def test_runs_as_in_docker(docker: dockerd.Docker, maker: Maker, name: str) -> None:
    line = PROGRAMS[name]
    sandbox = await maker.create(image=Path(TREE), limits=Limits(memory="2GiB"))
    done = await sandbox.exec(["/bin/sh", "-c", line], timeout=240)
    target = docker.run("run", "--rm", "--network", "none", "--memory", "2g", NAME, "/bin/sh", "-c", line)
    here, there = (done.exit_code, done.stdout), (target.returncode, target.stdout)
    if name in DIFFERENCES:
        assert here != there, f"no difference any more: remove it from the list, and from docs/parity.md ({here})"
    else:
        assert here == there, (done.stderr, target.stderr)
