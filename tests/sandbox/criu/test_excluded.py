"""Checkpoints without a process: what is left of those that it started, restored with CRIU and compared."""

from __future__ import annotations

import pytest

from sandbox.container.container import Container
from sandbox.procfs import host_pid, task_of
from tests.support.checkpoint_programs import CHECK, python_program
from tests.support.checkpoint_support import Bench, shell

# Each is what the owner's process does with a child before it waits; the child then serves checks.
HELD = {
    "nothing": ("", "", "True"),
    "a session of its own": ("", "os.setsid()", "True"),
    "a group of its own": ("", "os.setpgid(0, 0)", "True"),
    "grandchildren": ("", "other = os.fork()\nif not other:\n    time.sleep(1000)", "os.kill(other, 0) is None"),
    "a pipe that it reads": ("r, w = os.pipe()", "os.close(r)", "os.write(w, b'x') == 1"),
    "a pipe that it writes": ("r, w = os.pipe()", "os.close(w)", "os.read(r, 1) == b''"),
    "a pipe, both ends": ("r, w = os.pipe(); os.write(w, b'in it')", "", "os.read(r, 5) == b'in it'"),
    "a stream": ("a, b = socket.socketpair()", "a.close(); a = None", "b.recv(1) == b''"),
    "what lies in a stream": (
        "a, b = socket.socketpair(); a.send(b'to it'); b.send(b'from it')",
        "a.close(); a = None",
        "b.recv(5) in (b'to it', b'')",
    ),
    "datagrams": ("a, b = socket.socketpair(type=socket.SOCK_DGRAM)", "a.close(); a = None", "b.fileno() > 0"),
    "packets": ("a, b = socket.socketpair(type=socket.SOCK_SEQPACKET)", "a.close(); a = None", "b.recv(1) == b''"),
    "a server that it was": (
        "s = socket.socket(socket.AF_UNIX); s.bind('/t/s'); s.listen(); b = socket.socket(socket.AF_UNIX)",
        "s.close(); s = None; b.connect('/t/s')",
        "b.recv(1) == b''",
    ),
    "a connection": (
        "s = socket.create_server(('127.0.0.1', 99)); b = socket.create_connection(s.getsockname()); a, _ = s.accept()",
        "a.close(); s.close(); a = s = None",
        "b.recv(1) == b'' and not b.close()",
    ),
    "a lock": (
        "l = open('/t/locked', 'w'); fcntl.flock(l, fcntl.LOCK_EX)",
        "",
        "subprocess.run(['flock', '-n', '/t/locked', 'true']).returncode == 1",
    ),
    "a file without a name": (
        "f = open('/t/f', 'w+b'); f.write(b'kept'); f.flush(); os.unlink('/t/f')",
        "f.seek(0)",
        "f.seek(0) == 0 and f.read() == b'kept'",
    ),
    "a file that never had a name": (
        "import tempfile; f = tempfile.TemporaryFile(dir='/t'); f.write(b'kept'); f.flush()",
        "f.seek(0)",
        "f.seek(0) == 0 and f.read() == b'kept'",
    ),
    "shared memory": ("m = mmap.mmap(-1, 4096); m[:1] = b'x'", "", "m[:1] == b'x'"),
    "a terminal": ("import pty; a, b = pty.openpty()", "os.close(a)", "not os.isatty(b)"),
    "its terminal": (
        "import pty; a, b = pty.openpty()",
        "os.close(a); os.setsid(); fcntl.ioctl(b, 0x540E, 0)",
        "not os.isatty(b)",
    ),
}
# What only it holds: none of it is in the images, and none of it is in the way.
OWN = """
import tempfile
own = [open('/t/session', 'a'), os.memfd_create('own'), os.eventfd(1), tempfile.TemporaryFile(dir='/t')]
own.append(socket.create_server(('127.0.0.1', 98)))
own[3].write(b'x' * 100_000); own[3].flush(); fcntl.flock(own[0], fcntl.LOCK_EX)
secret = bytearray(b'the secret of the agent' * 10_000)
for _ in range(3): threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
if not os.fork(): os._exit(3)
time.sleep(0.01)
"""


def program(held: str) -> str:
    before, child, good = HELD[held]
    indented = "\n".join("    " + line for line in child.splitlines())
    return (
        python_program(
            f"{before}\nif os.fork() == 0:\n    pass\n{indented}\n    serve(lambda: {good})\n{OWN}\n"
            "open('/t/owner', 'w').write(str(os.getpid()))\ntime.sleep(1000)\n"
        )
        + "; while [ ! -s /t/owner ]; do sleep 0.05; done"
    )


async def owner_of(sb: Container) -> int:
    """The number in the sandbox of the owner's process, which is apart from now on."""
    number = int(await shell(sb, "cat /t/owner"))
    pid = host_pid(number, sb.tasks())
    assert pid is not None
    task = task_of(pid)
    assert task is not None
    assert sb.excluded.add(pid, task.started)
    return number


@pytest.mark.parametrize("held", list(HELD))
async def test_what_it_started_lives_on_without_it(bench: Bench, held: str) -> None:
    sb = await bench.maker.create()
    await shell(sb, program(held))
    number = await owner_of(sb)
    saved = await bench.save(sb)
    for source in (saved.capture.dir, saved.dump):
        await sb.kill()
        await sb.remount(bench.snapshot(saved.tree, readonly=False))
        (sb.tree / "upper" / "t" / "session").write_text("another turn wrote more")
        report = await bench.checkpointer.restore(sb, source, verify=True)
        assert report.verified
        assert host_pid(number, sb.tasks()) is None
        assert await shell(sb, CHECK) == "good\n"
