"""Processes whose state hangs on names, locks and stops; test_processes.py dumps and restores them as all others."""

from __future__ import annotations

import re
import shutil

import msgspec
import pytest

from sandbox.criu.carried import other_names, socket_files
from sandbox.criu.open_files import changed, held_files
from sandbox.errors import CheckpointFailed, RestoreFailed
from tests.support.checkpoint_programs import CHECK, UNIX, python_program
from tests.support.checkpoint_programs_held import ALL, UNIX_LISTENERS
from tests.support.checkpoint_support import Bench, shell


@pytest.mark.parametrize("name", ["locks", "sqlite", "stopped"])
async def test_what_is_restored_without_comparison_goes_on(bench: Bench, name: str) -> None:
    start, check = ALL[name]
    sb = await bench.maker.create()
    await shell(sb, start)
    for _ in range(4):
        saved = await bench.save(sb)
        await sb.kill()
        await sb.remount(bench.snapshot(saved.tree, readonly=False))
        await bench.checkpointer.restore(sb, saved.capture.dir)
        assert await shell(sb, check) == "good\n"


@pytest.mark.parametrize(
    ("spoil", "mend", "said"),
    [
        ("rm /t/d/socket; rmdir /t/d", "mkdir /t/d", r"gone with its directory.*/t/d/socket.*make the directory again"),
        ("rm /t/d/socket; rmdir /t/d; ln -s away /t/d", "mkdir /t/away", r"gone with its directory.*/t/d/socket"),
    ],
)
async def test_a_socket_whose_file_would_not_come_back_as_it_is_is_refused(
    bench: Bench, spoil: str, mend: str, said: str
) -> None:
    sb = await bench.maker.create()
    await shell(sb, UNIX_LISTENERS[0])
    await shell(sb, spoil)
    with pytest.raises(CheckpointFailed, match=said):
        await bench.save(sb)
    await shell(sb, mend)
    saved = await bench.save(sb)
    await bench.kill_and_restore(sb, saved, saved.dump)
    assert await shell(sb, CHECK) == "good\n"


_ACCEPTS = python_program("""
listener = socket.socket(socket.AF_UNIX); listener.bind('/t/socket'); listener.listen()
open('/t/ready', 'w').close()
while True: listener.accept()[0].close()
""")
_RENAMED = {
    "moved, as a JVM and haproxy do": "mv /t/socket /t/moved",
    "moved over another": "python3 -c 'import socket; socket.socket(1).bind(\"/t/moved\")'; mv /t/socket /t/moved",
    "linked, as supervisord and ssh do": "ln /t/socket /t/moved; rm /t/socket",
    "with several names": "ln /t/socket /t/moved; ln /t/socket /t/d",
    "moved with several names": "mkdir /t/e; ln /t/socket /t/d; mv /t/socket /t/e/moved; ln -s e/moved /t/moved",
}


@pytest.mark.parametrize("how", _RENAMED.values(), ids=_RENAMED.keys())
async def test_a_socket_whose_file_has_other_names_is_restored_with_them(bench: Bench, how: str) -> None:
    """CRIU would bind it by its first name: a file that is not in the checkpoint, and no socket behind the others."""
    sb = await bench.maker.create()
    await shell(sb, f"{_ACCEPTS}; {how}; chmod 640 /t/moved; chown 7:8 /t/moved")
    facts = (
        "cd /t && find . -type s -printf '%p %m %U %G %n %t\\n' | sort && stat -c %Y . && cat /proc/net/unix | wc -l"
    )
    before = await shell(sb, facts)
    connect = "python3 -c 'import socket; s = socket.socket(1); s.connect(\"/t/moved\"); print(s.recv(1))'"
    for _ in range(2):
        saved = await bench.save(sb)
        await bench.kill_and_restore(sb, saved, saved.dump)
        assert await shell(sb, facts) == before
        assert await shell(sb, connect) == "b''\n"


async def test_a_turn_that_names_the_file_of_a_socket_otherwise_captures_the_processes(bench: Bench) -> None:
    sb = await bench.maker.create()
    await shell(sb, f"{UNIX[0]}; ln /t/socket /t/one; rm /t/socket")
    held = held_files(sb)
    assert held.sockets and not changed(sb, held)
    await shell(sb, "mv /t/one /t/two")
    assert any("other names" in reason for reason in changed(sb, held))


@pytest.mark.parametrize(
    ("how", "undo", "named", "hint"),
    [
        (
            "mv /t/socket /t/moved; touch /t/socket",
            "mv /t/moved /t/socket",
            "/t/moved (bound as /t/socket)",
            "move it back",
        ),
        (
            "for n in $(seq 64); do ln /t/socket /t/$n; done",
            "for n in $(seq 64); do rm /t/$n; done",
            "/t/socket (with other names)",
            "remove the others",
        ),
    ],
    ids=["former name taken", "too many names"],
)
async def test_a_socket_that_cannot_have_its_names_again_is_refused(
    bench: Bench, how: str, undo: str, named: str, hint: str
) -> None:
    """CRIU would remove what has the former name now; and names are searched for while the sandbox is frozen."""
    sb = await bench.maker.create()
    await shell(sb, f"{UNIX[0]}; {how}")
    with pytest.raises(CheckpointFailed, match=re.escape(named)) as caught:
        await bench.save(sb)
    assert hint in caught.value.hint
    await shell(sb, undo)
    saved = await bench.save(sb)
    await bench.kill_and_restore(sb, saved, saved.dump)
    assert await shell(sb, CHECK) == "good\n"


@pytest.mark.parametrize("at", [b"/etc/passwd", b"/proc/1/exe", b"/through/moved"])
async def test_only_a_socket_gives_way_to_the_file_of_a_socket(bench: Bench, at: bytes) -> None:
    sb = await bench.maker.create()
    await shell(sb, f"{UNIX[0]}; mv /t/socket /t/moved; ln -s /t /through")
    saved = await bench.save(sb)
    await sb.kill()
    existing = socket_files.load(saved.capture.dir)
    assert [one.names for one in existing.values()] == [[b"/t/moved"]]
    images = saved.capture.dir.with_name("renamed")
    shutil.copytree(saved.capture.dir, images)
    forged = {name: msgspec.structs.replace(one, names=[at], at=at) for name, one in existing.items()}
    socket_files.write(images, forged)
    tree = bench.snapshot(saved.tree, readonly=False)
    await sb.remount(tree)
    with pytest.raises(RestoreFailed, match="cannot get its names"):
        await bench.checkpointer.restore(sb, images)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x90",
        msgspec.msgpack.encode({b"/a": {"bound": b"/a", "names": []}}),
        msgspec.msgpack.encode({b"/a": {"bound": b"a", "names": [b"/b"]}}),
        msgspec.msgpack.encode({b"/a": {"bound": b"/a", "names": [b"/b\0"], "at": b""}}),
        msgspec.msgpack.encode({b"/a": {"bound": b"/a", "names": [b"/b"], "at": b"/c"}}),
        msgspec.msgpack.encode({b"/a": {"bound": b"/a", "names": [b"/%d" % n for n in range(65)]}}),
        msgspec.msgpack.encode({b"/%d" % n: {"bound": b"/a", "names": [b"/b"]} for n in range(1025)}),
    ],
)
def test_files_of_sockets_that_no_dump_wrote(content: bytes) -> None:
    with pytest.raises(ValueError):
        socket_files.decode(content)


async def test_no_snapshot_has_the_links_that_criu_makes(bench: Bench) -> None:
    sb = await bench.maker.create()
    await shell(sb, ALL["half named"][0])
    names = "find /t | sort"
    before = await shell(sb, names)
    saved = await bench.save(sb)
    upper = saved.tree / "upper"
    assert "/t/second" in before
    result = {f"/{path.relative_to(upper)}" for path in (upper / "t").rglob("*")} | {"/t"}
    assert result == set(before.split())
    assert not list(upper.rglob("*link_remap*"))
    await sb.kill()
    await sb.remount(bench.snapshot(saved.tree, readonly=False))
    await bench.checkpointer.restore(sb, saved.dump)
    assert await shell(sb, names) == before


async def test_a_link_is_made_neither_over_a_file_nor_through_a_link(bench: Bench) -> None:
    sb = await bench.maker.create()
    await shell(sb, ALL["half named"][0])
    saved = await bench.save(sb)
    await sb.kill()
    for number, name in enumerate((b"/t/none", b"/t/../etc/passwd", b"t/second", b"/proc/1/exe", b"/through/second")):
        tree = bench.snapshot(saved.tree, readonly=False)
        (tree / "upper" / "through").symlink_to("/t")
        images = saved.capture.dir.with_name(f"renamed-{number}")
        shutil.copytree(saved.capture.dir, images)
        existing = other_names.decode((images / other_names.FILE).read_bytes())
        assert len(existing) >= 3
        (images / other_names.FILE).write_bytes(msgspec.msgpack.encode(dict.fromkeys(existing, name)))
        await sb.remount(tree)
        with pytest.raises(RestoreFailed):
            await bench.checkpointer.restore(sb, images)
        assert not [path for path in (tree / "upper").rglob("*link_remap*")]


async def test_what_was_linked_for_a_restore_that_failed_goes(bench: Bench) -> None:
    sb = await bench.maker.create()
    await shell(sb, ALL["half named"][0])
    saved = await bench.save(sb)
    await sb.kill()
    tree = bench.snapshot(saved.tree, readonly=False)
    (tree / "upper" / "t" / "two").write_text("of another size")
    await sb.remount(tree)
    with pytest.raises(RestoreFailed, match="bad size"):
        await bench.checkpointer.restore(sb, saved.capture.dir)
    assert not [path for path in (tree / "upper").rglob("*link_remap*")]


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x90", b"\x81\x01\xc4\x01\0"])
def test_names_that_no_dump_wrote(content: bytes) -> None:
    with pytest.raises(ValueError):
        other_names.decode(content)
