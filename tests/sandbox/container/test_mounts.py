"""What a sandbox keeps of the host's mounts: nothing that the host may want to unmount."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from sandbox.container.container import Container
from sandbox.errors import Unsupported
from tests.support.checkpoint_programs import CHECK, LISTENER
from tests.support.checkpoint_support import Bench, Saved, shell
from tests.support.container_support import Maker

TIMEOUT = 20.0  # seconds for the kernel to let go of what nobody uses


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """An image file, and where it is mounted through a loop device."""
    image, place = tmp_path / "a disk.img", tmp_path / "a disk"
    with open(image, "wb") as file:
        file.truncate(16 << 20)
    place.mkdir()
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, capture_output=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True)
    yield image, place
    if os.path.ismount(place):
        subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def overlay(tmp_path: Path) -> Iterator[Path]:
    """A mounted overlay with a directory `image`."""
    top = tmp_path / "an overlay"
    for name in ("lower/image", "upper", "work", "merged"):
        (top / name).mkdir(parents=True)
    options = "lowerdir=lower,upperdir=upper,workdir=work"
    subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", "merged"], check=True, cwd=top)
    yield top / "merged"
    subprocess.run(["umount", str(top / "merged")], check=True)


@pytest_asyncio.fixture
async def warm(bench: Bench, disk: tuple[Path, Path]) -> AsyncIterator[tuple[Container, Saved]]:
    """A sandbox with CRIU processes that wait for the next dump and the next restore."""
    sb = await bench.maker.create()
    await shell(sb, LISTENER[0])
    saved = await bench.save(sb)
    await bench.checkpointer.warm(sb)
    yield sb, saved
    await bench.checkpointer.forget(sb)


def sees(pid: int, place: Path) -> bool:
    return place.name.replace(" ", "\\040") in Path(f"/proc/{pid}/mountinfo").read_text()


def mount_points(pid: int) -> set[str]:
    return {line.split()[4] for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()}


async def test_the_host_can_unmount_a_disk_beside_sandboxes(
    bench: Bench, warm: tuple[Container, Saved], disk: tuple[Path, Path]
) -> None:
    sb, saved = warm
    image, place = disk
    name = sb.spec.id
    assert sees(os.getpid(), place)
    waiting = bench.checkpointer._waiting[name].worker
    for pid in (sb.shim_pid, sb.init_pid, waiting.pid, bench.checkpointer._warm[name].worker.pid):
        assert pid is not None and not sees(pid, place)
    await asyncio.to_thread(subprocess.run, ["umount", str(place)], check=True)
    deadline = time.monotonic() + TIMEOUT
    while await asyncio.to_thread(subprocess.check_output, ["losetup", "-j", str(image)]):
        assert time.monotonic() < deadline, "the loop device is still in use"
        await asyncio.sleep(0.05)
    await bench.kill_and_restore(sb, saved, saved.capture.dir)
    assert await shell(sb, CHECK) == "good\n"


async def test_a_waiting_process_restores_as_a_fresh_one_does(bench: Bench, warm: tuple[Container, Saved]) -> None:
    sb, saved = warm
    view = "cat /proc/1/cgroup /proc/1/mountinfo | sed 's/^[0-9]* [0-9]* [0-9:]* //; s/fd.[0-9]*//g'; hostname"
    pids: list[int] = []
    for kill in (False, True):
        worker = bench.checkpointer._waiting[sb.spec.id].worker
        assert worker.pid not in sb.tasks()
        if kill:  # then there is none, and one is started
            os.kill(worker.pid, signal.SIGKILL)
        await bench.kill_and_restore(sb, saved, saved.capture.dir)
        assert worker.used is not kill
        pids.append(worker.pid)
        assert await shell(sb, CHECK) == "good\n"
        observed = sorted((await shell(sb, view)).splitlines())
        if not kill:
            first = observed
            await bench.checkpointer.warm(sb)
    assert observed == first
    assert pids[0] != pids[1]


async def test_outputs_of_more_programs_than_a_waiting_process_has_pipes_for(bench: Bench) -> None:
    sb = await bench.maker.create()
    for _ in range(2):  # two outputs each, and nobody inside reads them
        await shell(sb, "sleep 1000 &")
    await shell(sb, "until test $(cat /proc/[0-9]*/stat | grep -c '(sleep) S') = 2; do :; done")
    saved = await bench.save(sb)
    await bench.checkpointer.warm(sb)
    worker = bench.checkpointer._waiting[sb.spec.id].worker
    await bench.kill_and_restore(sb, saved, saved.capture.dir)
    assert not worker.used
    assert await shell(sb, "pgrep -c sleep") == "2\n"


async def test_a_sandbox_without_checkpoints_lets_go_too(maker: Maker, disk: tuple[Path, Path]) -> None:
    sb = await maker.create()
    deadline = time.monotonic() + TIMEOUT
    while sees(sb.shim_pid, disk[1]):  # not at once: nobody should wait for that
        assert time.monotonic() < deadline, "the shim still holds the disk"
        await asyncio.sleep(0.05)
    assert await shell(sb, "echo on") == "on\n"
    await sb.kill()
    await sb.remount(sb.tree)
    await sb.start()
    assert await shell(sb, "echo on") == "on\n"


async def test_layers_are_mounted_nowhere_but_in_the_overlay(maker: Maker) -> None:
    sb = await maker.create()  # its layers were attached for the mount, as Linux before 6.15 wants it
    points = mount_points(sb.shim_pid)
    assert str(sb.root) in points and not points & {str(tree) for tree in (sb.tree, sb.spec.image, sb.layer)}
    assert await shell(sb, "echo new > /etc/passwd; cat /etc/passwd") == "new\n"
    assert (await asyncio.to_thread((sb.tree / "upper/etc/passwd").read_text)) == "new\n"


async def test_an_image_on_an_overlay_is_refused_with_the_way_out(maker: Maker, overlay: Path) -> None:
    """The state directory of a container without a volume: the kernel lends no directory of an overlay."""
    with pytest.raises(Unsupported, match="cannot make a sandbox: image layer") as refused:
        await maker.create(image=overlay / "image")
    assert f"{overlay}/image lies on overlay" in refused.value.hint and "ext4, xfs or btrfs" in refused.value.hint
