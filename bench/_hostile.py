"""Hostile acts: what a sandbox's root may try against the host, its neighbours and its own keepers.

Owns: the acts and, for each, how to tell from the outside that it was contained. Does not own: running them
(:mod:`bench.isolation`, and the tests).
Guarantee: an act counts as contained only if it was really tried: its program must report each attempt.

A program is Python, run as the sandbox's root with `ATTEMPT` before it. It prints ``tried`` for each attempt and
``BREACH ...`` for each that worked.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from sandbox import files
from sandbox.container import Container
from sandbox.errors import PagurusError
from sandbox.messages import Limits
from sandbox.process import Completed

ATTEMPT = """
import ctypes, errno, os, socket, struct, sys, mmap, resource, signal, time
REFUSALS = ("EPERM", "EACCES", "ENOSYS", "EAFNOSUPPORT")
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def syscall(what, number, *args):
    ctypes.set_errno(0)
    r = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    e = errno.errorcode.get(ctypes.get_errno(), 0)
    print("tried", what, e, flush=True)
    if r >= 0 or e not in REFUSALS: print("BREACH", what, r, e, flush=True)
def attempt(what, function, *args, **named):
    try: r = function(*args, **named)
    except (OSError, PermissionError, ValueError) as e: print("tried", what, type(e).__name__, e, flush=True)
    else: print("tried", what, flush=True); print("BREACH", what, repr(r)[:80], flush=True)
def write(path, text="1"):
    with open(path, "w") as f: f.write(text)
def read(path, mode="rb"):
    with open(path, mode) as f: return f.read(64)
"""


@dataclass
class Scene:
    """Where an act takes place."""

    attacker: Container
    neighbour: Container
    host_port: int  # a TCP listener on the host's loopback and, by the same number, its abstract Unix socket
    secret: Path  # a file of the host


Check = Callable[[Scene], Awaitable[str]]  # "" when contained, else what went wrong


MODEST = Limits(memory="256MiB", processes=64, cpus=1)


@dataclass(frozen=True)
class Act:
    name: str
    check: Check
    limits: Limits = MODEST


ACTS: list[Act] = []


def judge(done: Completed, *, tried: int = 1) -> str:
    """What a finished program says about its attempts."""
    out = done.stdout.decode("utf-8", "replace")
    breaches = [line for line in out.splitlines() if line.startswith("BREACH")]
    if breaches:
        return "; ".join(breaches)[:300]
    if out.count("tried") < tried:
        return f"was not tried: exit {done.exit_code}, {done.stderr[-200:]!r}"
    return ""


def program(name: str, code: str, *, uid: int = 0, limits: Limits | None = None, then: Check | None = None) -> None:
    """An act that is one Python program; `then` looks at the world afterwards."""

    async def check(scene: Scene) -> str:
        done = await scene.attacker.exec(["python3", "-c", ATTEMPT + code], uid=uid, timeout=20)
        return judge(done) or (await then(scene) if then is not None else "")

    ACTS.append(Act(name, check) if limits is None else Act(name, check, limits))


def act(name: str, limits: Limits | None = None) -> Callable[[Check], Check]:
    """An act that needs more than one program."""

    def register(check: Check) -> Check:
        ACTS.append(Act(name, check) if limits is None else Act(name, check, limits))
        return check

    return register


async def unharmed(scene: Scene) -> str:
    """The neighbour still works, and so does a new command in the attacker once it is killed and started."""
    done = await scene.neighbour.exec(["echo", "well"], timeout=10)
    if done.stdout != b"well\n":
        return f"the neighbour was harmed: {done}"
    await scene.attacker.kill()
    if scene.attacker.tasks():
        return "processes survived the kill"
    return ""


# ------------------------------------------------------------------ system calls that must not work

_REFUSED = {
    "create a user namespace (unshare)": "syscall('unshare', 272, 0x10000000)",
    "create a mount namespace (unshare)": "syscall('unshare', 272, 0x20000)",
    "create a network namespace (unshare)": "syscall('unshare', 272, 0x40000000)",
    "create a user namespace (clone)": "syscall('clone', 56, 0x10000000 | 17, 0, 0, 0, 0)",
    "create a process by clone3": "b=(ctypes.c_uint64*11)(); b[0]=0x10000000; b[4]=17; syscall('clone3', 435, b, 88)",
    "join a namespace (setns)": "syscall('setns', 308, os.open('/proc/1/ns/mnt', 0), 0)",
    "mount a tmpfs": "syscall('mount', 165, b'none', b'/mnt', b'tmpfs', 0, 0)",
    "mount proc once more": "syscall('mount', 165, b'none', b'/mnt', b'proc', 0, 0)",
    "mount sysfs": "syscall('mount', 165, b'none', b'/mnt', b'sysfs', 0, 0)",
    "mount a cgroup hierarchy (release_agent)": "syscall('mount', 165, b'none', b'/mnt', b'cgroup', 0, b'memory')",
    "bind-mount over a masked path": "syscall('mount', 165, b'/etc', b'/proc/acpi', 0, 4096, 0)",
    "remount proc/sys writable": "syscall('mount', 165, 0, b'/proc/sys', 0, 32 | 4096, 0)",
    "unmount a mask": "syscall('umount2', 166, b'/proc/keys', 2)",
    "pivot_root": "syscall('pivot_root', 155, b'/', b'/mnt')",
    "new mount API: fsopen": "syscall('fsopen', 430, b'tmpfs', 0)",
    "new mount API: open_tree": "syscall('open_tree', 428, -100, b'/', 1)",
    "new mount API: move_mount": "syscall('move_mount', 429, -100, b'/etc', -100, b'/mnt', 0)",
    "new mount API: mount_setattr": "syscall('mount_setattr', 442, -100, b'/proc/sys', 0, bytes(32), 32)",
    "load a kernel module": "syscall('init_module', 175, bytes(64), 64, b'')",
    "load a kernel module by descriptor": "syscall('finit_module', 313, 0, b'', 0)",
    "unload a kernel module": "syscall('delete_module', 176, b'overlay', 0)",
    "load another kernel (kexec)": "syscall('kexec_load', 246, 0, 0, 0, 0)",
    "reboot the host": "syscall('reboot', 169, 0xfee1dead, 672274793, 0x1234567, 0)",
    "set the clock": "syscall('settimeofday', 164, struct.pack('qq', 1, 0), 0)",
    "set the clock (clock_settime)": "syscall('clock_settime', 227, 0, struct.pack('qq', 1, 0))",
    "adjust the clock": "syscall('adjtimex', 159, struct.pack('I', 1) + bytes(256))",
    "set the host name": "syscall('sethostname', 170, b'evil', 4)",
    "set the domain name": "syscall('setdomainname', 171, b'evil', 4)",
    "turn swapping on": "syscall('swapon', 167, b'/etc/passwd', 0)",
    "turn swapping off": "syscall('swapoff', 168, b'/etc/passwd')",
    "process accounting": "syscall('acct', 163, b'/tmp/acct')",
    "I/O port privileges": "syscall('iopl', 172, 3); syscall('ioperm', 173, 0, 8, 1)",
    "read the kernel log (syslog)": "syscall('syslog', 103, 3, bytes(64), 64)",
    "load a BPF program": "syscall('bpf', 321, 5, bytes(128), 128)",
    "make a BPF map": "syscall('bpf', 321, 0, struct.pack('IIIII', 2, 4, 4, 1, 0) + bytes(100), 72)",
    "open a performance counter": "syscall('perf_event_open', 298, struct.pack('IIQ', 1, 112, 0)+bytes(96), 0,-1,-1,0)",
    "io_uring": "syscall('io_uring_setup', 425, 8, bytes(120))",
    "userfaultfd": "syscall('userfaultfd', 323, 1)",
    "keyring: add a key": "syscall('add_key', 248, b'user', b'k', b'v', 1, -3)",
    "keyring: read the session's": "syscall('keyctl', 250, 0, -3, 0, 0)",
    "keyring: request a key": "syscall('request_key', 249, b'user', b'k', 0, 0)",
    "open by file handle (shocker)": "syscall('open_by_handle_at', 304, 3, struct.pack('IIQ', 8, 1, 2), 0)",
    "trace pid 1": "syscall('ptrace', 101, 16, 1, 0, 0)",
    "be traced": "syscall('ptrace', 101, 0, 0, 0, 0)",
    "steal a descriptor (pidfd_getfd)": "p = os.pidfd_open(1); syscall('pidfd_getfd', 438, p, 0, 0)",
    "compare kernel objects (kcmp)": "syscall('kcmp', 312, 1, 1, 0, 0, 0)",
    "fanotify": "syscall('fanotify_init', 300, 0, 0)",
    "disk quota control": "syscall('quotactl', 179, 0x80000100, b'/dev/vda', 0, 0)",
    "switch address randomisation off": "syscall('personality', 135, 0x0040000)",
    "hang up the terminal": "syscall('vhangup', 153)",
    "NUMA: move pages": "syscall('move_pages', 279, 1, 0, 0, 0, 0, 0)",
    "x32 system call": "syscall('x32 getpid', 0x40000000 + 39)",
    "a system call that is newer than the profile": "syscall('future', 600)",
    "nice below zero": "attempt('nice', os.setpriority, os.PRIO_PROCESS, 0, -10)",
    "real-time scheduling": "attempt('fifo', os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(10))",
    "real-time disk priority": "syscall('ioprio_set', 251, 1, 0, (1 << 13) | 0)",
    "lock memory without bound": (
        "attempt('memlock', resource.setrlimit, resource.RLIMIT_MEMLOCK, (1 << 40, 1 << 40))"
    ),
    "raise the limit of open files": "attempt('nofile', resource.setrlimit, resource.RLIMIT_NOFILE, (1 << 20,) * 2)",
    "raise the core limit (core_pattern program)": (
        "attempt('core', resource.setrlimit, resource.RLIMIT_CORE, (1 << 20, 1 << 20))"
    ),
    "gain CAP_SYS_ADMIN by capset": (
        "all = struct.pack('IIIIII', *[0xffffffff, 0xffffffff, 0] * 2);"
        "syscall('capset', 126, struct.pack('Ii', 0x20080522, 0), all)"
    ),
    "gain ambient capabilities": "syscall('ambient', 157, 47, 2, 21, 0, 0)",
}

# ------------------------------------------------------------------ files of the kernel and of the host

_NODES = "/proc/sys/kernel/core_pattern /proc/sys/kernel/modprobe /proc/sys/vm/drop_caches /proc/sysrq-trigger"
_FILES = {
    "write kernel settings": f"for p in '{_NODES}'.split(): attempt(p, write, p)",
    "write network settings": "attempt('forward', write, '/proc/sys/net/ipv4/ip_forward')",
    "write interrupt settings": "attempt('irq', write, '/proc/irq/default_smp_affinity')",
    "widen the id map": "attempt('uid_map', write, '/proc/self/uid_map', '0 0 1'); attempt('gid_map', write,"
    " '/proc/self/gid_map', '0 0 1')",
    "hide from the OOM killer": "attempt('oom', write, '/proc/self/oom_score_adj', '-1000')",
    "read kernel memory and logs": "for p in ('/proc/kcore', '/proc/kmsg', '/dev/mem', '/dev/kmsg', '/dev/port'):"
    " attempt(p, lambda: read(p) or (_ for _ in ()).throw(ValueError('empty')))",
    "read masked files": "for p in ('/proc/keys', '/proc/timer_list', '/proc/interrupts'):"
    " attempt(p, lambda: read(p) or (_ for _ in ()).throw(ValueError('empty')))",
    "find sysfs": "attempt('sys', lambda: os.listdir('/sys') or (_ for _ in ()).throw(ValueError('empty')))",
    "make a block device": "attempt('mknod', os.mknod, '/tmp/disk', 0o60666, os.makedev(254, 0))",
    "make /dev/mem": "attempt('mknod', os.mknod, '/tmp/mem', 0o20666, os.makedev(1, 1))",
    "make /dev/kvm": "attempt('mknod', os.mknod, '/tmp/kvm', 0o20666, os.makedev(10, 232))",
    "set the overlay's own attributes": (
        "attempt('xattr', os.setxattr, '/tmp', 'trusted.overlay.redirect', b'/etc');"
        "attempt('xattr', os.setxattr, '/tmp', 'trusted.overlay.opaque', b'y')"
    ),
    "escape by chroot": (
        "os.makedirs('/tmp/c', exist_ok=True); f = os.open('/', 0); os.chroot('/tmp/c'); os.fchdir(f)\n"
        "for _ in range(64): os.chdir('..')\n"
        "os.chroot('.'); print('tried')\n"
        "if not os.path.exists('/.pagurus/init'): print('BREACH other root', os.listdir('/'))"
    ),
    "reach the host's root by /proc/1/root": (
        "print('tried'); a, b = os.stat('/proc/1/root/'), os.stat('/')\n"
        "if (a.st_dev, a.st_ino) != (b.st_dev, b.st_ino): print('BREACH', os.listdir('/proc/1/root/'))"
    ),
    "find a descriptor of the host": (
        "print('tried')\nfor p in os.listdir('/proc'):\n"
        " if p.isdigit():\n"
        "  for f in os.listdir(f'/proc/{p}/fd'):\n"
        "   try: t = os.readlink(f'/proc/{p}/fd/{f}')\n"
        "   except OSError: continue\n"
        "   if not t.startswith(('pipe:', '/dev/null', '/proc/')): print('BREACH', p, f, t)"
    ),
    "find the daemon's socket": (
        "print('tried')\nfor d in ('/run', '/var/run', '/tmp', '/var/lib'):\n"
        " for r, ds, fs in os.walk(d):\n"
        "  for f in fs:\n"
        "   if f.endswith('.sock'): print('BREACH', r, f)"
    ),
    "see processes of the host": (
        "print('tried'); n = [p for p in os.listdir('/proc') if p.isdigit()]\nif len(n) > 3: print('BREACH', n)"
    ),
    "open the caller's terminal": "attempt('tty', os.open, '/dev/tty', os.O_RDWR)",
    "shift the clocks (time namespace offsets)": "attempt('offset', write, '/proc/self/timens_offsets', '1 1 0')",
}

# ------------------------------------------------------------------ network

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

# ------------------------------------------------------------------ the simple ones, registered

for _name, _code in {**_REFUSED, **_FILES, **_NETWORK}.items():
    program(_name, _code)

program(
    "32-bit system calls",
    "c = bytes.fromhex('b814000000cd80c3')  # mov eax, getpid; int 0x80; ret\n"
    "m = mmap.mmap(-1, 4096, prot=7); m.write(c); a = ctypes.addressof(ctypes.c_char.from_buffer(m))\n"
    "pid = os.fork()\n"
    "if pid == 0: r = ctypes.CFUNCTYPE(ctypes.c_int)(a)(); print('BREACH int80', r, flush=True); os._exit(0)\n"
    "print('tried', os.waitpid(pid, 0)[1])",
)
program(
    "become root by a setuid program",
    "import shutil, subprocess\n"
    "attempt('setuid', lambda: subprocess.run(['/tmp/rootid', '-u'], capture_output=True).stdout == b'0\\n'"
    " or (_ for _ in ()).throw(ValueError('not root')))",
    uid=1000,
)


# ------------------------------------------------------------------ exhaustion


async def _exhaust(scene: Scene, code: str, timeout: float = 5) -> Completed:
    return await scene.attacker.exec(["python3", "-c", ATTEMPT + code], timeout=timeout)


@act("fork bomb")
async def _fork_bomb(scene: Scene) -> str:
    bomb = "print('tried', flush=True)\nwhile True:\n try: os.fork()\n except OSError: pass"
    await _exhaust(scene, bomb, timeout=1.5)
    if len(scene.attacker.tasks()) > 64:
        return f"{len(scene.attacker.tasks())} processes"
    return await unharmed(scene)


@act("thread bomb")
async def _thread_bomb(scene: Scene) -> str:
    done = await _exhaust(
        scene,
        "import threading\nn = 0\ntry:\n"
        " for n in range(5000): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "except RuntimeError: print('tried', n, flush=True)\nos._exit(0)",
    )
    return judge(done) or await unharmed(scene)


@act("take all memory")
async def _memory(scene: Scene) -> str:
    done = await _exhaust(scene, "print('tried', flush=True)\nx = bytearray(4 << 30)\nprint('BREACH')")
    return judge(done) or ("" if done.oom_killed else "not reported as out of memory") or await unharmed(scene)


@act("take all memory by memfd")
async def _memfd(scene: Scene) -> str:
    code = "print('tried', flush=True); f = os.memfd_create('x')\nfor _ in range(4096): os.write(f, bytes(1 << 20))\n"
    done = await _exhaust(scene, code + "print('BREACH')")
    return judge(done) or await unharmed(scene)


@act("take all memory by System V shared memory")
async def _shm(scene: Scene) -> str:
    code = (
        "print('tried', flush=True); libc.shmat.restype = ctypes.c_void_p\n"
        "i = libc.shmget(0, ctypes.c_size_t(2 << 30), 0o1600); a = libc.shmat(i, None, 0)\n"
        "ctypes.memset(a, 1, 2 << 30); print('BREACH')"
    )
    return judge(await _exhaust(scene, code)) or await unharmed(scene)


@act("leave memory behind that no process holds (System V)")
async def _shm_left(scene: Scene) -> str:
    code = (
        "print('tried', flush=True); libc.shmat.restype = ctypes.c_void_p\n"
        "for _ in range(300):\n"
        " i = libc.shmget(0, ctypes.c_size_t(1 << 20), 0o1600); a = libc.shmat(i, None, 0)\n"
        " ctypes.memset(a, 1, 1 << 20); libc.shmdt(ctypes.c_void_p(a))\n"
        "print('BREACH')"
    )
    said = judge(await _exhaust(scene, code))
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
    done = await _exhaust(scene, code, timeout=4)
    usage = scene.attacker.cgroup.memory_usage()
    if usage is not None and usage > 256 << 20:
        return f"{usage >> 20} MiB in use"
    return judge(done) or await unharmed(scene)


@act("hold all descriptors")
async def _descriptors(scene: Scene) -> str:
    code = (
        "n = 0\ntry:\n while True: os.open('/dev/null', 0); n += 1\nexcept OSError: print('tried', n)\n"
        "if n > 4096: print('BREACH', n)"
    )
    return judge(await _exhaust(scene, code)) or await unharmed(scene)


@act("hold all terminals")
async def _terminals(scene: Scene) -> str:
    code = (
        "n = 0\ntry:\n while True: os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY); n += 1\n"
        "except OSError: print('tried', n)\n"
        "if n > 256: print('BREACH', n)"
    )
    return judge(await _exhaust(scene, code)) or await unharmed(scene)


@act("burn all processors", Limits(cpus=0.5, memory="256MiB", processes=64))
async def _burn(scene: Scene) -> str:
    before = scene.attacker.cgroup.cpu_usage_usec()
    code = "print('tried', flush=True)\nfor _ in range(5): os.fork()\nwhile True: pass"
    done = await _exhaust(scene, code, timeout=2)
    used = (scene.attacker.cgroup.cpu_usage_usec() - before) / 1e6 / done.duration
    return judge(done) or (f"used {used:.2f} processors" if used > 0.8 else "") or await unharmed(scene)


@act("fill the disk", Limits(memory="256MiB", processes=64, cpus=1, disk="50MiB"))
async def _disk(scene: Scene) -> str:
    code = (
        "print('tried', flush=True)\n"
        "with open('/big', 'wb') as f:\n for _ in range(200): f.write(os.urandom(1 << 20)); f.flush(); os.fsync(f)\n"
        "print('BREACH')"
    )
    return judge(await _exhaust(scene, code, timeout=20)) or await unharmed(scene)


@act("fill the disk with tiny files", Limits(memory="256MiB", processes=64, cpus=1, disk="4MiB"))
async def _inodes(scene: Scene) -> str:
    code = (
        "print('tried', flush=True); os.mkdir('/many')\n"
        "for n in range(20000):\n open(f'/many/{n}', 'w').write('x' * 1500)\n if n % 500 == 0: os.sync()\n"
        "print('BREACH')"
    )
    return judge(await _exhaust(scene, code, timeout=20)) or await unharmed(scene)


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
        "print('tried', flush=True)\nfor _ in range(3000):\n try:\n  if os.fork() == 0: os._exit(0)\n"
        " except OSError: pass\ntime.sleep(60)"
    )
    await _exhaust(scene, code, timeout=2)
    return await unharmed(scene)


# ------------------------------------------------------------------ neighbours and the host


@act("reach a server on the host's loopback")
async def _host_loopback(scene: Scene) -> str:
    code = f"attempt('host', socket.create_connection, ('127.0.0.1', {scene.host_port}), 2)"
    return judge(await _exhaust(scene, code))


@act("reach an abstract Unix socket of the host")
async def _abstract(scene: Scene) -> str:
    code = f"s = socket.socket(socket.AF_UNIX); attempt('abstract', s.connect, '\\0pagurus-{scene.host_port}')"
    return judge(await _exhaust(scene, code))


@act("reach a server of the neighbour")
async def _neighbour_port(scene: Scene) -> str:
    serve = "import socket, time; s = socket.create_server(('0.0.0.0', 4444)); print('up', flush=True); time.sleep(60)"
    up = asyncio.Event()
    task = asyncio.create_task(scene.neighbour.exec(["python3", "-c", serve], on_output=lambda *_: up.set()))
    try:
        await up.wait()
        code = "attempt('neighbour', socket.create_connection, ('127.0.0.1', 4444), 2)"
        return judge(await _exhaust(scene, code))
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@act("use the neighbour's System V shared memory")
async def _neighbour_ipc(scene: Scene) -> str:
    made = await scene.neighbour.exec(["python3", "-c", ATTEMPT + "print(libc.shmget(77, 4096, 0o1666))"])
    if int(made.stdout) < 0:
        return "the neighbour could not make any"
    return judge(await _exhaust(scene, "i = libc.shmget(77, 4096, 0); print('tried', i)\nif i >= 0: print('BREACH')"))


@act("use the host's System V shared memory")
async def _host_ipc(scene: Scene) -> str:
    libc = ctypes.CDLL(None)
    made = libc.shmget(scene.host_port, 4096, 0o1666)
    try:
        code = f"i = libc.shmget({scene.host_port}, 4096, 0); print('tried', i)\nif i >= 0: print('BREACH')"
        return judge(await _exhaust(scene, code))
    finally:
        libc.shmctl(made, 0, None)


@act("kill every process there is")
async def _kill_all(scene: Scene) -> str:
    await scene.attacker.exec(["python3", "-c", "import os; os.kill(-1, 9)"], timeout=5)
    if not scene.attacker.alive:
        return "pid 1 died"
    return await unharmed(scene)


@act("kill pid 1")
async def _kill_init(scene: Scene) -> str:
    code = "\nfor s in (9, 19, 15, 11, 1, 2, 3, 10, 17): os.kill(1, s)\nprint('tried')"
    done = await _exhaust(scene, code)
    return judge(done) or ("" if scene.attacker.alive else "pid 1 died")


@act("kill a process of the host by its number")
async def _kill_host(scene: Scene) -> str:
    code = f"attempt('kill', os.kill, {os.getpid()}, 9); attempt('kill', os.kill, {scene.neighbour.init_pid}, 9)"
    return judge(await _exhaust(scene, code)) or await unharmed(scene)


@act("change the image or the runtime under a neighbour")
async def _layers(scene: Scene) -> str:
    code = (
        "print('tried')\nfor p in ('/.pagurus/init', '/etc/passwd', '/usr/bin/true'):\n"
        " try: os.unlink(p)\n except OSError: pass\n"
        " with open(p, 'w') as f: f.write('#!/bin/sh\\necho EVIL\\n')\n os.chmod(p, 0o755)"
    )
    said = judge(await _exhaust(scene, code))
    seen = await scene.neighbour.exec(["sh", "-c", "cat /etc/passwd /.pagurus/init /usr/bin/true | grep -c EVIL"])
    return said or ("the neighbour sees it" if seen.stdout != b"0\n" else "")


@act("replace pid 1's program and be started with it")
async def _replace_init(scene: Scene) -> str:
    keep = "/bin/sleep"
    code = f"import shutil; print('tried'); os.unlink('/.pagurus/init'); shutil.copy('{keep}', '/.pagurus/init')"
    said = judge(await _exhaust(scene, code))
    await scene.attacker.kill()
    with contextlib.suppress(PagurusError):  # it need not start; if it does, it is confined
        pid = await scene.attacker.start()
        with contextlib.suppress(FileNotFoundError):
            status = await asyncio.to_thread(Path(f"/proc/{pid}/status").read_text)
            if "CapBnd:\t00000000a80425fb" not in status or "Seccomp:\t2" not in status:
                return f"not confined: {status}"
    return said


@act("replace what the runtime mounts over and start again")
async def _replace_runtime(scene: Scene) -> str:
    code = (
        "import shutil; print('tried')\nos.rename('/.pagurus', '/old'); os.symlink('/proc/acpi', '/.pagurus')\n"
        "os.unlink('/dev/null'); os.symlink('/proc/kcore', '/dev/null')"
    )
    said = judge(await _exhaust(scene, code))
    await scene.attacker.kill()
    try:
        await scene.attacker.start()
    except PagurusError as error:
        return said if "replaced" in str(error) else f"refused for another reason: {error}"
    return said or "started over it"


@act("block the runtime with a FIFO in place of /dev/null")
async def _fifo_null(scene: Scene) -> str:
    said = judge(await _exhaust(scene, "print('tried'); os.unlink('/dev/null'); os.mkfifo('/dev/null')"))
    try:
        async with asyncio.timeout(5):
            with contextlib.suppress(PagurusError):
                await scene.attacker.exec(["/bin/true"])
    except TimeoutError:
        return "the runtime hangs"
    return said or await unharmed(scene)


@act("lead the host's file access out by a symlink")
async def _symlinks(scene: Scene) -> str:
    code = (
        f"os.symlink('{scene.secret}', '/tmp/out'); os.symlink('/..' * 30 + '{scene.secret}', '/tmp/dots');"
        "os.symlink('/proc/1/root/proc/1/cwd', '/tmp/magic'); print('tried')"
    )
    said = judge(await _exhaust(scene, code))
    for path in ("/tmp/out", "/tmp/dots", "/" + "../" * 40 + str(scene.secret), f"/tmp/magic{scene.secret}"):
        with contextlib.suppress(PagurusError):
            data = await asyncio.to_thread(files.read, scene.attacker.init_pid or 0, path)
            if b"secret" in data:
                return f"{path} read the host's file"
        with contextlib.suppress(PagurusError):
            init, base = scene.attacker.init_pid or 0, scene.attacker.spec.uid_base
            await asyncio.to_thread(files.write, init, base, path, b"overwritten")
    return said or ("" if scene.secret.read_bytes() == b"secret" else "the host's file was written")


@act("race the host's file access with a changing symlink")
async def _symlink_race(scene: Scene) -> str:
    code = (
        "print('tried', flush=True); os.makedirs('/race/dir', exist_ok=True); open('/race/dir/f', 'w').write('mine')\n"
        f"os.symlink('{scene.secret.parent}', '/race/link'); os.symlink('{scene.secret}', '/race/dir/secret')\n"
        "R = 316\nfor _ in range(300000): libc.syscall(R, -100, b'/race/dir', -100, b'/race/link', 2)"
    )
    task = asyncio.create_task(_exhaust(scene, code, timeout=2))
    try:
        for _ in range(300):
            for path in (f"/race/dir/{scene.secret.name}", "/race/dir/f"):
                with contextlib.suppress(PagurusError):
                    if b"secret" in await asyncio.to_thread(files.read, scene.attacker.init_pid or 0, path):
                        return f"{path} read the host's file"
    finally:
        done = await task
    return judge(done)


@act("block the host's file access by a FIFO or device")
async def _fifo_read(scene: Scene) -> str:
    said = judge(await _exhaust(scene, "os.mkfifo('/tmp/fifo'); print('tried')"))
    for path in ("/tmp/fifo", "/dev/zero", "/dev/tty", "/dev/ptmx", "/proc/kmsg"):
        try:
            async with asyncio.timeout(5):
                data = await asyncio.to_thread(files.read, scene.attacker.init_pid or 0, path, limit=1 << 20)
            return f"{path} was read: {data[:20]!r}"
        except PagurusError:
            continue
        except TimeoutError:
            return f"{path} blocks the host"
    return said


def host_socket() -> tuple[list[socket.socket], int]:
    """A TCP listener on the host's loopback and an abstract Unix socket, as targets."""
    tcp = socket.create_server(("127.0.0.1", 0))
    port = tcp.getsockname()[1]
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0pagurus-{port}")
    abstract.listen()
    return [tcp, abstract], port
