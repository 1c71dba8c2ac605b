"""Neighbours and the host, from a sandbox without a network."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from pathlib import Path

from sandbox.container.outlet import Outlet
from tests.hostile.act import ATTEMPT, Scene, act, judge, program, run, unharmed

_NETWORK = {
    "packet socket": "attempt('packet', socket.socket, socket.AF_PACKET, socket.SOCK_RAW, 3)",
    "raw socket": "attempt('raw', socket.socket, socket.AF_INET, socket.SOCK_RAW, 255)",
    "socket to the hypervisor (vsock)": "syscall('vsock', 41, 40, 1, 0)",
    "kernel crypto socket": "syscall('alg', 41, 38, 5, 0)",
    "rare socket families": (
        "for f in (3, 4, 5, 9, 15, 21, 29, 30, 31, 37, 39, 41, 42, 44): syscall(f'family {f}', 41, f, 2, 0)"
    ),
    "reach the internet": "attempt('1.1.1.1', socket.create_connection, ('1.1.1.1', 53), 2)",
    "reach the internet over UDP": (
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); attempt('udp', s.sendto, b'x', ('8.8.8.8', 53))"
    ),
    "reach a metadata service": "attempt('metadata', socket.create_connection, ('169.254.169.254', 80), 2)",
    "multicast to neighbours": (
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); attempt('mdns', s.sendto, b'x', ('224.0.0.251', 5353))"
    ),
    "make a network link": (
        "s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); s.bind((0, 0))\n"
        "m = struct.pack('IHHII', 48, 16, 0x605, 1, 0) + struct.pack('BxHiII', 0, 0, 0, 1, 1)"
        " + struct.pack('HH', 16, 18 | 0x8000) + struct.pack('HH8s', 10, 1, b'dummy')\n"
        "s.send(m); e = struct.unpack_from('i', s.recv(4096), 16)[0]; print('tried', e)\n"
        "if e == 0: print('BREACH link')"
    ),
    "spoof a neighbour entry (ARP)": (
        "s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); s.bind((0, 0))\n"
        "m = struct.pack('IHHII', 48, 28, 0x605, 1, 0) + struct.pack('BxxxiHBB', 2, 1, 128, 0, 0)"
        " + struct.pack('HH4s', 8, 1, bytes([127, 0, 0, 9])) + struct.pack('HH6sxx', 10, 2, b'abcdef')\n"
        "s.send(m); e = struct.unpack_from('i', s.recv(4096), 16)[0]; print('tried', e)\nif e == 0: print('BREACH arp')"
    ),
    "take loopback down": (
        "import fcntl; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "attempt('ifconfig', fcntl.ioctl, s, 0x8914, struct.pack('16sH14x', b'lo', 0))"
    ),
}

for _name, _code in _NETWORK.items():
    program(_name, _code)


@act("reach a server on the host's loopback")
async def _host_loopback(scene: Scene) -> str:
    code = f"attempt('host', socket.create_connection, ('127.0.0.1', {scene.host_port}), 2)"
    return judge(await run(scene, code))


@act("reach an abstract Unix socket of the host")
async def _abstract(scene: Scene) -> str:
    code = f"s = socket.socket(socket.AF_UNIX); attempt('abstract', s.connect, '\\0pagurus-{scene.host_port}')"
    return judge(await run(scene, code))


@act("reach a server of the neighbour")
async def _neighbour_port(scene: Scene) -> str:
    serve = "import socket, time; s = socket.create_server(('0.0.0.0', 4444)); print('up', flush=True); time.sleep(60)"
    outlet = Outlet()
    task = asyncio.create_task(scene.neighbour.exec(["python3", "-c", serve], outlet=outlet))
    try:
        await outlet.get()
        code = "attempt('neighbour', socket.create_connection, ('127.0.0.1', 4444), 2)"
        return judge(await run(scene, code))
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@act("use the neighbour's System V shared memory")
async def _neighbour_ipc(scene: Scene) -> str:
    made = await scene.neighbour.exec(["python3", "-c", ATTEMPT + "print(libc.shmget(77, 4096, 0o1666))"])
    if int(made.stdout) < 0:
        return "the neighbour could not make any"
    return judge(await run(scene, "i = libc.shmget(77, 4096, 0); print('tried', i)\nif i >= 0: print('BREACH')"))


@act("use the host's System V shared memory")
async def _host_ipc(scene: Scene) -> str:
    libc = ctypes.CDLL(None)
    made = libc.shmget(scene.host_port, 4096, 0o1666)
    try:
        code = f"i = libc.shmget({scene.host_port}, 4096, 0); print('tried', i)\nif i >= 0: print('BREACH')"
        return judge(await run(scene, code))
    finally:
        libc.shmctl(made, 0, None)


@act("kill every process there is")
async def _kill_all(scene: Scene) -> str:
    code = "\nif os.fork() == 0: time.sleep(60)\nos.kill(-1, 9); print('tried', os.wait())"
    done = await run(scene, code)
    return judge(done) or ("" if scene.attacker.alive else "pid 1 died") or await unharmed(scene)


@act("kill pid 1")
async def _kill_init(scene: Scene) -> str:
    code = "\nfor s in (9, 19, 15, 11, 1, 2, 3, 10, 17): os.kill(1, s)\nprint('tried')"
    done = await run(scene, code)
    return judge(done) or ("" if scene.attacker.alive else "pid 1 died")


@act("kill a process of the host by its number")
async def _kill_host(scene: Scene) -> str:
    code = f"attempt('kill', os.kill, {os.getpid()}, 9); attempt('kill', os.kill, {scene.neighbour.init_pid}, 9)"
    return judge(await run(scene, code)) or await unharmed(scene)


@act("hear of the host's devices (uevents)")
async def _uevents(scene: Scene) -> str:
    code = (
        "try:\n s = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 15); s.bind((0, 1)); s.settimeout(3)\n"
        "except OSError as e: print('tried', e); sys.exit()\n"
        "try: s.recv(4096); print('tried'); print('BREACH heard')\n"
        "except TimeoutError: print('tried')"
    )

    async def change() -> None:
        while True:
            await asyncio.to_thread(Path("/sys/devices/virtual/mem/null/uevent").write_text, "change")
            await asyncio.sleep(0.05)

    changing = asyncio.ensure_future(change())
    try:
        return judge(await run(scene, code, timeout=10))
    finally:
        changing.cancel()


_TRACE = """
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
"""


@act("trace a helper of the host on its way to a command")
async def _trace_helpers(scene: Scene) -> str:
    code = _TRACE + (
        "seen, end, looks = set(), time.time() + 2, 0\n"
        "while time.time() < end:\n"
        " for p in os.listdir('/proc'):\n"
        "  if not p.isdigit() or p in seen or int(p) in (1, os.getpid()): continue\n"
        "  looks += 1\n"
        "  if libc.ptrace(0x4206, int(p), None, None) < 0: continue\n"
        "  seen.add(p)\n"
        "  try: exe = os.readlink(f'/proc/{p}/exe')\n"
        "  except OSError: continue\n"
        "  if 'shim' in exe or not os.path.exists(exe): print('BREACH traced', exe, flush=True)\n"
        "print('tried' if looks else 'saw nobody', len(seen))"
    )
    tracing = asyncio.create_task(run(scene, code, timeout=20))
    for _ in range(500):
        await scene.attacker.exec(["/bin/true"], timeout=5, uid=1000)
        await scene.attacker.exec(["/bin/true"], timeout=5)
        if tracing.done():
            break
    return judge(await tracing) or await unharmed(scene)


@act("hold pid 1 and a command as their tracer, and never let go")
async def _trace_for_ever(scene: Scene) -> str:
    code = _TRACE + (
        "who = (1, os.getppid()) if os.fork() else (1,)\n"
        "for p in who:\n"
        " print('tried', p, libc.ptrace(0x4206, p, None, None), libc.ptrace(0x4207, p, None, None), flush=True)\n"
        "time.sleep(1 if len(who) == 2 else 1000)"
    )
    said = judge(await run(scene, code, timeout=5), tried=2)
    for user in (0, 1000):
        done = await scene.attacker.exec(["/bin/sh", "-c", "exit 3"], timeout=10, uid=user)
        if done.exit_code != 3:
            return f"a command ends with {done.exit_code}"
    return said or await unharmed(scene)
