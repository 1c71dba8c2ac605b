"""Files of a sandbox through a real daemon: single ones, whole trees, watching."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import subprocess
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox import Client, names
from sandbox.errors import Conflict, Invalid, NotFound, PagurusError
from sandbox.tree import archive, safe_path
from tests.support.daemon_host import TIMEOUT


async def test_parts_of_files(sb) -> None:
    await sb.files.write("/d/a.bin", bytes(range(256)) * 4)
    assert await sb.files.read("/d/a.bin", offset=250, limit=10) == bytes([*range(250, 256), *range(4)])
    await sb.files.append("/d/a.bin", b"end")
    assert await sb.files.read("/d/a.bin", offset=1024) == b"end"
    assert await sb.files.read("/d/a.bin", offset=9999) == b""


async def test_large_files_pass_through_the_daemon_and_do_not_stay_in_it(host: Client, sb) -> None:
    """A sparse file of 300 MB out, one of 64 MB in, and a reader that stands still: the daemon holds none of them."""
    daemon, size = (await host.health())["pid"], 300 << 20
    await sb.exec(
        f"printf begin > /large && truncate -s {size} /large && printf end | dd of=/large seek={size} bs=1",
        ends_turn=False,
    )
    before = _forget_peak(daemon)
    async with contextlib.aclosing(sb.files.stream("/large")) as standing:
        assert (await anext(standing)).startswith(b"begin\0")
        count, last = 0, b""
        async for part in sb.files.stream("/large"):
            assert len(part) <= 1 << 18
            count, last = count + len(part), (last + part)[-4:]
        assert count == size + 3 and last == b"\0end"
        assert len(await sb.files.read("/large", offset=1 << 20, limit=40 << 20)) == 40 << 20
        await sb.files.write("/written", b"0123456789abcdef" * (4 << 20))
        assert (await sb.exec("stat -c %s /written", ends_turn=False)).text == "67108864\n"
        assert _peak(daemon) - before < 32 << 20


def _forget_peak(pid: int) -> int:
    """Resident bytes of a process, from which on its peak counts."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _peak(pid)


def _peak(pid: int) -> int:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


async def test_a_file_that_is_cut_while_it_is_read_does_not_look_whole(sb) -> None:
    await sb.exec("truncate -s 64M /cut")
    reading = sb.files.stream("/cut")
    await anext(reading)
    await sb.exec("truncate -s 1M /cut")
    with pytest.raises(PagurusError):
        async for _ in reading:
            pass
    await sb.exec("truncate -s 5G /sparse")
    with pytest.raises(Invalid, match="limit"):
        await sb.files.read("/sparse", offset=(4 << 30) - 1)
    assert await sb.files.read("/sparse", offset=(5 << 30) - 2) == b"\0\0"


async def test_a_body_that_breaks_off_changes_nothing(sb) -> None:
    await sb.files.write("/kept", b"before")

    async def broken() -> AsyncIterator[bytes]:
        yield b"x" * (1 << 20)
        raise OSError("the sender fell over")

    with pytest.raises((OSError, PagurusError)):
        await sb._client.raw("PUT", f"{sb._path}/files?path=/kept", broken(), "application/octet-stream")
    assert await sb.files.read("/kept") == b"before"


async def test_status_tells_what_a_path_is_without_following(sb) -> None:
    await sb.files.write("/f", b"12345", mode=0o640)
    await sb.exec("ln -s /f /l; chown 7:8 /f; mkfifo /p")
    file = await sb.files.stat("/f")
    assert (file.kind, file.size, file.mode, file.uid, file.gid) == ("file", 5, 0o640, 7, 8)
    link = await sb.files.stat("/l")
    assert (link.kind, link.target) == ("symlink", "/f")
    assert (await sb.files.stat("/p")).kind == "other"
    assert not await sb.files.exists("/none")
    assert await sb.files.exists("/etc")
    with pytest.raises(NotFound):
        await sb.files.stat("/none")
    with pytest.raises(Invalid):
        await sb.files.stat("/")


async def test_what_the_host_owns_belongs_to_nobody(sb) -> None:
    names = await sb.exec("cd / && stat -c '%n %u %g' *")
    inside = {name: (int(uid), int(gid)) for name, uid, gid in map(str.split, names.text.splitlines())}
    listed = {info.name: (info.uid, info.gid) for info in await sb.files.list("/")}
    assert {name: listed[name] for name in inside} == inside
    assert inside["sys"] == (safe_path.NOBODY, safe_path.NOBODY) and inside["root"] == (0, 0)


async def test_directories_moves_and_removals(sb) -> None:
    await sb.files.mkdir("/w/x/y", mode=0o700)
    assert (await sb.files.stat("/w/x/y")).mode == 0o700
    await sb.files.write("/w/x/y/f", b"1")
    await sb.files.move("/w/x/y", "/w/new/z")
    assert await sb.files.read("/w/new/z/f") == b"1"
    with pytest.raises(Conflict):
        await sb.files.remove("/w/new/z")
    await sb.files.remove("/w", recursive=True)
    assert not await sb.files.exists("/w")
    for path in ("/proc", "/", "/dev/pts"):
        with pytest.raises(Invalid):
            await sb.files.remove(path, recursive=True)


async def test_changes_through_the_api_belong_to_the_next_checkpoint(sb) -> None:
    await sb.files.write("/keep/a", b"a")
    before = await sb.checkpoint()
    await sb.files.move("/keep/a", "/keep/b")
    after = await sb.checkpoint()
    assert after.verdict.files
    await sb.restore(before)
    assert [entry.name for entry in await sb.files.list("/keep")] == ["a"]
    await sb.restore(after)
    assert [entry.name for entry in await sb.files.list("/keep")] == ["b"]


async def test_a_tree_goes_in_and_comes_back_equal(sb, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub" / "empty").mkdir(parents=True)
    (source / "big").write_bytes(os.urandom(3 << 20))
    (source / "sub" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "sub" / "run.sh").chmod(0o755)
    (source / "link").symlink_to("sub/run.sh")
    os.link(source / "big", source / "twin")
    observed: list[int] = []
    assert await sb.files.upload(source, "/work", progress=observed.append) == (3 << 20) + 19
    assert observed == sorted(observed) and observed[-1] > 3 << 20
    assert (await sb.exec("/work/link && stat -c '%h %u' /work/big")).stdout == b"ran\n2 0\n"
    target = tmp_path / "target"
    await sb.files.download("/work", target)
    assert (target / "big").read_bytes() == (source / "big").read_bytes()
    assert (target / "twin").stat().st_ino == (target / "big").stat().st_ino
    assert os.readlink(target / "link") == "sub/run.sh"
    assert (target / "sub" / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (target / "sub" / "empty").is_dir()
    await sb.files.download("/work/sub/run.sh", tmp_path / "one")
    assert (tmp_path / "one" / "run.sh").read_text().startswith("#!")


async def test_a_hostile_tree_stays_in_its_directory(sb, tmp_path: Path) -> None:
    await sb.exec("mkdir /t; cd /t; ln -s / root; mkfifo fifo; ln -s /etc/passwd p; mkdir -p d; ln -s /proc/1 d/proc")
    await sb.files.download("/t", tmp_path / "out")
    result = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*"))
    assert result == ["d", "d/proc", "p", "root"]
    with pytest.raises(NotFound):
        await sb.files.download("/none", tmp_path / "none")
    for magic in ("exe", "environ", "fd/0"):  # refused at once, not in the middle of a stream
        await sb.exec(f"ln -sfn /proc/self/{magic} /t/magic")
        with pytest.raises((Invalid, NotFound)):
            await sb.files.download("/t/magic", tmp_path / "magic")
    await sb.exec("mkdir /deep && cd /deep && for i in $(seq 200); do mkdir d && cd d; done")
    with pytest.raises(Exception, match=r"deep|broke"):
        await sb.files.download("/deep", tmp_path / "deep")


def _tar(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for member, data in members:
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


def _member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


@pytest.mark.parametrize(
    "members",
    [
        [(_member("../escaped"), b"x")],
        [(_member("a/../../escaped"), b"x")],
        [(_member("out", tarfile.SYMTYPE, ".."), b""), (_member("out/escaped"), b"x")],
        [(_member("out", tarfile.SYMTYPE, "/"), b""), (_member("out/escaped"), b"x")],
        [(_member("hard", tarfile.LNKTYPE, "../secret"), b"")],
        [
            (_member("l", tarfile.SYMTYPE, "../secret"), b""),
            (_member("hard", tarfile.LNKTYPE, "l"), b""),
            (_member("hard"), b"x"),
        ],
        [(_member("/escaped"), b"x")],
        [(_member("node", tarfile.CHRTYPE), b"")],
    ],
)
def test_an_archive_never_leaves_its_directory(tmp_path: Path, members) -> None:
    (tmp_path / "secret").write_text("host")
    inside = tmp_path / "inside"
    inside.mkdir()
    directory = os.open(inside, os.O_RDONLY | os.O_DIRECTORY)
    try:
        archive.unpack(io.BytesIO(_tar(*members)), directory, limit=1 << 20)
    except (Invalid, NotFound):
        pass  # refused is as good as contained
    finally:
        os.close(directory)
    assert (tmp_path / "secret").read_text() == "host"
    assert (tmp_path / "secret").stat().st_nlink == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inside", "secret"]
    assert not any(path.is_char_device() for path in inside.rglob("*"))


@pytest.mark.parametrize("data", [b"", b"no tar at all" * 100, _tar((_member("a"), b"x" * 5000))[:3000]])
def test_broken_archives_are_refused(tmp_path: Path, data: bytes) -> None:
    directory = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with pytest.raises(Invalid):
            archive.unpack(io.BytesIO(data), directory, limit=1 << 20)
    finally:
        os.close(directory)


def test_an_archive_beyond_its_limit_is_refused(tmp_path: Path) -> None:
    directory = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with pytest.raises(Invalid, match="more than"):
            archive.unpack(io.BytesIO(_tar((_member("a"), b"x" * 5000))), directory, limit=4999)
    finally:
        os.close(directory)


def _extended(kind: bytes, data: bytes) -> bytes:
    """A header that says something of the members after it."""
    header = tarfile.TarInfo("pax")
    header.type, header.size = kind, len(data)
    return header.tobuf(tarfile.USTAR_FORMAT) + data.ljust(-(-len(data) // 512) * 512, b"\0")


def _pax(size: int, number: int = 0) -> bytes:
    """One record of `size` bytes."""
    key = f"{size} key{number}=".encode()
    return key + b"x" * (size - len(key) - 1) + b"\n"


def _endless_sparse() -> bytes:
    header = bytearray(_member("sparse").tobuf(tarfile.GNU_FORMAT))
    header[156:157] = tarfile.GNUTYPE_SPARSE
    header[482:483] = b"\1"  # its map goes on
    header[148:156] = b"        "
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + (b"0" * 504 + b"\1" + bytes(7)) * (5 << 11)


@pytest.mark.parametrize(
    "data",
    [
        _extended(tarfile.XHDTYPE, _pax(100)) * 250,
        _extended(tarfile.GNUTYPE_LONGNAME, b"name") * 5000,
        _extended(tarfile.XGLTYPE, _pax(100)) * 250,
        b"".join(_extended(tarfile.XGLTYPE, _pax(20_000, n)) + _member(f"m{n}").tobuf() for n in range(10)),
        _extended(tarfile.XHDTYPE, _pax(1 << 20)) * 5,
        _endless_sparse(),
    ],
    ids=["chain", "chain of names", "chain for all", "for all", "long", "sparse"],
)
def test_headers_without_end_are_refused(tmp_path: Path, data: bytes) -> None:
    directory = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with pytest.raises(Invalid, match=r"before one member|for all members"):
            archive.unpack(io.BytesIO(data + _tar((_member("a"), b"x"))), directory, limit=1 << 30)
    finally:
        os.close(directory)


def test_a_member_of_an_unknown_kind_promises_more_than_there_is(tmp_path: Path) -> None:
    member = _member("a", b"Z")
    member.size = 1 << 60
    directory = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with pytest.raises(Invalid, match="end of data"):
            archive.unpack(io.BytesIO(member.tobuf(tarfile.GNU_FORMAT)), directory, limit=1 << 30)
    finally:
        os.close(directory)


@pytest.mark.parametrize("form", ["gnu", "posix"])
def test_archives_of_others_are_unpacked(tmp_path: Path, form: str) -> None:
    """Long names, sparse files of many holes, a header for all members."""
    source, target = tmp_path / "source", tmp_path / "target"
    long = source / "/".join(["d" * 200] * 10)
    long.mkdir(parents=True)
    target.mkdir()
    with (long / "sparse").open("wb") as file:
        for part in range(300):
            file.seek(part << 13)
            file.write(b"x" * 4096)
    made = subprocess.run(
        ["tar", "-C", str(source), "--sparse", f"--format={form}", "-c", "."], check=True, capture_output=True
    ).stdout
    directory = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    try:
        archive.unpack(io.BytesIO(_extended(tarfile.XGLTYPE, _pax(60)) + made), directory, limit=1 << 30)
    finally:
        os.close(directory)
    result = target / long.relative_to(source) / "sparse"
    assert result.read_bytes() == (long / "sparse").read_bytes()


async def observed(sb, directory: str, events: list[tuple[str, str]]) -> asyncio.Task[None]:
    """Watch `directory`; returns when the watch is open."""
    armed = asyncio.Event()

    async def poll() -> None:
        async for event in sb.files.watch(directory, recursive=True):
            events.append((event.kind, event.path))
            armed.set()

    watching = asyncio.ensure_future(poll())
    while not armed.is_set():  # the watch is open as soon as it has told something
        await sb.exec(f"touch {directory}/armed", ends_turn=False)
        await asyncio.sleep(0.05)
    return watching


@given(st.binary(min_size=1, max_size=60).filter(lambda name: b"\0" not in name))
def test_every_name_is_told_and_found_again(name: bytes) -> None:
    reported = names.reported(os.fsdecode(name))
    assert os.fsencode(names.native(reported)) == name
    assert names.printable(reported) == reported.encode().decode()
    assert safe_path.refused(OSError(2, "none"), os.fsdecode(name)).message.encode()


async def test_names_that_are_not_utf8_are_told_and_accepted(sb, tmp_path: Path) -> None:
    """``\\356\\276\\200`` is U+EF80, a character that stands for a byte elsewhere."""
    before = await sb.checkpoint()
    result = await sb.exec(
        "mkdir /n; cd /n; mkdir d$(printf '\\377'); printf one > d$(printf '\\377')/f$(printf '\\200');"
        " printf two > $(printf '\\356\\276\\200'); ln -s $(printf '\\303') link; printf three > \xe9"
    )
    assert result.exit_code == 0
    listed = {info.name: info for info in await sb.files.list("/n")}
    strange = "\uefee\uefbe\uef80"
    assert set(listed) == {"link", "\xe9", "d\uefff", strange}
    assert listed["link"].target == "\uefc3"
    (inner,) = await sb.files.list("/n/d\uefff")
    assert inner.name == "f\uef80"
    assert await sb.files.read(f"/n/d\uefff/{inner.name}") == b"one"
    assert await sb.files.read(f"/n/{strange}") == b"two"
    assert (await sb.files.stat("/n/d\uefff")).name == "d\uefff"
    assert {change.path for change in await sb.diff(before)} >= {"/n/d\uefff", "/n/d\uefff/f\uef80", f"/n/{strange}"}

    await sb.files.download("/n", tmp_path / "out")
    assert set(os.listdir(os.fsencode(tmp_path / "out"))) == {b"link", "\xe9".encode(), b"d\xff", "\uef80".encode()}
    await sb.files.upload(tmp_path / "out", "/again")
    assert await sb.files.read("/again/d\uefff/f\uef80") == b"one"

    await sb.files.move("/n/d\uefff", "/n/e\uefff")
    await sb.files.write("/n/e\uefff/new\uefff", b"four")
    assert (await sb.exec("cat /n/e$(printf '\\377')/new$(printf '\\377')")).text == "four"
    with pytest.raises(NotFound, match="/n/none\uefff"):
        await sb.files.read("/n/none\uefff")
    with pytest.raises(Invalid, match="/n/e\uefff/new\uefff"):
        await sb.files.remove("/n/e\uefff/new\uefff/below")
    await sb.files.remove("/n/e\uefff", recursive=True)
    assert {info.name for info in await sb.files.list("/n")} == {"link", "\xe9", strange}

    events: list[tuple[str, str]] = []
    watching = await observed(sb, "/n", events)
    await sb.exec("mkdir /n/w$(printf '\\377')")
    while ("created", "w\uefff/z\ueffe") not in events:
        await sb.exec("rm -f /n/w$(printf '\\377')/*; touch /n/w$(printf '\\377')/z$(printf '\\376')", ends_turn=False)
        await asyncio.sleep(0.05)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_a_directory_without_end_is_not_listed(sb, host: Client) -> None:
    await sb.exec("mkdir /many; cd /many; seq 100000 | xargs touch", ends_turn=False)
    assert len(await sb.files.list("/many")) == 100_000
    await sb.exec("touch /many/more", ends_turn=False)
    with pytest.raises(Invalid, match="more than 100000 entries"):
        await sb.files.list("/many")


async def test_a_path_with_a_nul_byte_is_refused(sb, tmp_path: Path) -> None:
    for call in (
        sb.files.stat("/a\0b"),
        sb.files.read("/etc/passwd\0.txt"),
        sb.files.write("/a\0b", b""),
        sb.files.list("/\0"),
        sb.files.mkdir("/a\0b/c"),
        sb.files.move("/etc/passwd", "/a\0b"),
        sb.files.remove("/a\0b"),
        sb.files.download("/a\0b", tmp_path / "to"),
    ):
        with pytest.raises(Invalid):
            await call
    root = os.open(tmp_path, os.O_RDONLY)
    try:
        (tmp_path / "a").touch()
        with pytest.raises(Invalid, match="NUL"):
            safe_path.openat2(root, "a\0b", os.O_RDONLY)
    finally:
        os.close(root)


async def test_a_watch_tells_what_happens_below_it(sb) -> None:
    await sb.files.mkdir("/w")
    events: list[tuple[str, str]] = []
    watching = await observed(sb, "/w", events)
    await sb.exec("mkdir -p /w/a/b; echo x > /w/a/b/f; mv /w/a/b/f /w/g; rm /w/g; mkdir /w/late")
    while ("modified", "late/z") not in events:  # a new directory is watched as soon as it was noticed
        await sb.exec("echo y >> /w/late/z", ends_turn=False)
        await asyncio.sleep(0.05)
    before = await sb.checkpoint()
    await sb.restore(before)  # the tree that was watched is gone
    await asyncio.wait_for(watching, TIMEOUT)
    for target in [
        ("created", "a"),
        ("created", "a/b"),
        ("created", "g"),
        ("removed", "g"),
        ("modified", "late/z"),
        ("end", ""),
    ]:
        assert target in events, events
