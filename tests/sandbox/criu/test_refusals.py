"""What cannot be dumped: the error says which process, what it holds and what to do, and the sandbox goes on."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox import procfs
from sandbox.container.container import Container
from sandbox.criu import dump
from sandbox.criu.gate.hints import hint_for
from sandbox.errors import CheckpointFailed
from tests.support.checkpoint_programs import CHECK, python_program
from tests.support.checkpoint_support import Bench, shell

# Takes a descriptor from the host, and gives everything away that cannot be dumped when it is told to.
HOLDER = python_program("""
libc = ctypes.CDLL(None, use_errno=True)
held = {}
def take():
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind('/t/door'); listener.listen(); open('/t/open', 'w').close()
        with listener.accept()[0] as c: held['fd'] = socket.recv_fds(c, 10, 1)[1][0]
def listen():
    held['listener'] = socket.socket(socket.AF_UNIX); held['listener'].bind('/t/service'); held['listener'].listen()
def relative():
    os.chdir('/t'); held['bound'] = socket.socket(socket.AF_UNIX); held['bound'].bind('../t/./crooked'); os.chdir('/')
def accept(): held['accepted'] = held['listener'].accept()[0]
def ghost():
    held['file'] = open('/t/ghost', 'w+b'); held['file'].write(os.urandom(2 << 20))
    held['file'].flush(); os.unlink('/t/ghost')
def watch():
    held['file'] = open('/t/watched', 'w+b'); held['watch'] = libc.inotify_init1(0)
    libc.inotify_add_watch(held['watch'], b'/t/watched', 2); os.unlink('/t/watched')
def ring(): held['ring'] = libc.syscall(425, 8, ctypes.create_string_buffer(200)); held['errno'] = ctypes.get_errno()
def drop():
    for one in held.values(): one.close() if hasattr(one, 'close') else os.close(one)
    held.clear()
def check():
    if os.path.exists('/t/do'):
        what = open('/t/do').read().strip(); os.unlink('/t/do')
        eval(what)
    return True
serve(check)
""")


async def report(sb: Container, what: str) -> None:
    assert await shell(sb, f"echo '{what}' > /t/do; {CHECK}") == "good\n"


async def refused(bench: Bench, sb: Container) -> CheckpointFailed:
    """The error of a dump; afterwards the sandbox goes on, and a dump without what was held succeeds."""
    with pytest.raises(CheckpointFailed) as caught:
        await bench.save(sb)
    assert list(bench.checkpointer.captures.glob("test-*")) == []
    await report(sb, "drop()")
    await bench.save(sb)
    return caught.value


def names(error: CheckpointFailed, what: str) -> None:
    """The error names the process, here and in the sandbox, what it holds, and has CRIU's own words."""
    said = str(error)
    assert re.search(r"\d+ \[python3, pid \d+ in the sandbox\]", said), said
    assert re.search(what, said), said
    assert "CRIU could not dump the processes: (criu/" in said or "lies outside the sandbox" in said, said


@pytest.fixture
def descriptors() -> Iterator[list[int]]:
    made: list[int] = []
    yield made
    for one in made:
        os.close(one)


async def give(sb: Container, descriptor: int) -> None:
    """Hand a descriptor of the host to the program."""
    giving = asyncio.ensure_future(report(sb, "take()"))
    await shell(sb, "while [ ! -e /t/open ]; do sleep 0.02; done")
    with socket.socket(socket.AF_UNIX) as limiter:
        limiter.connect(f"/proc/{sb.init_pid}/root/t/door")
        socket.send_fds(limiter, [b"x"], [descriptor])
        await giving


async def start(bench: Bench) -> Container:
    sb = await bench.maker.create()
    await shell(sb, HOLDER)
    return sb


async def test_a_socket_bound_by_a_crooked_relative_name(bench: Bench) -> None:
    sb = await start(bench)
    await report(sb, "relative()")
    error = await refused(bench, sb)
    assert "../t/./crooked" in error.message and "tun" not in error.message
    assert "bind it by its whole path" in error.hint


async def test_half_a_socket_pair(bench: Bench, descriptors: list[int]) -> None:
    sb = await start(bench)
    ours, theirs = socket.socketpair()
    descriptors += [ours.detach(), theirs.detach()]
    await give(sb, descriptors[1])
    error = await refused(bench, sb)
    names(error, r"descriptor \d+ of python3")
    assert "Unix socket" in error.hint


async def test_a_connection_from_the_host(bench: Bench) -> None:
    sb = await start(bench)
    await report(sb, "listen()")
    with socket.socket(socket.AF_UNIX) as host:
        host.connect(f"/proc/{sb.init_pid}/root/t/service")
        await report(sb, "accept()")
        error = await refused(bench, sb)
    names(error, r"descriptor \d+ of python3")
    assert "Unix socket" in error.hint


async def test_a_terminal_of_the_host(bench: Bench, descriptors: list[int]) -> None:
    sb = await start(bench)
    descriptors += pty.openpty()
    await give(sb, descriptors[1])
    error = await refused(bench, sb)
    names(error, r"descriptor \d+ \(/dev/pts/\d+\)")
    assert "terminal" in error.hint


async def test_a_file_of_the_host(bench: Bench, descriptors: list[int], tmp_path: Path) -> None:
    sb = await start(bench)
    descriptors.append(os.open(tmp_path, os.O_RDONLY))
    await give(sb, descriptors[0])
    error = await refused(bench, sb)
    names(error, r"fd=\d+ path=/")
    assert "outside" in error.hint


async def test_a_deleted_file_that_is_too_large(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump, "GHOST_LIMIT", 1 << 20)
    sb = await start(bench)
    await report(sb, "ghost()")
    error = await refused(bench, sb)
    names(error, r"ghost file /t/ghost of 2097152")
    assert "deleted file" in error.hint


async def test_a_watched_file_that_is_gone(bench: Bench) -> None:
    sb = await start(bench)
    await report(sb, "watch()")
    error = await refused(bench, sb)
    names(error, r"watches: descriptor \d+ of python3")
    assert "watch" in error.hint


async def test_io_uring_is_not_to_be_had(bench: Bench) -> None:
    sb = await start(bench)
    await report(sb, "ring()")
    assert await shell(sb, "true") == ""
    await report(sb, 'held.pop("ring") == -1 and held.pop("errno") == 1 or 1/0')
    await bench.save(sb)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("Unknown shit 0600 (anon_inode:[io_uring])", "io_uring"),
        ("fsnotify: \tCan't dump that handle", "watch"),
        ("Can't dump ghost file /t/x of 2147483648 size, increase limit", "deleted file"),
        ("External socket is used. Consider using --ext-unix-sk option.", "Unix socket"),
        ("tty: Found dangling tty with sid 0 pgid 0 (ptm) on peer fd 3.", "terminal"),
        ("Can't lookup mount=31 for fd=4 path=/tmp/x", "outside"),
        ("Session leader 1 is outside", "session"),
        ("Can't write to pages-1.img: No space left on device", "memory for captures"),
    ],
)
def test_hints(words: str, hint: str) -> None:
    assert hint in hint_for(words)


MANY = "for n in range(3): "
SPARSE = {
    "descriptors": f"import os\n{MANY}os.ftruncate(os.memfd_create('m'), 100 << 30)",
    "mapped in part": f"import mmap, os\nkept = []\n{MANY}\n fd = os.memfd_create('m'); os.ftruncate(fd, 100 << 30)\n"
    " kept.append(mmap.mmap(fd, 4096)); os.close(fd)",
    "mappings": f"import mmap\nkept = []\n{MANY}kept.append(mmap.mmap(-1, 100 << 30, mmap.MAP_SHARED | 0x4000))",
    "segments": f"import ctypes\n{MANY}ctypes.CDLL(None).shmget(0, ctypes.c_size_t(100 << 30), 0o11600)",
}


@pytest.mark.parametrize("kind", SPARSE)
async def test_sparse_memory_is_not_looked_through(bench: Bench, kind: str) -> None:
    """CRIU would look at each page that nobody ever touched, for minutes if there are many."""
    sb = await bench.maker.create()
    program = f"{SPARSE[kind]}\nopen('/t/made', 'w').close()\nimport time; time.sleep(9999)"
    begin = 'mkdir -p /t; setsid python3 -c "$0" >/dev/null 2>&1 & echo $! > /t/pid; until [ -e /t/made ]; do :; done'
    begun = await sb.exec(["sh", "-c", begin, program])
    assert begun.exit_code == 0, begun
    with pytest.raises(CheckpointFailed, match="its processes name 300 GiB of shared memory") as caught:
        await bench.save(sb)
    assert "as large as they are used" in (caught.value.hint or "")
    assert await shell(sb, "kill -0 $(cat /t/pid) && echo on") == "on\n"


async def test_a_program_that_runs_from_memory(bench: Bench) -> None:
    """CRIU dumps it, and then finds no file to restore it from."""
    sb = await bench.maker.create()
    program = (
        "import os; m = os.memfd_create('x', 0); os.write(m, open('/bin/sleep', 'rb').read())\n"
        "os.execv(f'/proc/self/fd/{m}', ['sleep', '1000'])"
    )
    begin = 'setsid python3 -c "$0" >/dev/null 2>&1 & until readlink /proc/$!/exe | grep -q memfd; do :; done; echo $!'
    pid = (await sb.exec(["sh", "-c", begin, program])).stdout.decode().strip()
    with pytest.raises(CheckpointFailed, match="runs a program from memory") as caught:
        await bench.save(sb)
    assert "from a file" in (caught.value.hint or "")
    await shell(sb, f"kill {pid}; while [ -e /proc/{pid} ]; do :; done")
    await bench.save(sb)


async def test_a_segment_that_the_kernel_would_not_make_again_is_refused(bench: Bench) -> None:
    """It costs nothing while nobody writes to it. CRIU makes it without the flag that let it be made."""
    sb = await bench.maker.create()
    call = "python3 -c 'import ctypes; c = ctypes.CDLL(None); exit({} < 0)'"
    await shell(sb, call.format("c.shmget(0x77, ctypes.c_size_t(1 << 38), 0o11600)"))
    with pytest.raises(CheckpointFailed, match=r"key 0x77.*larger than the memory"):
        await bench.save(sb)
    await shell(sb, call.format("c.shmctl(c.shmget(0x77, 0, 0), 0, None)"))
    await bench.save(sb)


async def test_an_epoll_whose_file_only_another_process_has_is_named(bench: Bench) -> None:
    sb = await bench.maker.create()
    program = python_program("""
r, w = os.pipe(); ep = select.epoll(); ep.register(r, select.EPOLLIN)
if os.fork() == 0:
    while True: signal.pause()
os.close(r)
serve(lambda: True)
""")
    await shell(sb, program)
    with pytest.raises(CheckpointFailed) as caught:
        await bench.save(sb)
    assert "EPOLL_CTL_DEL" in caught.value.hint
    assert await shell(sb, CHECK) == "good\n"


async def test_a_process_with_as_many_mappings_as_it_may_have_is_named(bench: Bench) -> None:
    sb = await bench.maker.create()
    if (limit := int(await shell(sb, "cat /proc/sys/vm/max_map_count"))) > 1 << 17:
        pytest.skip("takes too long with so many mappings")
    program = """
libc = ctypes.CDLL(None); area = mmap.mmap(-1, LIMIT * 4096)
start = ctypes.addressof(ctypes.c_char.from_buffer(area))
for page in range(0, LIMIT, 2):
    if libc.mprotect(ctypes.c_void_p(start + page * 4096), 4096, 1): break
serve(lambda: True)
"""
    await shell(sb, python_program(program.replace("LIMIT", str(limit + 500))))
    with pytest.raises(CheckpointFailed) as caught:
        await bench.save(sb)
    assert "vm.max_map_count" in caught.value.hint
    assert await shell(sb, CHECK) == "good\n"


async def test_a_process_with_as_many_open_files_as_it_may_have(bench: Bench) -> None:
    """Its limit is raised for the dump, which without CAP_SYS_RESOURCE the host does not allow: then it is named."""
    sb = await bench.maker.create()
    program = python_program("""
import resource
def fill():
    resource.setrlimit(resource.RLIMIT_NOFILE, (50, 50))
    while True: os.dup(0)
def check():
    if 'thread' not in globals(): globals()['thread'] = threading.Thread(target=fill); thread.start(); thread.join()
    return len(os.listdir('/proc/self/task')) == 1 and resource.getrlimit(resource.RLIMIT_NOFILE) == (50, 50)
serve(check)
""")
    await shell(sb, f"{program}; {CHECK}")
    try:
        saved = await bench.save(sb)
    except CheckpointFailed as error:
        assert "ulimit -n" in error.hint
        assert int(procfs.status(os.getpid(), "CapEff") or "", 16) >> 24 & 1 == 0  # CAP_SYS_RESOURCE
        return
    await bench.kill_and_restore(sb, saved, saved.dump)
    assert await shell(sb, CHECK) == "good\n"
