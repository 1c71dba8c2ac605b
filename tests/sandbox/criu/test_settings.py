"""What CRIU does not carry: looked at without a trace, refused where it is not of a dump, put back."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from sandbox.criu.carried import datagrams, settings
from sandbox.criu.carried.socket_options import differing, put_back
from tests.support.checkpoint_programs import CHECK, python_program
from tests.support.checkpoint_support import Bench, shell

# Its reader is behind: the kernel could not send all of it. When asked, all of it must still arrive, in order.
BEHIND = python_program("""
import contextlib, socket, hashlib
listener = socket.create_server(('127.0.0.1', 0))
writer = socket.create_connection(listener.getsockname())
reader = listener.accept()[0]
writer.setblocking(False)
sent = hashlib.sha256()
with contextlib.suppress(BlockingIOError):
    while True:
        block = os.urandom(50000)
        sent.update(block[:writer.send(block)])
def check():
    writer.shutdown(socket.SHUT_WR)
    got = hashlib.sha256()
    while part := reader.recv(1 << 20):
        got.update(part)
    return got.digest() == sent.digest()
serve(check)
""")


async def test_bytes_that_were_not_sent_yet_arrive(bench: Bench) -> None:
    sb = await bench.maker.create()
    await shell(sb, BEHIND)
    saved = await bench.save(sb)
    await sb.kill()
    await sb.remount(bench.snapshot(saved.tree, readonly=False))
    await bench.checkpointer.restore(sb, saved.dump)
    assert await shell(sb, CHECK) == "good\n"


@contextlib.contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as two,
    ):
        one.bind(("127.0.0.1", 0))
        yield one, two


def test_a_look_takes_no_datagram() -> None:
    with pair() as (receiver, sender):
        assert datagrams.unread(receiver) == []
        for content in (b"one", b"", b"three", b""):
            sender.sendto(content, receiver.getsockname())
        observed = datagrams.unread(receiver)
        assert [one.content for one in observed] == [b"one", b"", b"three", b""]
        assert {one.port for one in observed} == {sender.getsockname()[1]}
        assert receiver.getsockopt(socket.SOL_SOCKET, 42) == -1  # SO_PEEK_OFF
        assert [receiver.recv(9) for _ in observed] == [b"one", b"", b"three", b""]


def test_datagrams_are_given_back_with_their_sender() -> None:
    with pair() as (receiver, _):
        waiting = [datagrams.Datagram("198.18.7.7", 4000, b"from afar"), datagrams.Datagram("127.0.0.1", 5, b"near")]
        datagrams.deliver(os.getpid(), datagrams.packets(receiver, waiting))
        receiver.settimeout(10)
        assert [receiver.recvfrom(99) for _ in waiting] == [
            (b"from afar", ("198.18.7.7", 4000)),
            (b"near", ("127.0.0.1", 5)),
        ]


def test_nothing_is_sent_to_addresses_of_others() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.setsockopt(socket.IPPROTO_IP, 15, 1)  # IP_FREEBIND
        one.bind(("203.0.113.9", 0))
        ((target, _),) = datagrams.packets(one, [datagrams.Datagram("198.18.7.7", 1, b"x")])
    assert target == "203.0.113.9"
    assert not datagrams._is_own(target)
    assert datagrams._is_own("127.0.0.1")


def test_options_are_found_and_put_back() -> None:
    with pair() as (one, two):
        assert differing(one) == {}
        one.setsockopt(socket.SOL_SOCKET, 35, 1)  # SO_TIMESTAMPNS
        one.setsockopt(socket.IPPROTO_IP, 10, 2)  # IP_MTU_DISCOVER
        result = differing(one)
        assert set(result) == {"SO_TIMESTAMPNS", "IP_MTU_DISCOVER"}
        assert put_back(two, {**result, "SO_MARK": b"\1\0\0\0"}) == []  # not one of ours: not set
        assert differing(two) == result
        assert put_back(two, {"IP_MTU_DISCOVER": b"\x77\0\0\0"}) == ["IP_MTU_DISCOVER"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"tasks": [{"thread": "1"}]}),
        msgspec.msgpack.encode({"descriptors": [{"process": 1, "number": 1, "groups": [[1, "10.0.0.1"]]}]}),
        msgspec.msgpack.encode({"descriptors": [{"process": 1, "number": 1, "groups": [[-1, "224.0.0.9"]]}]}),
        msgspec.msgpack.encode({"descriptors": [{"process": 1, "number": 1, "unread": [["nobody", 1, b""]]}]}),
        msgspec.msgpack.encode({"descriptors": [{"process": 1, "number": 1, "unread": [["10.0.0.1", 1 << 16, b""]]}]}),
        msgspec.msgpack.encode(
            {"descriptors": [{"process": 1, "number": 1, "unread": [["10.0.0.1", 1, bytes(70000)]]}]}
        ),
    ],
)
def test_settings_that_no_dump_wrote(content: bytes) -> None:
    with pytest.raises(ValueError):
        settings.decode(content)


def test_settings_pass_through_their_image(tmp_path: Path) -> None:
    assert not settings.load(tmp_path)
    result = settings.KernelSettings(tasks=[settings.TaskSettings(thread=3, headroom=7, processors=[0])])
    settings.write(tmp_path, result)
    assert settings.load(tmp_path) == result
    assert settings.facts(tmp_path) == {"thread 3 settings": {"thread": 3, "headroom": 7, "processors": [0]}}


def test_a_process_that_died_is_told() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    try:
        with pytest.raises(settings.ProcessVanished), settings.looking_at([pid], lambda: [pid]):
            pass
    finally:
        os.waitpid(pid, 0)
