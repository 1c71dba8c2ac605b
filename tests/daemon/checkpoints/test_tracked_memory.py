"""A daemon whose captures hold only written pages: restores, forks, its own death, collection."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from sandbox import Conflict, Sandbox
from sandbox.criu.tracking import userfault
from sandbox.messages import CheckpointState
from tests.support.daemon_host import IMAGE, Daemon, kill_everything, missing, until

pytestmark = pytest.mark.skipif(bool(userfault.missing()), reason=f"this kernel cannot: {userfault.missing()}")
SIZE = 24  # MiB
PROGRAM = f"""
import os
held = bytearray(os.urandom({SIZE} << 20))
os.mkfifo('/ask'); os.mkfifo('/answer')
ask, answer = os.open('/ask', os.O_RDWR), os.open('/answer', os.O_RDWR)
open('/ready', 'w').close()
while True:
    at = int(os.read(ask, 16))
    held[at] = (held[at] + 1) % 256
    import zlib
    os.write(answer, b'%d\\n' % zlib.crc32(held))
"""
START = f"cat >/program <<'END'\n{PROGRAM}\nEND\npython3 /program </dev/null >/dev/null 2>&1 &\n"
WAIT = "while [ ! -e /ready ]; do sleep 0.05; done"


@pytest.fixture
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    if reason := missing():
        pytest.skip(reason)
    daemon = Daemon(tmp_path_factory.mktemp("host"))
    try:
        yield daemon.start()
    finally:
        daemon.clean()


async def changed(sandbox: Sandbox, at: int) -> bytes:
    """Has the program write a byte; the checksum of all that it holds."""
    done = await sandbox.exec(f"printf {at} >/ask; head -n1 /answer", timeout=60)
    assert done.exit_code == 0
    return done.stdout


async def durable(sandbox: Sandbox) -> str:
    """The id of the last checkpoint, once it is durable."""

    async def last() -> str | None:
        newest = (await sandbox.tree())[-1]
        return newest.id if newest.state is CheckpointState.DURABLE else None

    result = await until(last, "a durable checkpoint")
    assert result is not None
    return result


async def test_what_is_written_is_captured_through_everything(own: Daemon) -> None:
    async with own.client() as host:
        sandbox = await host.create(IMAGE)
        await sandbox.exec(START + WAIT, timeout=60)
        sums = {}
        for number in range(4):
            observed = await changed(sandbox, 5000 * number)
            sums[await durable(sandbox)] = observed
        sizes = [info.stored_bytes for info in await sandbox.tree() if info.id in sums]
        assert max(sizes[1:]) < SIZE << 19  # the first one may have been taken while the program began
        first, *_, last = sums

        kill_everything(sandbox.id)
        await sandbox.restore(last, verify=True)
        again = await changed(sandbox, 77)
        await sandbox.restore(first, verify=True)
        assert await changed(sandbox, 5000) == list(sums.values())[1]
        await sandbox.restore(last, verify=True)
        assert await changed(sandbox, 77) == again

        own.kill()
        own.start()
        await changed(sandbox, 88)
        retained = await durable(sandbox)
        (made,) = await host.fork(retained, verify=True)
        assert await changed(made.sandbox, 99) == await changed(sandbox, 99)

        retained = await durable(sandbox)
        for info in await sandbox.tree():
            if info.id not in (retained, first):
                with contextlib.suppress(Conflict):  # a sandbox stands on it
                    await host.store.remove(info)
        await host.store.collect()
        (report,) = await host.store.verify(retained)
        assert report.damage == []
        await sandbox.restore(retained, verify=True)
