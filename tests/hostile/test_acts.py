"""Every hostile act of tests/hostile/acts.py, by name, in a real sandbox beside a real neighbour."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.harness import own_internet
from sandbox import Client, paths
from sandbox.criu.checkpointer import Checkpointer
from sandbox.messages import ExecResult, Limits
from sandbox.tree.pool import BtrfsPool
from tests.hostile import isolation
from tests.hostile.act import ATTEMPT, Act, Scene, judge
from tests.hostile.acts import ACTS, API_ACTS
from tests.hostile.api import ApiAct, try_api_act
from tests.support.container_support import base_image
from tests.support.daemon_host import IMAGE, Daemon


@pytest.fixture(scope="module")
def internet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[own_internet.Internet | None]:
    if own_internet.missing():
        yield None
        return
    with own_internet.internet(tmp_path_factory.mktemp("internet")) as made, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGURUS_RESOLVERS", made.resolvers)
        yield made


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.name.replace(" ", "-"))
async def test_contained(act: Act, pool: BtrfsPool, tmp_path: Path, internet: own_internet.Internet | None) -> None:
    if act.network is not None and internet is None:
        pytest.skip(own_internet.missing())
    world = isolation.World(pool, base_image(), tmp_path)
    neighbour = await isolation.container(world, Limits(), isolation.FIRST_UID + 65_536)
    try:
        assert await isolation.try_act(act, world, neighbour, internet=internet) == ""
    finally:
        await isolation.remove(neighbour)


FROM_A_RESTORED_ONE = (
    "create a user namespace (unshare)",
    "mount a tmpfs",
    "set the host name",
    "io_uring",
    "change a call for a forbidden one by tracing",
    "gain CAP_SYS_ADMIN by capset",
    "raise the limit of open files",
    "write kernel settings",
    "read masked files",
    "make a block device",
    "find a descriptor of the host",
    "see processes of the host",
    "take loopback down",
    "reach the internet",
    "fork bomb",
    "take all memory",
    "fill the disk",
    "reach a server on the host's loopback",
    "use the host's System V shared memory",
    "kill a process of the host by its number",
    "reach a neighbour that has the same policy",
    "raw socket with an open network",
    "reach an address that the policy does not name",
)


@pytest.mark.parametrize("name", FROM_A_RESTORED_ONE, ids=lambda name: name.replace(" ", "-"))
async def test_contained_after_a_restore(
    name: str, pool: BtrfsPool, tmp_path: Path, internet: own_internet.Internet | None
) -> None:
    if not paths.criu().exists():
        pytest.skip(f"{paths.criu()} is missing: run `make setup`")
    (act,) = (act for act in ACTS if act.name == name)
    if act.network is not None and internet is None:
        pytest.skip(own_internet.missing())
    world = isolation.World(pool, base_image(), tmp_path)
    neighbour = await isolation.container(world, Limits(), isolation.FIRST_UID + 65_536)
    checkpointer = Checkpointer(state=tmp_path, run=tmp_path)
    try:
        await checkpointer.prepare()
        assert await isolation.try_act(act, world, neighbour, checkpointer, internet) == ""
    finally:
        await checkpointer.close()
        isolation.unmount_below(tmp_path)
        await isolation.remove(neighbour)


@pytest.mark.parametrize("act", API_ACTS, ids=lambda act: act.name.replace(" ", "-"))
async def test_contained_by_the_daemon(act: ApiAct, host: Client, daemon: Daemon) -> None:
    assert await try_api_act(act, host, daemon.run, IMAGE) == ""


def test_names_are_distinct_and_many() -> None:
    names = [act.name for act in (*ACTS, *API_ACTS)]
    assert len(set(names)) == len(names) >= 300


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize(
    "code",
    [
        "syscall('unshare', 272, 0x10000000)",
        "attempt('raw', socket.socket, socket.AF_INET, socket.SOCK_RAW, 255)",
        "syscall('fsopen', 430, b'tmpfs', 0)",
        "syscall('bpf', 321, 0, struct.pack('IIIII', 2, 4, 4, 1, 0) + bytes(100), 72)",
        "attempt('keys', read, '/proc/keys')",
    ],
)
def test_the_same_attempts_work_outside(code: str) -> None:
    """A control: an attempt that nothing stops is seen as a breach."""
    done = subprocess.run([sys.executable, "-c", ATTEMPT + code], capture_output=True, check=False)
    said = judge(ExecResult(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr, duration=0.0))
    assert said.startswith("BREACH")


def test_a_program_that_tried_nothing_proves_nothing() -> None:
    assert judge(ExecResult(exit_code=0, stdout=b"", stderr=b"", duration=0.0)).startswith("was not tried")
    assert judge(ExecResult(exit_code=0, stdout=b"tried x EFAULT\nBREACH x\n", stderr=b"", duration=0.0)) == "BREACH x"
    assert judge(ExecResult(exit_code=0, stdout=b"tried x EPERM\n", stderr=b"", duration=0.0)) == ""


class Absent:
    """A sandbox without the program that is to act: nothing is ever tried, and nothing goes wrong."""

    cgroup = SimpleNamespace(anonymous=lambda: 0, cpu_usage_usec=lambda: 0)
    alive, init_pid = True, 2

    async def exec(self, argv: list[str], **_: object) -> ExecResult:
        if argv[0] == "echo":
            return ExecResult(exit_code=0, stdout=f"{argv[1]}\n".encode(), stderr=b"", duration=0.01)
        return ExecResult(exit_code=127, stdout=b"", stderr=b"no such program", duration=0.01)

    def tasks(self) -> list[int]:
        return []

    async def kill(self) -> None:
        pass

    async def start(self) -> None:
        pass


SERVED = (
    "reach a server of the neighbour",
    "use the neighbour's System V shared memory",
)  # these wait for the neighbour
WITHOUT_PROGRAMS = [
    act
    for act in ACTS
    if act.network is None
    and act.name not in SERVED
    and act.check.__module__ in ("tests.hostile.act", "tests.hostile.limits", "tests.hostile.host")
]


@pytest.mark.parametrize("act", WITHOUT_PROGRAMS, ids=lambda act: act.name.replace(" ", "-"))
async def test_an_act_that_was_not_tried_does_not_count(act: Act, tmp_path: Path) -> None:
    here: Any = Absent()
    assert await act.check(Scene(here, here, 1, tmp_path)) != ""
