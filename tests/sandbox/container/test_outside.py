"""What belongs to a sandbox outside it is found by what was held, not by a number that may be somebody else's."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from sandbox.container.container import Container
from sandbox.container.shim import ShimGone
from sandbox.criu.gate import gate
from sandbox.errors import SandboxDead
from tests.support.container_support import Maker, zombie
from tests.support.daemon_host import until

HERE = Path("/proc/self/ns/net")


def same(one: Path, other: Path) -> bool:
    return os.path.samestat(one.stat(), other.stat())


async def test_what_is_held_is_the_sandboxs_own_whoever_gets_the_number_of_its_shim(maker: Maker) -> None:
    sb = await maker.create()
    inside = Path(f"/proc/{sb.init_pid}/ns/net")
    assert same(sb.netns, inside) and not same(sb.netns, HERE)
    assert (await sb.exec(["touch", "/here"])).exit_code == 0
    assert (sb.trees()[0] / "here").exists()
    assert not (sb.root / "here").exists()  # only where the shim is
    shim, held = sb.shim_pid, sb.netns.stat().st_ino
    os.kill(shim, signal.SIGKILL)
    await until(lambda: zombie(shim), "the shim has died")
    (sb.root / "here").touch()  # what somebody else has there
    sb.shim_pid = os.getpid()  # who has its number now
    assert sb.netns.stat().st_ino == held
    with pytest.raises((SandboxDead, ShimGone)):
        await sb.outside.hold()
    assert sb.netns.stat().st_ino == held
    with pytest.raises(gate.ImageRefused, match="not mounted"), gate.trees(*sb.trees()):
        pass
    sb.shim_pid = shim
    await sb.destroy()
    with pytest.raises(SandboxDead):
        _ = sb.netns
    with pytest.raises(SandboxDead):
        sb.trees()


async def test_a_daemon_that_adopts_a_sandbox_holds_its_network(maker: Maker) -> None:
    sb = await maker.create()
    held = sb.netns.stat().st_ino
    sb.detach()
    with pytest.raises(SandboxDead):
        _ = sb.netns
    adopted = await Container.adopt(sb.spec)
    try:
        assert adopted.netns.stat().st_ino == held
    finally:
        await adopted.destroy()
