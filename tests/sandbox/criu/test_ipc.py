"""System V objects and watches as services of other users than root make them."""

from __future__ import annotations

import pytest

from tests.support.checkpoint_programs import CHECK, python_program
from tests.support.checkpoint_support import Bench, shell

OBJECTS = python_program("""
libc = ctypes.CDLL(None, use_errno=True)
os.makedirs('/t', exist_ok=True); os.chmod('/t', 0o777)
os.setresgid(1001, 1001, 1001); os.setresuid(1000, 1000, 1000)
segment = libc.shmget(7001, 4096, 0o1600); queue = libc.msgget(7002, 0o1600); semaphores = libc.semget(7003, 2, 0o1600)
libc.shmat.restype = ctypes.c_void_p
memory = libc.shmat(segment, None, 0)
ctypes.memmove(memory, b'kept', 4)
message = struct.pack('l5s', 3, b'queued'[:5])
assert min(segment, queue, semaphores) >= 0 and not libc.msgsnd(queue, message, 5, 0)
libc.semctl(semaphores, 1, 16, 5)
def check():
    mine = libc.shmget(7001, 4096, 0o600), libc.msgget(7002, 0o600), libc.semget(7003, 2, 0o600)
    value = libc.semctl(semaphores, 1, 12)
    return mine == (segment, queue, semaphores) and ctypes.string_at(memory, 4) == b'kept' and value == 5
serve(check)
""")


async def test_objects_of_another_user(bench: Bench) -> None:
    sb = await bench.maker.create()
    await shell(sb, OBJECTS)
    for _ in range(2):
        saved = await bench.save(sb)
        await bench.kill_and_restore(sb, saved, saved.dump)
        assert await shell(sb, CHECK) == "good\n"


WATCH = """
libc = ctypes.CDLL(None, use_errno=True)
watcher = libc.inotify_init1(0)
watches = [libc.inotify_add_watch(watcher, path, 0x100) for path in PATHS]
assert min(watches) > 0
made = iter(range(99))
def check():
    for path, watch in zip(PATHS, watches):
        name = b'new%d' % next(made)
        open(os.path.join(path, name), 'w').close()
        found, _, _, size = struct.unpack_from('iIII', event := os.read(watcher, 4096))
        if found != watch or event[16:].rstrip(b'\\0') != name: return False
    return True
serve(check)
"""


@pytest.mark.parametrize("paths", [[b"/"], [b"/", b"/etc"], [b"/usr/lib", b"/"], [b"/t"]])
async def test_a_watch_on_the_root(bench: Bench, paths: list[bytes]) -> None:
    sb = await bench.maker.create()
    await shell(sb, python_program(WATCH.replace("PATHS", repr(paths))))
    for _ in range(2):
        saved = await bench.save(sb)
        await bench.kill_and_restore(sb, saved, saved.dump)
        assert await shell(sb, CHECK) == "good\n"
