"""Programs of the host that are started beside a sandbox: CRIU and its like."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from sandbox.container.cgroup import hierarchy
from sandbox.container.container import Container
from sandbox.container.shim import ShimError
from tests.support.container_support import Maker, shell


async def _host_output(sb: Container, argv: list[str], **options: object) -> str:
    reading, writing = os.pipe()
    try:
        pid = await sb.outside.start(argv, stderr=writing, **options)  # type: ignore[arg-type]
        assert await sb.outside.exited(pid) == 0
    finally:
        os.close(writing)
        text = _read_all(reading)
    return text


def _read_all(fd: int) -> str:
    with open(fd) as file:
        return file.read()


async def test_host_program_outside_the_groups(maker: Maker, either_hierarchy: str) -> None:
    sb = await maker.create()
    script = "cat /proc/self/cgroup; readlink /proc/self/ns/net /proc/self/ns/ipc /proc/self/ns/pid; ls /proc/self/fd"
    out = await _host_output(sb, ["/bin/sh", "-c", script], in_cgroup=False, join=("net", "ipc"))
    assert sb.spec.id not in out
    for name, same in (("net", True), ("ipc", True), ("pid", False)):
        assert (os.readlink(f"/proc/{sb.init_pid}/ns/{name}") in out) is same
    assert "memory:/pagurus\n" in out or hierarchy().pure or either_hierarchy == "pure v2"
    assert await shell(sb, "echo well") == "well\n"


async def test_host_program_inside_the_groups(maker: Maker, either_hierarchy: str) -> None:
    sb = await maker.create()
    script = "hostname; readlink /proc/self/ns/ipc /proc/self/ns/uts; cat /proc/self/cgroup"
    out = await _host_output(sb, ["/bin/sh", "-c", script], in_cgroup=True)
    assert out.startswith("crab\n")
    assert not any(
        os.readlink(f"/proc/{pid}/ns/{name}") in out for pid in ("self", sb.init_pid) for name in ("ipc", "uts")
    )
    assert f"0::/pagurus/{sb.spec.id}\n" in out
    if not hierarchy().pure and either_hierarchy == "as it is":
        assert f"memory:/pagurus/{sb.spec.id}\n" in out


async def test_host_program_gets_its_descriptors(maker: Maker, tmp_path: Path) -> None:
    sb = await maker.create()
    (tmp_path / "a").write_text("first")
    (tmp_path / "b").write_text("second")
    fds = [os.open(tmp_path / name, os.O_RDONLY) for name in ("a", "b")]
    try:
        script = "cat <&3; cat <&4; ls /proc/self/fd"
        out = await _host_output(sb, ["/bin/sh", "-c", script], in_cgroup=False, fds=fds)
    finally:
        for fd in fds:
            os.close(fd)
    assert out.startswith("firstsecond")
    assert set(out.removeprefix("firstsecond").split()) == {"0", "1", "2", "3", "4", "5"}  # 5: ls itself
    with pytest.raises(ShimError, match="exec"):
        await sb.outside.start(["/no/such/program"], in_cgroup=False)


async def test_sink_swallows(maker: Maker) -> None:
    sb = await maker.create()
    fd = await sb.outside.sink()
    try:
        for _ in range(100):
            await asyncio.to_thread(os.write, fd, bytes(1 << 16))
    finally:
        os.close(fd)
