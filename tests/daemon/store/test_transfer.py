"""Checkpoints that leave a host and come to another: equal, incremental, all or nothing, whatever the stream says."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox import Client, Conflict, NotFound, PagurusError
from sandbox.content.page_hashes import PAGE
from sandbox.content.transfer import (
    Entry,
    Have,
    ImageFile,
    Reader,
    TransferHeader,
    TransferWriter,
    Tree,
    read_have,
    write_have,
)
from sandbox.differences import differences
from sandbox.errors import Protocol
from sandbox.messages import CheckpointInfo, CheckpointState, Verdict
from sandbox.tree import facts
from tests.support.daemon_host import IMAGE, Daemon, image_tree, missing

HEAD = TransferHeader(
    id="c-00112233aabb",
    sandbox="s-0011223344",
    verdict=Verdict.BOTH,
    image=IMAGE,
    image_digest="0" * 64,
    template={"image": IMAGE},
    files=True,
)
ROOT = Entry(parent=0, name=b"", kind="d", mode=0o755)


def stream(entries: list[Entry], head: TransferHeader = HEAD) -> bytes:
    writer = TransferWriter()
    return writer.start(head) + writer.entries(entries) + writer.end()


def read(data: bytes, step: int = 1 << 20) -> list[tuple[object, object]]:
    reader, tree = Reader(), Tree()
    result: list[tuple[object, object]] = []
    for first in range(0, len(data), step):
        for kind, value in reader.feed(data[first : first + step]):
            if isinstance(value, list):
                for entry in value:
                    if isinstance(entry, Entry):
                        tree.add(entry)
            result.append((kind, value))
    reader.finish()
    return result


# ------------------------------------------------------------------- the format


@given(st.binary(max_size=3000), st.integers(1, 700))
def test_what_is_written_is_read_however_it_arrives(data: bytes, step: int) -> None:
    writer = TransferWriter()
    content = blake3(data).digest()
    parts = [
        writer.start(HEAD),
        writer.entries([ROOT, Entry(parent=0, name=b"f", kind="f", size=len(data) or 1, content=content)]),
        writer.images([ImageFile("core-1.img", len(data), content)]),
        *writer.pages_of("pages-1.img", bytes(64)),
        writer.part(content, 0, data),
        writer.pages(data[: len(data) // PAGE * PAGE]),
        writer.end(),
    ]
    assert [kind.name for kind, _ in read(b"".join(parts), step)] == [  # type: ignore[attr-defined]
        "HEAD", "ENTRY", "IMAGE", "LIST", "PART", "PAGES",
    ]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_changed_cut_or_longer_stream_is_refused(data: st.DataObject) -> None:
    complete = stream([ROOT, Entry(parent=0, name=b"a", kind="d"), Entry(parent=1, name=b"b", kind="l", target=b"x")])
    place = data.draw(st.integers(0, len(complete) - 1))
    act = data.draw(st.sampled_from(("flip", "cut", "more")))
    if act == "flip":
        broken = complete[:place] + bytes([complete[place] ^ 1 << data.draw(st.integers(0, 7))]) + complete[place + 1 :]
    else:
        broken = complete[:place] if act == "cut" else complete + b"\x01"
    with pytest.raises(Protocol):
        read(broken)


@pytest.mark.parametrize(
    "entry",
    [
        Entry(parent=0, name=b"..", kind="d"),
        Entry(parent=0, name=b".", kind="f"),
        Entry(parent=0, name=b"", kind="f"),
        Entry(parent=0, name=b"a/b", kind="f"),
        Entry(parent=0, name=b"/etc", kind="d"),
        Entry(parent=0, name=b"a\0", kind="f"),
        Entry(parent=0, name=b"a" * 256, kind="f"),
        Entry(parent=9, name=b"a", kind="f"),
        Entry(parent=-1, name=b"a", kind="f"),
        Entry(parent=0, name=b"a", kind="f", size=5),
        Entry(parent=0, name=b"a", kind="f", size=-5),
        Entry(parent=0, name=b"a", kind="f", mode=0o100644),
        Entry(parent=0, name=b"a", kind="f", uid=1 << 20),
        Entry(parent=0, name=b"a", kind="f", mtime_ns=1 << 63),
        Entry(parent=0, name=b"a", kind="f", extended={"trusted.overlay.redirect": b"/etc"}),
        Entry(parent=0, name=b"a", kind="d", extended={"trusted.overlay.redirect": b"/etc/../.."}),
        Entry(parent=0, name=b"a", kind="d", extended={"trusted.overlay.redirect": b"../etc"}),
        Entry(parent=0, name=b"a", kind="d", extended={"trusted.overlay.redirect": b".."}),
        Entry(parent=0, name=b"a", kind="d", extended={"trusted.overlay.redirect": b""}),
        Entry(parent=0, name=b"a", kind="d", extended={"trusted.overlay.redirect": b"//etc"}),
        Entry(parent=0, name=b"a", kind="f", extended={"trusted.overlay.metacopy": b""}),
        Entry(parent=0, name=b"a", kind="f", extended={"trusted.overlay.opaque": b"y"}),
        Entry(parent=0, name=b"a", kind="f", extended={"user.x": bytes(70_000)}),
        Entry(parent=0, name=b"a", kind="f", extended={"system.posix_acl_access": b"\x02\0\0\0\x02\0\x06\0\0\0\x01\0"}),
        Entry(parent=0, name=b"a", kind="f", extended={"system.posix_acl_access": b"\x02\0\0\0\x02\0\x06"}),
        Entry(parent=0, name=b"a", kind="f", extended={"system.posix_acl_access": b"\x01\0\0\0"}),
        Entry(parent=0, name=b"a", kind="f", extended={"system.posix_acl_default": b"\x02\0\0\0"}),
        Entry(parent=0, name=b"a", kind="l", target=b"b", extended={"system.posix_acl_access": b"\x02\0\0\0"}),
        Entry(parent=0, name=b"a", kind="l", target=b""),
        Entry(parent=0, name=b"a", kind="f", same_as=7),
        Entry(parent=0, name=b"a", kind="d", same_as=0),
    ],
)
def test_an_entry_that_could_do_harm_is_refused(entry: Entry) -> None:
    with pytest.raises(Protocol):
        read(stream([ROOT, entry]))


def test_nothing_lies_below_a_symlink_or_is_there_twice() -> None:
    link = Entry(parent=0, name=b"l", kind="l", target=b"/etc")
    with pytest.raises(Protocol, match="no directory"):
        read(stream([ROOT, link, Entry(parent=1, name=b"passwd", kind="f")]))
    with pytest.raises(Protocol, match="twice"):
        read(stream([ROOT, link, Entry(parent=0, name=b"l", kind="d")]))


@pytest.mark.parametrize("name", ["../c-1", "c-00/../..", "c-", "C-0011223344", "c-0011223344\n", "s-0011223344"])
def test_an_id_that_could_be_a_path_is_refused(name: str) -> None:
    head = TransferHeader(**{field: getattr(HEAD, field) for field in TransferHeader.__struct_fields__})
    head.id = name
    with pytest.raises(Protocol):
        read(stream([ROOT], head))


@pytest.mark.parametrize("name", ["../x.img", "a/b.img", "x", ".img/", "pages-1.img"])
def test_a_process_image_has_a_plain_name(name: str) -> None:
    writer = TransferWriter()
    with pytest.raises(Protocol):
        read(writer.start(HEAD) + writer.images([ImageFile(name, 1, bytes(32))]) + writer.end())


def test_compressed_data_cannot_swell_beyond_what_is_announced() -> None:
    writer = TransferWriter()
    bomb = writer.start(HEAD) + writer.entries([ROOT]) + writer.pages(bytes(512 << 20)) + writer.end()
    assert len(bomb) < 1 << 20
    with pytest.raises(Protocol, match="more than"):
        read(bomb)


def test_a_list_of_what_is_there_comes_back() -> None:
    have = Have.of([os.urandom(32) for _ in range(50)], [os.urandom(32)])
    assert read_have(write_have(have)) == have
    for broken in (b"", b"x", write_have(have)[:-3], write_have(Have(b"123"))):
        with pytest.raises(Protocol):
            read_have(broken)


# ------------------------------------------------------------------- two hosts


needs_daemon = pytest.mark.skipif(bool(missing()), reason=missing())

SERVER = """
import os, socket, time
heap = bytes(range(256)) * 4096 * 3
held = open('/held', 'w+'); held.write('deleted but open'); held.flush(); os.unlink('/held')
server = socket.create_server(('127.0.0.1', 8080))
open('/up', 'w').close()
n = 0
while True:
    peer, _ = server.accept(); n += 1; held.seek(0)
    peer.sendall(f'{n} {held.read()} {len(heap)}\\n'.encode()); peer.close()
"""
REQUEST = "python3 -c \"import socket; print(socket.create_connection(('127.0.0.1', 8080)).recv(99).decode(), end='')\""
TREE = """
mkdir -p /work/deep/er && cd /work && echo one > a && ln a deep/b && ln -s ../a deep/er/l && mkfifo pipe
truncate -s 3M sparse && echo end >> sparse && chmod 4711 a && chown 1000:1000 deep && touch -d @12345 deep/er
rm /etc/motd && rm -rf /usr/share/doc && mkdir /usr/share/doc && head -c 3000000 /dev/urandom > noise
mv /etc/alternatives /etc/choices
touch shared && mkdir team && python3 - <<'END'
import os, struct
def acl(*entries): return struct.pack('<I', 2) + b''.join(struct.pack('<HHI', *entry) for entry in entries)
none = 0xFFFFFFFF
rights = acl((1, 6, none), (2, 6, 1000), (4, 4, none), (8, 5, 50), (16, 7, none), (32, 4, none))
os.setxattr('shared', 'system.posix_acl_access', rights)
os.setxattr('team', 'system.posix_acl_default', rights)
END
"""
#: Of the file `shared` and the directory `team`, as a sandbox sees them.
ACLS = """
cd /work && touch team/new && stat -c %a shared team team/new && python3 - <<'END'
import os
for path, kind in (('shared', 'access'), ('team/new', 'access'), ('team', 'default')):
    print(os.getxattr(path, 'system.posix_acl_' + kind).hex())
END
rm team/new
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Daemon]]:
    made = [Daemon(tmp_path_factory.mktemp(name)) for name in ("here", "there")]
    try:
        for daemon in made:
            daemon.start()
        yield made[0], made[1]
    finally:
        for daemon in made:
            daemon.clean()


async def complete(parts: AsyncIterator[bytes]) -> bytes:
    return b"".join([part async for part in parts])


async def again(data: bytes) -> AsyncIterator[bytes]:
    for first in range(0, len(data), 100_000):
        yield data[first : first + 100_000]


async def tree(daemon: Daemon, host: Client, checkpoint: CheckpointInfo) -> dict[str, object]:
    """The files of a checkpoint as they lie on a host: its own snapshot, or that of the ancestor that it shares."""
    snapshots = daemon.state / "pool" / "checkpoints"
    infos = {info.id: info for info in await host.store.checkpoints()}
    result = infos[checkpoint.id]
    while not (snapshots / result.id).is_dir():
        result = infos[result.parent or ""]
    return facts.tree(snapshots / result.id / "upper")


@needs_daemon
async def test_a_checkpoint_moves_to_another_host_and_is_the_same(hosts: tuple[Daemon, Daemon], tmp_path: Path) -> None:
    here, there = hosts
    async with here.client() as source, there.client() as target, source.create(IMAGE, env={"A": "b"}) as sandbox:
        await sandbox.exec(TREE)
        await sandbox.files.write("/server.py", SERVER)
        await sandbox.exec("setsid python3 /server.py >/dev/null 2>&1 & while [ ! -e /up ]; do sleep 0.01; done")
        assert (await sandbox.exec(REQUEST)).text == "1 deleted but open 3145728\n"
        rights = (await sandbox.exec(ACLS)).text
        assert rights.splitlines()[0] == "674" and "e8030000" in rights.splitlines()[3]  # of user 1000
        first = await sandbox.checkpoint("moved", wait="durable")

        data = await complete(source.store.stream(first))
        imported = await target.store.receive(again(data))
        assert imported.checkpoint.state is CheckpointState.DURABLE
        assert (imported.checkpoint.id, imported.checkpoint.label) == (first.id, "moved")
        assert differences(await tree(here, source, first), await tree(there, target, first)) == []
        assert (await target.store.receive(again(data))).already

        (fork,) = await target.fork(first, 1)
        child = fork.sandbox
        assert child is not None, fork.error
        assert (await child.exec(REQUEST)).text == "2 deleted but open 3145728\n"
        assert (await child.exec("cat /work/deep/b; echo $A; ls /usr/share/doc | wc -l")).text == "one\nb\n0\n"
        assert (await child.exec("ls -d /etc/alternatives 2>/dev/null; cat /etc/choices/README")).text.startswith(
            "Please read"
        )
        assert (await child.exec(ACLS)).text == rights
        result = await child.restore(first, verify=True)
        assert result.verified and not result.differences

        # What comes next is small, and smaller still against what is there.
        await sandbox.exec("echo two > /work/a; rm /work/noise")
        second = await sandbox.checkpoint(None, wait="durable")
        full = await complete(source.store.stream(second))
        since = await complete(source.store.stream(second, since=first))
        existing = await complete(source.store.stream(second, have=await target.store.have()))
        assert len(since) < len(full) / 4
        assert len(existing) < len(full) / 4
        with pytest.raises(Conflict, match="lacks"):  # to one who does not have the rest
            await _elsewhere(tmp_path, since)
        assert (await target.store.receive(again(since))).checkpoint.parent == first.id
        (fork,) = await target.fork(second, 1)
        assert fork.sandbox is not None, fork.error
        assert (await fork.sandbox.exec(f"{REQUEST}; cat /work/deep/b")).text.endswith(
            "deleted but open 3145728\ntwo\n"
        )

        # And by pull, which finds out for itself.
        await sandbox.exec("echo three > /work/a")
        third = await sandbox.checkpoint(None, wait="durable")
        pulled = await target.store.pull(str(here.socket), third)
        assert pulled.received_bytes < len(full) / 4
        assert pulled.new_pages < pulled.pages / 4
        assert differences(await tree(here, source, third), await tree(there, target, third)) == []
        assert (await target.store.pull(str(here.socket), third)).already
        reports = await target.store.verify()
        assert [report for report in reports if report.damage] == []
        for item in (child, fork.sandbox):
            await item.remove()
        for info in (third, second, first):
            await target.store.remove(info)
        assert not list((there.state / "pool" / "checkpoints").iterdir())


async def _elsewhere(tmp_path: Path, data: bytes) -> None:
    """Import into a host that has nothing."""
    third = Daemon(tmp_path / "elsewhere")
    try:
        third.start()
        async with third.client() as host:
            try:
                await host.store.receive(again(data))
            finally:
                assert await host.store.checkpoints() == []
                assert not list((third.state / "pool" / "sandboxes").iterdir())
                assert not list((third.state / "pool" / "checkpoints").iterdir())
                assert not list((third.state / "checkpoints").iterdir())
    finally:
        third.clean()


@needs_daemon
async def test_a_torn_or_changed_stream_leaves_nothing(hosts: tuple[Daemon, Daemon]) -> None:
    here, there = hosts
    chance = random.Random(3)
    async with here.client() as source, there.client() as target, source.create(IMAGE) as sandbox:
        await sandbox.exec("setsid sleep 1000000 >/dev/null 2>&1 & head -c 300000 /dev/urandom > /noise")
        info = await sandbox.checkpoint(None, wait="durable")
        data = await complete(source.store.stream(info))
        before = sorted(path.name for path in there.state.rglob("c-*"))
        for _ in range(12):
            place = chance.randrange(len(data))
            flipped = data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]
            for broken in (data[:place], flipped):
                with pytest.raises(PagurusError):
                    await target.store.receive(again(broken))
        assert sorted(path.name for path in there.state.rglob("c-*")) == before
        assert not list((there.state / "pool" / "sandboxes").iterdir())
        assert (await target.store.receive(again(data))).checkpoint.id == info.id
        await target.store.remove(info)


@needs_daemon
async def test_the_image_must_be_there_with_the_same_content(hosts: tuple[Daemon, Daemon], tmp_path: Path) -> None:
    here, _ = hosts
    other = Daemon(tmp_path / "other")
    (other.state / "images" / IMAGE).unlink()
    try:
        other.start()
        async with here.client() as source, other.client() as target, source.create(IMAGE) as sandbox:
            await sandbox.exec("echo x > /x")
            info = await sandbox.checkpoint(None, wait="durable")
            with pytest.raises(NotFound, match="export the image"):
                await target.store.receive(source.store.stream(info))
    finally:
        other.clean()


def test_the_image_of_the_tests_is_a_directory() -> None:
    if not missing():
        assert image_tree().is_dir()


@needs_daemon
async def test_export_waits_for_durable_and_refuses_the_unknown(hosts: tuple[Daemon, Daemon]) -> None:
    here, _ = hosts
    async with here.client() as source, source.create(IMAGE) as sandbox:
        result = await sandbox.exec("setsid sleep 1000000 >/dev/null 2>&1 &")
        assert len(await complete(source.store.stream(result.checkpoint or ""))) > 1000  # at once: it waits for durable
        with pytest.raises(NotFound):
            await complete(source.store.stream("c-0123456789ab"))
