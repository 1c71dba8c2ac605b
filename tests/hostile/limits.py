"""Exhaustion: of processes, memory, descriptors, terminals, processors and disk."""

from __future__ import annotations

import contextlib

from sandbox.errors import PagurusError
from sandbox.messages import Limits
from tests.hostile.act import Scene, act, judge, run, unharmed


@act("fork bomb")
async def _fork_bomb(scene: Scene) -> str:
    bomb = (
        "refused = 0\nwhile True:\n try: os.fork()\n except OSError:\n"
        "  if not refused: print('tried', flush=True)\n  refused = 1"
    )
    done = await run(scene, bomb, timeout=1.5)
    if len(scene.attacker.tasks()) > 64:
        return f"{len(scene.attacker.tasks())} processes"
    return judge(done) or await unharmed(scene)


@act("thread bomb")
async def _thread_bomb(scene: Scene) -> str:
    done = await run(
        scene,
        "import threading\nn = 0\ntry:\n"
        " for n in range(5000): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "except RuntimeError: print('tried', n, flush=True)\nos._exit(0)",
    )
    return judge(done) or await unharmed(scene)


@act("take all memory")
async def _memory(scene: Scene) -> str:
    done = await run(scene, "print('tried', flush=True)\nx = bytearray(4 << 30)\nprint('BREACH')", timeout=60)
    return judge(done) or ("" if done.oom_killed else "not reported as out of memory") or await unharmed(scene)


@act("take all memory by memfd")
async def _memfd(scene: Scene) -> str:
    code = "print('tried', flush=True); f = os.memfd_create('x')\nfor _ in range(4096): os.write(f, bytes(1 << 20))\n"
    done = await run(scene, code + "print('BREACH')")
    return judge(done) or await unharmed(scene)


@act("take all memory by System V shared memory")
async def _shm(scene: Scene) -> str:
    code = (
        "print('tried', flush=True); libc.shmat.restype = ctypes.c_void_p\n"
        "i = libc.shmget(0, ctypes.c_size_t(2 << 30), 0o1600); a = libc.shmat(i, None, 0)\n"
        "ctypes.memset(a, 1, 2 << 30); print('BREACH')"
    )
    return judge(await run(scene, code)) or await unharmed(scene)


@act("leave memory behind that no process holds (System V)")
async def _shm_left(scene: Scene) -> str:
    code = (
        "print('tried', flush=True); libc.shmat.restype = ctypes.c_void_p\n"
        "for _ in range(300):\n"
        " i = libc.shmget(0, ctypes.c_size_t(1 << 20), 0o1600); a = libc.shmat(i, None, 0)\n"
        " ctypes.memset(a, 1, 1 << 20); libc.shmdt(ctypes.c_void_p(a))\n"
        "print('BREACH')"
    )
    said = judge(await run(scene, code))
    for _ in range(5):  # there is no memory left to start anything with
        with contextlib.suppress(PagurusError):
            await scene.attacker.exec(["python3", "-c", "x = bytearray(1 << 20)"], timeout=5)
    said = said or await unharmed(scene)
    await scene.attacker.start()  # the namespace went with its last process, and the memory with it
    done = await scene.attacker.exec(["echo", "again"])
    return said or ("" if done.stdout == b"again\n" else "no recovery by a new start")


@act("take all memory by many processes")
async def _memory_many(scene: Scene) -> str:
    code = (
        "print('tried', flush=True)\nfor _ in range(40):\n if os.fork() == 0: x = bytearray(64 << 20); time.sleep(60)\n"
        "time.sleep(2)"
    )
    done = await run(scene, code, timeout=4)
    usage = scene.attacker.cgroup.anonymous()
    if usage > 256 << 20:
        return f"{usage >> 20} MiB in use"
    return judge(done) or await unharmed(scene)


@act("hold all descriptors")
async def _descriptors(scene: Scene) -> str:
    code = (
        "n = 0\ntry:\n while True: os.open('/dev/null', 0); n += 1\nexcept OSError: print('tried', n)\n"
        "if n > 4096: print('BREACH', n)"
    )
    return judge(await run(scene, code)) or await unharmed(scene)


@act("hold all terminals")
async def _terminals(scene: Scene) -> str:
    code = (
        "n = 0\ntry:\n while True: os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY); n += 1\n"
        "except OSError: print('tried', n)\n"
        "if n > 256: print('BREACH', n)"
    )
    return judge(await run(scene, code)) or await unharmed(scene)


@act("burn all processors", Limits(cpus=0.5, memory="256MiB", processes=64))
async def _burn(scene: Scene) -> str:
    before = scene.attacker.cgroup.cpu_usage_usec()
    code = "print('tried', flush=True)\nfor _ in range(5): os.fork()\nwhile True: pass"
    done = await run(scene, code, timeout=2)
    used = (scene.attacker.cgroup.cpu_usage_usec() - before) / 1e6 / done.duration
    return judge(done) or (f"used {used:.2f} processors" if used > 0.8 else "") or await unharmed(scene)


@act("fill the disk", Limits(memory="256MiB", processes=64, cpus=1, disk="50MiB"))
async def _disk(scene: Scene) -> str:
    code = (
        "print('tried', flush=True)\n"
        "with open('/big', 'wb') as f:\n for _ in range(200): f.write(os.urandom(1 << 20)); f.flush(); os.fsync(f)\n"
        "print('BREACH')"
    )
    return judge(await run(scene, code, timeout=20)) or await unharmed(scene)


@act("fill the disk with tiny files", Limits(memory="256MiB", processes=64, cpus=1, disk="4MiB"))
async def _inodes(scene: Scene) -> str:
    code = (
        "print('tried', flush=True); os.mkdir('/many')\n"
        "for n in range(20000):\n open(f'/many/{n}', 'w').write('x' * 1500)\n if n % 500 == 0: os.sync()\n"
        "print('BREACH')"
    )
    return judge(await run(scene, code, timeout=20)) or await unharmed(scene)


@act("endless output")
async def _output(scene: Scene) -> str:
    done = await scene.attacker.exec(["sh", "-c", "yes tried"], timeout=1, output_limit=1000)
    if len(done.stdout) != 1000 or not done.timed_out:
        return f"kept {len(done.stdout)} bytes"
    return judge(done) or await unharmed(scene)


@act("endless output of a process left behind")
async def _output_behind(scene: Scene) -> str:
    done = await scene.attacker.exec(["sh", "-c", "echo tried; yes & yes >&2 &"], timeout=5, output_limit=1000)
    return ("held the command" if done.timed_out else "") or judge(done) or await unharmed(scene)


@act("flood of zombies")
async def _zombies(scene: Scene) -> str:
    code = (
        "made = 0\nfor _ in range(3000):\n try:\n  if os.fork() == 0: os._exit(0)\n  made += 1\n"
        "  if made == 20: print('tried', flush=True)\n except OSError: pass\ntime.sleep(60)"
    )
    return judge(await run(scene, code, timeout=2)) or await unharmed(scene)


SMALL = Limits(memory="128MiB", processes=64, cpus=1)
HELD = """
def held(path):
    lines = read(path, 'r', -1).splitlines()[1:]
    return sum(int(part, 16) for line in lines for part in line.split()[4].split(':')) >> 20
def read(path, mode, most):
    with open(path, mode) as f: return f.read(most)
def tell(path):
    print('tried', held(path), 'MiB', flush=True)
    if held(path) > 64: print('BREACH', held(path), 'MiB beside a memory of 128', flush=True)
kept, data = [], bytes(60000)
"""


@act("hold memory in the buffers of TCP connections", SMALL)
async def _tcp(scene: Scene) -> str:
    code = (
        "listener = socket.socket(); listener.bind(('127.0.0.1', 0)); listener.listen()\n"
        "for _ in range(60):\n"
        " kept.append(socket.create_connection(listener.getsockname())); kept.append(listener.accept()[0])\n"
        " for end in kept[-2:]:\n"
        "  end.setblocking(False)\n"
        "  try:\n"
        "   while True: end.send(data)\n"
        "  except OSError: pass\n"
        "tell('/proc/net/tcp')"
    )
    return judge(await run(scene, HELD + code, timeout=60)) or await unharmed(scene)


@act("hold memory in datagrams that nobody reads", SMALL)
async def _udp(scene: Scene) -> str:
    code = (
        "for _ in range(1000):\n"
        " one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); one.bind(('127.0.0.1', 0)); kept.append(one)\n"
        " one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 30); one.setblocking(False)\n"
        " try:\n"
        "  for _ in range(8): one.sendto(data, one.getsockname())\n"
        " except OSError: pass\n"
        "tell('/proc/net/udp')"
    )
    return judge(await run(scene, HELD + code, timeout=60)) or await unharmed(scene)


@act("hold memory in netlink messages of its own", SMALL)
async def _netlink(scene: Scene) -> str:
    code = "attempt('usersock', socket.socket, socket.AF_NETLINK, socket.SOCK_RAW, 2)"
    return judge(await run(scene, code))
