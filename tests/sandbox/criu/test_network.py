"""Sockets and links that lead out of a sandbox: dumped, and what becomes of them in a restore."""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.criu import tcp
from sandbox.criu.tcp import CLOSE, CLOSE_WAIT, ESTABLISHED, Connection
from tests.support.checkpoint_programs import ALL, CHECK, TCP, python_program
from tests.support.checkpoint_support import Bench, shell

T = TypeVar("T")
CLONE_NEWNET = 0x40000000

# Talks to a server that is no part of the sandbox, as an agent does with the gateway: it waits for the answer.
AGENT = (
    python_program("""
def call(wait):
    with socket.create_connection(('127.0.0.1', 7000)) as c:
        c.sendall(b'question')
        if wait: open('/t/waiting', 'w').close()
        return c.recv(100)
def agent():
    while True:
        try: said = call(True)
        except OSError as error: said = repr(error).encode()
        with open('/t/said', 'a') as log: log.write(repr(said) + '\\n')
        if said.startswith(b'answer'): return
threading.Thread(target=agent, daemon=True).start()
serve(lambda: True)
""")
    + "; while [ ! -e /t/waiting ]; do sleep 0.02; done"
)


def inside(netns: Path, function: Callable[[], T]) -> T:
    """Run `function` in a network namespace, on a thread that is thrown away."""
    result: list[Any] = []

    def enter() -> None:
        fd = os.open(netns, os.O_RDONLY | os.O_CLOEXEC)
        try:
            assert ctypes.CDLL(None, use_errno=True).setns(fd, CLONE_NEWNET) == 0
            result.append(function())
        finally:
            os.close(fd)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return result[0]  # type: ignore[no-any-return]


@pytest.fixture
def outside() -> Iterator[Callable[[Path], socket.socket]]:
    """Makes listeners of ours in a sandbox's namespace."""
    made: list[socket.socket] = []

    def listen(netns: Path) -> socket.socket:
        made.append(inside(netns, lambda: socket.create_server(("127.0.0.1", 7000))))
        made[-1].settimeout(120)
        return made[-1]

    yield listen
    for one in made:
        one.close()


def answer(listener: socket.socket, text: bytes) -> None:
    connection, _ = listener.accept()
    with connection:
        assert connection.recv(100) == b"question"
        connection.sendall(text)


Listen = Callable[[Path], socket.socket]


async def test_a_connection_to_the_outside_comes_back_closed(bench: Bench, outside: Listen) -> None:
    sb = await bench.maker.create()
    listener = outside(sb.netns)
    await shell(sb, AGENT)
    connection, _ = await asyncio.to_thread(listener.accept)
    saved = await bench.save(sb)
    # Left running: the connection lives and is answered.
    connection.sendall(b"answer one")
    assert "answer one" in await until_answered(sb)
    connection.close()
    namespace = os.stat(sb.netns).st_ino
    for source in (saved.capture.dir, saved.dump):
        report = await bench.kill_and_restore(sb, saved, source)
        assert report.closed == ["127.0.0.1:7000"]
        assert os.stat(sb.netns).st_ino == os.stat(f"/proc/{sb.init_pid}/ns/net").st_ino == namespace
        await asyncio.to_thread(answer, listener, b"answer two")  # the agent asks again
        result = await until_answered(sb)
        assert "b''" in result  # the end of the old connection, then the new answer
        assert "answer two" in result


# Listens without SO_REUSEADDR, and is the first to close: each connection leaves its port in TIME_WAIT.
CLOSES_FIRST = """
v4 = socket.socket(); v4.bind(('127.0.0.1', 7001)); v4.listen()
v6 = socket.socket(socket.AF_INET6); v6.bind(('::1', 7002)); v6.listen()
both = socket.socket(socket.AF_INET6); both.bind(('::', 7003)); both.listen()
def check():
    for listener, host in ((v4, '127.0.0.1'), (v6, '::1'), (both, '127.0.0.1')):
        with socket.create_connection((host, listener.getsockname()[1])) as c:
            listener.accept()[0].close()
            if c.recv(1): return False
    return True
serve(check)
"""


async def test_a_port_is_bound_again_although_a_connection_has_just_ended_there(bench: Bench, outside: Listen) -> None:
    sb = await bench.maker.create()
    listener = outside(sb.netns)
    await shell(sb, python_program(CLOSES_FIRST))
    saved = await bench.save(sb)
    namespace = os.stat(sb.netns).st_ino
    for source in (saved.capture.dir, saved.dump):
        assert await shell(sb, CHECK) == "good\n"
        lingering = await asyncio.to_thread(inside, sb.netns, lambda: Path("/proc/thread-self/net/tcp").read_text())
        assert ":1B59 " in lingering and " 06 " in lingering  # port 7001, TIME_WAIT
        await bench.kill_and_restore(sb, saved, source)
        assert os.stat(sb.netns).st_ino == namespace
    assert await shell(sb, CHECK) == "good\n"
    # What the host has there stays.
    with await asyncio.to_thread(inside, sb.netns, lambda: socket.create_connection(("127.0.0.1", 7000))):
        (await asyncio.to_thread(listener.accept))[0].close()


async def until_answered(sb: Any) -> str:
    return await shell(sb, "while ! grep answer /t/said > /dev/null 2>&1; do sleep 0.02; done; cat /t/said")


async def test_forks_have_their_own_gateway(bench: Bench, outside: Listen) -> None:
    sb = await bench.maker.create()
    listener = outside(sb.netns)
    await shell(sb, AGENT)
    connection, _ = await asyncio.to_thread(listener.accept)
    saved = await bench.save(sb)
    child = await bench.maker.prepare(tree=bench.snapshot(saved.tree, readonly=False), hostname="child")
    own = outside(child.netns)
    await bench.checkpointer.restore(child, saved.dump, verify=True)
    await asyncio.to_thread(answer, own, b"answer of its own")
    assert "answer of its own" in await until_answered(child)
    connection.sendall(b"answer")
    await until_answered(sb)
    connection.close()


async def test_connections_inside_live_on_in_a_new_namespace_that_others_follow(bench: Bench, outside: Listen) -> None:
    sb = await bench.maker.create()
    both = TCP[0].replace(
        "first = True\nserve", "out = socket.create_connection(('127.0.0.1', 7000)); first = True\nserve"
    )
    listener = outside(sb.netns)
    await shell(sb, both)
    saved = await bench.save(sb)
    followed: list[tuple[Path, bool]] = []
    sb.followers["test"] = lambda netns: followed.append((netns, outside(netns).fileno() >= 0))
    before = os.stat(sb.netns).st_ino
    for source in (saved.capture.dir, saved.dump):
        report = await bench.kill_and_restore(sb, saved, source)
        assert report.closed == ["127.0.0.1:7000"]
        assert await shell(sb, CHECK) == "good\n"
        assert os.stat(sb.netns).st_ino == os.stat(f"/proc/{sb.init_pid}/ns/net").st_ino != before
        reach = "python3 -c \"import socket; socket.create_connection(('127.0.0.1', 7000))\""
        await shell(sb, reach)  # the listener that followed
        before = os.stat(sb.netns).st_ino
    assert followed == [(sb.netns, True)] * 2
    listener.close()
    # It is still the sandbox's when its processes are gone.
    await sb.kill()
    assert os.stat(sb.netns).st_ino == before


async def test_what_was_received_from_one_who_is_gone_can_be_read(bench: Bench) -> None:
    sb = await bench.maker.create()
    await shell(
        sb,
        python_program("""
listener = socket.create_server(('127.0.0.1', 80)); client = socket.create_connection(('127.0.0.1', 80))
server, _ = listener.accept(); server.sendall(b'last words'); server.close(); listener.close()
got = b''
def check():
    global got
    try:
        while chunk := client.recv(100): got += chunk
    except BrokenPipeError: pass
    return got == b'last words'
serve(check)
"""),
    )
    saved = await bench.save(sb)
    for source in (saved.capture.dir, saved.dump):
        report = await bench.kill_and_restore(sb, saved, source)
        assert report.closed == []
        assert await shell(sb, CHECK) == "good\n"
    for _ in range(2):  # now all is read, and what was written was refused
        saved = await bench.save(sb)
        await bench.kill_and_restore(sb, saved, saved.dump)
        assert await shell(sb, CHECK) == "good\n"


# Ends of connections inside that nothing can travel over any more, as a server has them whose clients have left.
ENDED = """
def pair(family, host):
    listener = socket.create_server((host, 0), family=family)
    client = socket.create_connection(listener.getsockname()[:2])
    return listener, client, listener.accept()[0]
def closed_by_both(listener, client, server):
    server.close(); client.shutdown(socket.SHUT_WR)
    return [listener, client]
def shut_by_both(listener, client, server):
    client.shutdown(socket.SHUT_WR); server.shutdown(socket.SHUT_WR)
    return [listener, client, server]
def reset(listener, client, server):
    server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0)); server.close()
    return [listener, client]
def reset_unread(listener, client, server):
    server.sendall(b'last words'); client.sendall(b'nobody reads this'); server.close()
    return [listener, client]
def refused(listener, client, server):
    gone = listener.getsockname()[:2]
    for one in (listener, client, server): one.close()
    once_more = socket.socket(listener.family); once_more.setblocking(False); once_more.connect_ex(gone)
    return [once_more]
places = ((socket.AF_INET, '127.0.0.1'), (socket.AF_INET6, '::1'))
made = [END(*pair(*place)) for place in places]
def check():
    for *_, ended in made:
        ended.settimeout(60)
        got = b''
        try:
            while chunk := ended.recv(100): got += chunk
        except ConnectionError: pass
        if END is reset_unread and ended.fileno() not in seen and got != b'last words': return False
        seen.add(ended.fileno())
        try:
            for _ in range(3): ended.send(b'x')
            return False
        except ConnectionError: pass
    return True
seen = set()
serve(check)
"""


@pytest.mark.parametrize(("bound", "reached"), [("::1", "::1"), ("::", "::1"), ("::", "127.0.0.1")])
async def test_connections_over_version_6(bench: Bench, bound: str, reached: str) -> None:
    sb = await bench.maker.create()
    program = f"""
listener = socket.create_server(('{bound}', 80), family=socket.AF_INET6, dualstack_ipv6='{bound}' == '::')
family = socket.AF_INET6 if ':' in '{reached}' else socket.AF_INET
client = socket.create_connection(('{reached}', 80)); server, _ = listener.accept()
datagrams = socket.socket(family, socket.SOCK_DGRAM); datagrams.connect(('{reached}', 9))
def check():
    server.sendall(b'back')
    return client.recv(4, socket.MSG_WAITALL) == b'back'
serve(check)
"""
    await shell(sb, python_program(program))
    for _ in range(2):
        saved = await bench.save(sb)
        await bench.kill_and_restore(sb, saved, saved.dump)
        assert await shell(sb, CHECK) == "good\n"


@pytest.mark.parametrize("end", ["closed_by_both", "shut_by_both", "reset", "reset_unread", "refused"])
async def test_a_connection_that_is_over_is_restored_as_one(bench: Bench, end: str) -> None:
    sb = await bench.maker.create()
    await shell(sb, python_program(ENDED.replace("END", end)))
    saved = await bench.save(sb)
    child = await bench.maker.prepare(tree=bench.snapshot(saved.tree, readonly=False), hostname="child")
    await bench.checkpointer.restore(child, saved.dump, verify=True, reference=saved.tree)
    assert await shell(child, CHECK) == "good\n"
    for _ in range(2):  # what was restored is checkpointed and restored again
        report = await bench.kill_and_restore(sb, saved, saved.dump)
        assert report.closed == []
        assert await shell(sb, CHECK) == "good\n"
        saved = await bench.save(sb)


async def test_a_follower_that_fails_fails_the_restore(bench: Bench) -> None:
    sb = await bench.maker.create()
    await shell(sb, ALL["tcp"][0])
    saved = await bench.save(sb)

    def refuse(_netns: Path) -> None:
        raise OSError("no link")

    sb.followers["test"] = refuse
    with pytest.raises(OSError, match="no link"):
        await bench.kill_and_restore(sb, saved, saved.capture.dir)
    assert sb.tasks() == []
    sb.followers.clear()
    await bench.kill_and_restore(sb, saved, saved.capture.dir)
    assert await shell(sb, CHECK) == "good\n"


async def test_a_sandbox_with_a_link_to_the_host(bench: Bench) -> None:
    sb = await bench.maker.create()
    assert sb.init_pid is not None
    link = f"pgt{sb.init_pid % 100000}"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    def connect() -> None:
        ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(sb.init_pid))
        ip("addr", "add", "10.231.0.1/30", "dev", link)
        ip("link", "set", link, "up")
        for words in (["addr", "add", "10.231.0.2/30", "dev", "eth0"], ["link", "set", "eth0", "up"]):
            subprocess.run(["nsenter", f"--net={sb.netns}", "ip", *words], check=True)

    await asyncio.to_thread(connect)
    try:
        await shell(sb, ALL["listener"][0].replace("'127.0.0.1', 8080))", "'10.231.0.2', 8080))", 1).replace(
            "create_connection(('127.0.0.1', 8080))", "create_connection(('10.231.0.2', 8080))"))  # fmt: skip
        saved = await bench.save(sb)
        for source in (saved.capture.dir, saved.dump):
            await bench.kill_and_restore(sb, saved, source)
            assert await shell(sb, CHECK) == "good\n"
    finally:
        await asyncio.to_thread(ip, "link", "del", link)


# ---------------------------------------------------------------- the decision


def one(number: int, state: int, local: int, remote: int, unread: int = 0) -> Connection:
    return Connection(number, state, ((1,), local), ((1,), remote), unread)


@pytest.mark.parametrize(
    ("result", "closed"),
    [
        ([], []),
        ([one(1, ESTABLISHED, 80, 4000), one(2, ESTABLISHED, 4000, 80)], []),
        ([one(1, ESTABLISHED, 80, 4000)], [1]),
        ([one(1, ESTABLISHED, 80, 4000), one(2, ESTABLISHED, 4000, 80), one(3, ESTABLISHED, 4001, 80)], [3]),
        ([one(1, CLOSE_WAIT, 80, 4000)], [1]),
        ([one(1, CLOSE_WAIT, 80, 4000, unread=3)], []),
        ([one(1, ESTABLISHED, 80, 4000, unread=3)], [1]),
        ([one(1, CLOSE, 80, 4000), one(2, CLOSE, 4000, 80)], [1, 2]),
        ([one(1, CLOSE, 80, 4000, unread=3)], []),
        ([one(1, CLOSE, 80, 4000), one(2, ESTABLISHED, 4000, 80)], [1, 2]),
    ],
)
def test_what_is_closed(result: list[Connection], closed: list[int]) -> None:
    assert [one.ino for one in tcp.to_close(result)] == closed


@given(st.lists(st.tuples(st.integers(1, 11), st.integers(1, 5), st.integers(1, 5), st.integers(0, 3))))
def test_both_ends_inside_are_never_closed(states: list[tuple[int, int, int, int]]) -> None:
    result = [one(i, state, a, b, n) for i, (state, a, b, n) in enumerate(states)]
    closed = {one.ino for one in tcp.to_close(result)}
    ends = {(one.local, one.remote) for one in result if one.state != CLOSE}
    for connection in result:
        if connection.state == CLOSE:
            assert (connection.ino in closed) == (connection.unread == 0)
        elif (connection.remote, connection.local) in ends:
            assert connection.ino not in closed
        elif connection.unread == 0:
            assert connection.ino in closed


def test_addresses() -> None:
    mapped = tcp.address([0, 0, 0xFFFF0000, 0x0100007F], 80)
    assert mapped == tcp.address([0x0100007F], 80)
    assert tcp.readable(mapped) == "127.0.0.1:80"
    assert tcp.readable(tcp.address([0, 0, 0, 0x01000000], 22)) == "[::1]:22"
    record = SimpleNamespace(src_addr=[0, 0, 0xFFFF0000, 9], dst_addr=[0x08080808])
    assert tcp.keep_inside(record)
    assert (record.src_addr[-1], record.dst_addr) == (0x0100007F, [0x0100007F])
    assert not tcp.keep_inside(record)
    assert [tcp.is_ipv6(words) for words in ([1], [0] * 4, [0, 0, 0, 1], [0, 0, 0xFFFF0000, 1])] == [0, 0, 1, 0]
    record = SimpleNamespace(state=1, src_port=5, dst_port=6, shutdown=0, src_addr=[7], dst_addr=[8, 9, 9, 9])
    tcp.close(record)
    assert (record.state, record.src_port, record.dst_port, record.shutdown) == (7, 0, 0, 1)
    assert (record.src_addr, record.dst_addr) == ([0], [0, 0, 0, 0])
