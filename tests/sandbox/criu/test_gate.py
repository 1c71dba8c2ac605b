"""The gate: real images pass it; each field that a sandbox of ours could not have made is refused, before CRIU runs."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox.content import layers
from sandbox.criu import image_files, rewrite
from sandbox.criu.bases import RestoreBases
from sandbox.criu.gate import gate
from sandbox.criu.tracking import userfault
from sandbox.errors import RestoreFailed
from tests.support.checkpoint_programs import python_program
from tests.support.checkpoint_support import Bench, shell
from tests.support.daemon_host import ASLEEP

HELD = python_program("held = bytearray(os.urandom(24 << 20))\nserve(lambda: True)")
SYS_ADMIN = 1 << 21


def first(images: Path, stem: str, kind: str) -> tuple[Path, image_files.CriuImageFile]:
    path = sorted(images.glob(f"{stem}.img"))[0]
    result = image_files.read(path, getattr(image_files.messages(), kind))
    assert result is not None
    return path, result


def change(images: Path, stem: str, kind: str, edit: Callable[[Any], None]) -> None:
    path, image = first(images, stem, kind)
    edit(image.entries)
    image.write(path)


def regular(entries: Any, name: str = "/t/open") -> Any:
    return next(one.reg for one in entries if one.HasField("reg") and one.reg.name == name)


def setting(**values: Any) -> Callable[[Any], None]:
    def edit(entries: Any) -> None:
        for name, value in values.items():
            setattr(entries[0], name, value)

    return edit


def named(name: str) -> Callable[[Any], None]:
    return lambda entries: setattr(regular(entries), "name", name)


def credentials(**values: Any) -> Callable[[Any], None]:
    return lambda entries: [setattr(entries[0].thread_core.creds, key, value) for key, value in values.items()]  # type: ignore[return-value]


def capability(entries: Any) -> None:
    entries[0].thread_core.creds.cap_bnd[0] |= SYS_ADMIN


def extent(entries: Any) -> None:
    entries[0].uid_map.add(first=65536, lower_first=0, count=65536)


def mounted(entries: Any) -> None:
    added = entries[0].__class__()
    added.CopyFrom(next(one for one in entries if one.mountpoint == "/dev/pts"))
    added.mnt_id, added.mountpoint, added.fstype, added.source = 9999, "/mnt", 0, "/dev/vda"
    entries.append(added)


def option(entries: Any) -> None:
    next(one for one in entries if one.mountpoint == "/").flags |= 1 << 20  # shared


def core_limit(entries: Any) -> None:
    entries[0].tc.rlimits.rlimits[4].max = entries[0].tc.rlimits.rlimits[4].cur = 1 << 30


def owned(entries: Any) -> None:
    owner = regular(entries).fown
    owner.pid, owner.pid_type, owner.signum, owner.uid, owner.euid = os.getpid(), 1, signal.SIGUSR1, 0, 0


def timer(entries: Any) -> None:
    entries[0].tc.timers.posix.add(
        it_id=0, clock_id=1, si_signo=signal.SIGUSR1, it_sigev_notify=4, sival_ptr=0, overrun=0,
        isec=0, insec=1000, vsec=0, vnsec=1000, notify_thread_id=os.getpid(),
    )  # fmt: skip


def queued(entries: Any) -> None:
    entries[0].thread_core.signals_p.signals.add(siginfo=b"short")


REFUSED: dict[str, tuple[str, str, Callable[[Any], None], str]] = {
    "a path with ..": ("files", "file_entry", named("/t/../t/open"), "crooked path"),
    "a path that begins twice": ("files", "file_entry", named("//t/open"), "crooked path"),
    "a relative path": ("files", "file_entry", named("t/open"), "has no path"),
    "a path through a link": ("files", "file_entry", named("/through/open"), "through a link, or out"),
    "a path that is a link": ("files", "file_entry", named("/link"), "symbolic link stands"),
    "a path to nothing": ("files", "file_entry", named("/t/nothing"), "is not in the file tree"),
    "a path of a kind": ("files", "file_entry", named("/t"), "another kind of file"),
    "a file of the host": ("files", "file_entry", lambda all: setattr(regular(all), "ext", True), "outside"),
    "a file made when opened": ("files", "file_entry", lambda all: setattr(regular(all), "flags", 0o102), "flags"),
    "a file on another mount": ("files", "file_entry", lambda all: setattr(regular(all), "mnt_id", 7), "no mount"),
    "a file twice": ("files", "file_entry", lambda all: all.append(all[0]), "two files"),
    "no file": ("files", "file_entry", lambda all: all.clear(), "runs no file"),
    "no user namespace": ("ids-1", "task_kobj_ids_entry", setting(user_ns_id=0), "without a user namespace"),
    "a plugin": ("inventory", "inventory_entry", lambda all: all[0].plugins_entry.plugins.append("x"), "plugins"),
    "more users": ("userns-*", "userns_entry", extent, "user ids"),
    "users of the host": (
        "userns-*",
        "userns_entry",
        lambda all: setattr(all[0].uid_map[0], "lower_first", 0),
        "user ids",
    ),
    "a mount": ("mountpoints-*", "mnt_entry", mounted, "of no sandbox"),
    "a shared mount": ("mountpoints-*", "mnt_entry", option, "flags"),
    "a capability": ("core-1", "core_entry", capability, "capabilities"),
    "a user of another sandbox": ("core-1", "core_entry", credentials(fsuid=65536), "ids beyond"),
    "new privileges": ("core-1", "core_entry", credentials(no_new_privs=2), "no_new_privs"),
    "core dumps": ("core-1", "core_entry", core_limit, "dump core"),
    "pid 2 first": ("pstree", "pstree_entry", setting(pid=2), "thread of its own|not pid 1"),
    "an orphan": ("pstree", "pstree_entry", lambda all: setattr(all[1], "ppid", 4444), "no parent"),
    "a directory that there is not": ("fs-1", "fs_entry", setting(cwd_id=4444), "in no directory"),
    "memory of the kernel": ("mm-1", "mm_entry", lambda all: setattr(all[0].vmas[-1], "end", 1 << 63), "memory where"),
    "a session of the host": ("pstree", "pstree_entry", lambda all: setattr(all[1], "sid", 0), "of the host"),
    "pid 1 in a session": ("pstree", "pstree_entry", setting(sid=0), "one of the host"),
    "an owner elsewhere": ("files", "file_entry", owned, "which there is not"),
    "a timer for a thread elsewhere": ("core-1", "core_entry", timer, "no thread of it"),
    "stopped by SIGINT": ("core-1", "core_entry", lambda all: setattr(all[0].tc, "stop_signo", 2), "is stopped by"),
    "a death told by no signal": (
        "core-1",
        "core_entry",
        lambda all: setattr(all[0].thread_core, "pdeath_sig", 99),
        "at its parent's death",
    ),
    "half a signal": ("core-1", "core_entry", queued, "is no signal"),
    "memory of another image": ("pagemap-1", "pagemap_head", lambda all: None, "cut short"),
}
HOLDER = (
    "mkdir -p /t; echo x > /t/open; ln -s /t /through; ln -s /t/open /link; "
    f"sleep 1000 < /t/open > /dev/null 2>&1 & {ASLEEP}"
)


async def test_real_images_pass_and_changed_ones_do_not(bench: Bench) -> None:
    """One sandbox for all changes: each is tried on a copy of its images, in the real path of a restore."""
    sb = await bench.maker.create()
    await shell(sb, HOLDER)
    saved = await bench.save(sb)
    await sb.kill()
    await sb.remount(bench.snapshot(saved.tree, readonly=False))
    said = {}
    for name, (stem, kind, edit, _) in REFUSED.items():
        images = saved.capture.dir.with_name(f"changed-{len(said)}")
        shutil.copytree(saved.capture.dir, images)
        if name == "memory of another image":
            path = images / "pagemap-1.img"
            path.write_bytes(path.read_bytes()[:-3])
        else:
            change(images, stem, kind, edit)
        try:
            await bench.checkpointer.restore(sb, images)
        except RestoreFailed as error:
            said[name] = str(error)
        else:
            pytest.fail(f"{name} was restored")
        shutil.rmtree(images)
    for name, (_, _, _, words) in REFUSED.items():
        assert said[name].count("cannot be restored:") == 1 and "CRIU could not" not in said[name], (name, said[name])
        assert any(word in said[name] for word in words.split("|")), (name, said[name])
    await bench.checkpointer.restore(sb, saved.capture.dir)
    assert await shell(sb, "pgrep -x sleep | wc -l") == "1\n"


@pytest.mark.parametrize(
    ("stem", "kind", "edit"),
    [("files", "file_entry", owned), ("core-1", "core_entry", timer)],
)
async def test_numbers_of_the_host_mean_nothing_to_criu(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, stem: str, kind: str, edit: Callable[[Any], None]
) -> None:
    """Without the gate: CRIU looks them up in the sandbox's own pid namespace, where no process of the host has one."""
    last_seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: last_seen.append(number))
    try:
        sb = await bench.maker.create()
        await shell(sb, HOLDER)
        saved = await bench.save(sb)
        await sb.kill()
        await sb.remount(bench.snapshot(saved.tree, readonly=False))
        change(saved.capture.dir, stem, kind, edit)
        for name in ("passes", "checked"):
            monkeypatch.setattr(gate, name, lambda *_, **__: None)
        with pytest.raises(RestoreFailed, match="CRIU could not"):
            await bench.checkpointer.restore(sb, saved.capture.dir)
        assert last_seen == []
    finally:
        signal.signal(signal.SIGUSR1, before)


async def test_what_is_no_image_is_refused(bench: Bench) -> None:
    sb = await bench.maker.create()
    saved = await bench.save(sb)
    for name, place in (("netns-2.img", b""), ("tmpfs-dev-9.tar.gz.img", b""), ("parent", b"")):
        (saved.capture.dir / name).write_bytes(place)
        with pytest.raises(gate.ImageRefused, match="unknown kind"):
            gate.checked(gate.of_directory(saved.capture.dir))
        (saved.capture.dir / name).unlink()
    os.symlink("/", saved.capture.dir / "parent")
    with pytest.raises(gate.ImageRefused, match="is no image"):
        gate.of_directory(saved.capture.dir)


@pytest.mark.parametrize("later", [False, True])
async def test_images_are_checked_once_until_one_changes(bench: Bench, later: bool) -> None:
    """Those of a dump with pages of the one before, and the linked copies that restores and forks make of it."""
    sb = await bench.maker.create()
    await shell(sb, HELD)
    await bench.save(sb)
    saved = await bench.save(sb)
    assert layers.sizes(saved.capture.dir) or not userfault.supported()
    linked = saved.capture.dir.with_name("linked")
    rewrite.copy(saved.capture.dir, linked, later=later)
    target = gate.checked(gate.of_directory(saved.capture.dir))
    assert gate.checked(gate.of_directory(linked)) is target
    core = next(linked.glob("core-*.img"))
    core.write_bytes(core.read_bytes()[:-1])  # cut short
    for directory in (linked, saved.capture.dir):
        with pytest.raises(gate.ImageRefused, match="cannot be read"):
            gate.checked(gate.of_directory(directory))


async def test_restores_of_one_capture_have_a_base_in_common(bench: Bench) -> None:
    sb = await bench.maker.create()
    await shell(sb, HELD)
    saved = await bench.save(sb)
    bases = RestoreBases(bench.directory / "bases")
    one, two = await asyncio.gather(*(asyncio.to_thread(bases.take, saved.capture.dir) for _ in range(2)))
    assert one is two and one.fill is not None
    one.link(bench.directory / "linked")
    pages = sum(path.stat().st_size for path in (bench.directory / "linked").glob("pages-*"))
    assert pages + sum(run.size for memory in one.fill.memories for run in memory.runs) == sum(
        size for name, size in one.complete.sizes.items() if name.startswith("pages-")
    )
    bases.leave(saved.capture.dir)
    assert (bench.directory / "bases" / "1").exists()
    bases.leave(saved.capture.dir)
    assert list((bench.directory / "bases").iterdir()) == []
    core = next(saved.capture.dir.glob("mm-*.img"))
    core.write_bytes(core.read_bytes()[:-1])
    for _ in range(2):
        with pytest.raises(gate.ImageRefused, match="cannot be read"):
            bases.take(saved.capture.dir)
    assert list((bench.directory / "bases").iterdir()) == []


async def test_images_from_elsewhere_must_be_confined_as_ours_are(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sb = await bench.maker.create()
    await shell(sb, HOLDER)
    saved = await bench.save(sb)

    def import_it(stem: str = "", kind: str = "", edit: Callable[[Any], None] | None = None) -> None:
        images = saved.capture.dir.with_name("elsewhere")
        shutil.copytree(saved.capture.dir, images)
        try:
            if edit is not None:
                change(images, stem, kind, edit)
            files = {path.name: path.read_bytes() for path in images.glob("*.img")}
            counts = {name: len(files.pop(name)) // 4096 for name in sorted(files) if name.startswith("pages-")}
            gate.imported(files, counts)
        finally:
            shutil.rmtree(images)

    def other_filter(entries: Any) -> None:
        entries[0].seccomp_filters[0].filter = entries[0].seccomp_filters[0].filter[:-8] + bytes(8)

    def none(entries: Any) -> None:
        entries[0].thread_core.seccomp_mode = 0

    import_it()
    for change_of in (("seccomp", "seccomp_entry", other_filter), ("core-1", "core_entry", none)):
        with pytest.raises(gate.ImageRefused, match="is not held by the filter of system calls"):
            import_it(*change_of)

    def no_core(entries: Any) -> None:
        limit = entries[0].tc.rlimits.rlimits[4]
        limit.cur = limit.max = 0

    monkeypatch.setattr(gate, "CORE_PATTERN", tmp_path / "core_pattern")
    gate.CORE_PATTERN.write_text("core")
    import_it("core-1", "core_entry", no_core)
    gate.CORE_PATTERN.write_text("|/usr/bin/taker %P")
    import_it()
    with pytest.raises(gate.ImageRefused, match="dump core to a program of the host"):
        import_it("core-1", "core_entry", no_core)
    with pytest.raises(gate.ImageRefused, match="has capabilities"):
        import_it("core-1", "core_entry", capability)
