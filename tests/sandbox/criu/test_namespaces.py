"""CRIU inside the sandbox's namespaces: the images hold what it leaves out, System V objects are never among that."""

from __future__ import annotations

import fcntl
import os
import shutil
from dataclasses import replace

import pytest

from sandbox.criu import dump, image_files
from sandbox.criu.dump import Dump
from sandbox.criu.inside import Inside
from tests.support.checkpoint_support import Bench, shell

NS_GET_USERNS = 0xB701
#: Leaves a segment that nobody is attached to, or one that a living process is attached to.
LEFT = "import ctypes; libc = ctypes.CDLL(None); assert libc.shmget({key}, 8192, 0o1600) >= 0"
HELD = (
    "import ctypes, time; libc = ctypes.CDLL(None); libc.shmat.restype = ctypes.c_void_p; "
    "assert libc.shmat(libc.shmget({key}, 8192, 0o1600), None, 0) > 0; open('/tmp/held', 'w').close(); time.sleep(1e6)"
)
START = {
    "left": f'python3 -c "{LEFT}"',
    "held": f'python3 -c "{HELD}" >/dev/null 2>&1 & while [ ! -e /tmp/held ]; do sleep 0.05; done; rm /tmp/held',
}


async def _capture(bench: Bench, container: object, name: str) -> Dump:
    return await bench.checkpointer.capture(container, bench.checkpointer.captures / name)


def _joined(bench: Bench, name: str) -> tuple[str, ...]:
    return bench.checkpointer._warm[name].inside.joined


async def test_images_from_inside_are_those_from_outside(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    sb = await bench.maker.create()
    real = dump.poll
    monkeypatch.setattr(dump, "poll", lambda pidfd: replace(real(pidfd), joined=()))
    outside = await _capture(bench, sb, "outside")
    monkeypatch.setattr(dump, "poll", real)
    await bench.checkpointer.forget(sb)
    inside = await _capture(bench, sb, "inside")
    kinds = image_files.messages()

    def content(capture: Dump, pattern: str) -> tuple[int, bytes]:
        (path,) = capture.dir.glob(pattern)
        return int(path.stem.rpartition("-")[2]), path.read_bytes()

    def ids(capture: Dump) -> tuple[object, object]:
        inventory = image_files.read(capture.dir / "inventory.img", kinds.inventory_entry)
        own = image_files.read(capture.dir / "ids-1.img", kinds.task_kobj_ids_entry)
        assert inventory is not None and own is not None
        return inventory.entries[0].root_ids, own.entries[0]

    for pattern, name in (("utsns-*.img", "uts_ns_id"), ("ipcns-var-*.img", "ipc_ns_id")):
        numbers = set()
        for capture in (outside, inside):
            number, _ = content(capture, pattern)
            above, own = ids(capture)
            assert getattr(own, name) == number != getattr(above, name), f"{name}: CRIU would not make a new one"
            numbers.add(number)
        assert content(outside, pattern)[1] == content(inside, pattern)[1]
        assert len(numbers) == 2  # or both were dumped in the same way
    assert content(inside, "timens-*.img")[0] == 0


async def test_what_is_restored_has_namespaces_of_its_own(bench: Bench) -> None:
    sb = await bench.maker.create()
    before = await shell(sb, "hostname; cat /proc/sys/kernel/domainname /proc/sys/kernel/sem; cat /proc/uptime")
    for _ in range(2):  # the second dump is of a sandbox that has a time namespace of its own
        saved = await bench.save(sb)
        await bench.kill_and_restore(sb, saved, saved.capture.dir)
        for kind in ("uts", "ipc"):
            fd = os.open(f"/proc/{sb.init_pid}/ns/{kind}", os.O_RDONLY)
            try:
                owner = fcntl.ioctl(fd, NS_GET_USERNS)
            finally:
                os.close(fd)
            try:
                assert os.fstat(owner).st_ino == os.stat(f"/proc/{sb.init_pid}/ns/user").st_ino
            finally:
                os.close(owner)
            assert os.stat(f"/proc/{sb.init_pid}/ns/{kind}").st_ino != os.stat(f"/proc/self/ns/{kind}").st_ino
    after = await shell(sb, "hostname; cat /proc/sys/kernel/domainname /proc/sys/kernel/sem; cat /proc/uptime")
    assert before.splitlines()[:3] == after.splitlines()[:3]
    assert float(before.splitlines()[3].split()[0]) <= float(after.splitlines()[3].split()[0])


@pytest.mark.parametrize("kind", START)
async def test_objects_there_before_and_after_criu_started(bench: Bench, kind: str) -> None:
    sb = await bench.maker.create()
    name = sb.spec.id
    await bench.checkpointer.warm(sb)
    assert _joined(bench, name) == ("uts", "time", "ipc")
    await shell(sb, START[kind].format(key=77))
    for _ in range(2):
        saved = await bench.save(sb)
        await bench.checkpointer.warm(sb)
        assert _joined(bench, name) == ("uts", "time")
        await bench.kill_and_restore(sb, saved, saved.capture.dir)
        assert "77" in (await shell(sb, "cat /proc/sysvipc/shm")).splitlines()[1].split()
    await shell(sb, "ipcrm --all=shm; pkill python3 || true")
    await bench.save(sb)
    await bench.checkpointer.warm(sb)
    assert _joined(bench, name) == ("uts", "time", "ipc")


@pytest.mark.parametrize("kind", START)
async def test_objects_made_after_the_last_look(bench: Bench, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sb = await bench.maker.create()
    await bench.checkpointer.warm(sb)
    await shell(sb, START[kind].format(key=78))
    real, polls = Inside.has_objects, []

    def late(inside: Inside) -> bool:
        """They come and go: every other look, the one before a dump, finds none."""
        polls.append(inside)
        return len(polls) % 2 == 0 and real(inside)

    monkeypatch.setattr(Inside, "has_objects", late)
    frozen: list[bool] = []
    images = bench.checkpointer.captures / "late"
    capture = await bench.checkpointer.capture(sb, images, on_frozen=lambda: frozen.append(True))
    assert len(polls) >= 2 and frozen == [True], "CRIU was inside, was found out, and the snapshot was taken once"
    assert len(list(capture.dir.glob("ipcns-shm-*.img"))) == 1
    assert not polls[0].objects, "its descriptors are closed"
    shutil.rmtree(images)


async def test_what_has_ended_cannot_be_looked_into(bench: Bench) -> None:
    sb = await bench.maker.create()
    await bench.checkpointer.forget(sb)
    await sb.kill()
    with pytest.raises(dump.CheckpointFailed) as caught:
        await _capture(bench, sb, "dead")
    assert "older checkpoint" in caught.value.hint or "restore" in caught.value.hint
