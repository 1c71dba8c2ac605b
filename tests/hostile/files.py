"""Files of the kernel, of the host and of the runtime, and the host's own access to files of a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import io
from pathlib import Path

from sandbox.errors import PagurusError
from sandbox.tree import files
from tests.hostile.act import Scene, act, judge, program, run, unharmed

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
    "write sysfs and control groups": (
        "opened = []\n"
        "for top, _, names in os.walk('/sys'):\n"
        "    for name in names:\n"
        "        try: opened.append(os.open(os.path.join(top, name), os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK))\n"
        "        except OSError: pass\n"
        "attempt('sys', lambda: opened or (_ for _ in ()).throw(ValueError('none opens')))"
    ),
    "read how much others have on the disk": "attempt('btrfs', lambda: os.listdir('/sys/fs/btrfs') or"
    " (_ for _ in ()).throw(ValueError('empty')))",
    "read which files of the host are disks": "attempt('loops', lambda: os.listdir('/sys/devices/virtual/block') or"
    " (_ for _ in ()).throw(ValueError('empty')))",
    "read firmware": "attempt('firmware', lambda: os.listdir('/sys/firmware') or"
    " (_ for _ in ()).throw(ValueError('empty')))",
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

for _name, _code in _FILES.items():
    program(_name, _code)

_LIMITS_OF_ROOT = """
import os
os.setresuid(0, 0, 0)
status = dict(line.split(':', 1) for line in open('/proc/self/status'))
for name in ('CapPrm', 'CapEff', 'CapBnd', 'CapInh', 'CapAmb'):
    print('tried', name, flush=True)
    if int(status[name], 16) & ~0xa80425fb: print('BREACH', name, status[name], flush=True)
print('tried', flush=True) if status['Seccomp'].strip() == '2' else print('BREACH no filter', flush=True)
for path in ('/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/proc/1/oom_score_adj'):
    try:
        with open(path, 'w') as file: file.write('-1')
    except OSError as e: print('tried', path, e, flush=True)
    else: print('BREACH', path, flush=True)
"""

# A user of the sandbox becomes its root by a set-user-ID program, as in Docker, and no more than that.
program(
    "get more than the sandbox's root by a setuid program",
    f"os.execv('/tmp/rootpython', ['/tmp/rootpython', '-c', {_LIMITS_OF_ROOT!r}])",
    uid=1000,
)

program(
    "get a capability of the host by a file's capabilities",
    """
import subprocess, shutil
for bit in (21, 12, 19, 16, 2):  # SYS_ADMIN, NET_ADMIN, SYS_PTRACE, SYS_MODULE, DAC_READ_SEARCH
    shutil.copy('/bin/cat', '/tmp/capable')
    os.chmod('/tmp/capable', 0o755)
    os.setxattr('/tmp/capable', 'security.capability', struct.pack('<IIIII', 0x02000001, 1 << bit, 0, 0, 0))
    pid = os.fork()
    if not pid:
        os.setresuid(1000, 1000, 1000)
        try: said = subprocess.run(['/tmp/capable', '/proc/self/status'], capture_output=True, text=True).stdout
        except OSError as e: said = str(e)
        held = [line for line in said.splitlines() if line.startswith('CapEff')]
        print('tried', bit, held or said, flush=True)
        if held and int(held[0].split()[1], 16): print('BREACH', bit, held, flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
""",
)


@act("change the image or the runtime under a neighbour")
async def _layers(scene: Scene) -> str:
    code = (
        "print('tried')\nfor p in ('/.pagurus/init', '/etc/passwd', '/usr/bin/true'):\n"
        " try: os.unlink(p)\n except OSError: pass\n"
        " with open(p, 'w') as f: f.write('#!/bin/sh\\necho EVIL\\n')\n os.chmod(p, 0o755)"
    )
    said = judge(await run(scene, code))
    observed = await scene.neighbour.exec(["sh", "-c", "cat /etc/passwd /.pagurus/init /usr/bin/true | grep -c EVIL"])
    return said or ("the neighbour sees it" if observed.stdout != b"0\n" else "")


@act("replace pid 1's program and be started with it")
async def _replace_init(scene: Scene) -> str:
    keep = "/bin/sleep"
    code = f"import shutil; print('tried'); os.unlink('/.pagurus/init'); shutil.copy('{keep}', '/.pagurus/init')"
    said = judge(await run(scene, code))
    await scene.attacker.kill()
    with contextlib.suppress(PagurusError):  # it need not start; if it does, it is confined
        pid = await scene.attacker.start()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
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
    said = judge(await run(scene, code))
    await scene.attacker.kill()
    try:
        await scene.attacker.start()
    except PagurusError as error:
        return said if "replaced" in str(error) else f"refused for another reason: {error}"
    return said or "started over it"


@act("block the runtime with a FIFO in place of /dev/null")
async def _fifo_null(scene: Scene) -> str:
    said = judge(await run(scene, "print('tried'); os.unlink('/dev/null'); os.mkfifo('/dev/null')"))
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
    said = judge(await run(scene, code))
    for path in ("/tmp/out", "/tmp/dots", "/" + "../" * 40 + str(scene.secret), f"/tmp/magic{scene.secret}"):
        with contextlib.suppress(PagurusError):
            data = await asyncio.to_thread(files.read, scene.attacker.inside, path, limit=1 << 20)
            if b"secret" in data:
                return f"{path} read the host's file"
        with contextlib.suppress(PagurusError):
            inside, base = scene.attacker.inside, scene.attacker.spec.uid_base
            await asyncio.to_thread(files.write, inside, base, path, io.BytesIO(b"overwritten"))
    return said or ("" if scene.secret.read_bytes() == b"secret" else "the host's file was written")


@act("race the host's file access with a changing symlink")
async def _symlink_race(scene: Scene) -> str:
    code = (
        "print('tried', flush=True); os.makedirs('/race/dir', exist_ok=True); open('/race/dir/f', 'w').write('mine')\n"
        f"os.symlink('{scene.secret.parent}', '/race/link'); os.symlink('{scene.secret}', '/race/dir/secret')\n"
        "R = 316\nfor _ in range(300000): libc.syscall(R, -100, b'/race/dir', -100, b'/race/link', 2)"
    )
    task = asyncio.create_task(run(scene, code, timeout=2))
    try:
        for _ in range(300):
            for path in (f"/race/dir/{scene.secret.name}", "/race/dir/f"):
                with contextlib.suppress(PagurusError):
                    if b"secret" in await asyncio.to_thread(files.read, scene.attacker.inside, path, limit=1 << 20):
                        return f"{path} read the host's file"
    finally:
        done = await task
    return judge(done)


@act("block the host's file access by a FIFO or device")
async def _fifo_read(scene: Scene) -> str:
    said = judge(await run(scene, "os.mkfifo('/tmp/fifo'); print('tried')"))
    for path in ("/tmp/fifo", "/dev/zero", "/dev/tty", "/dev/ptmx", "/proc/kmsg"):
        try:
            async with asyncio.timeout(5):
                data = await asyncio.to_thread(files.read, scene.attacker.inside, path, limit=1 << 20)
            return f"{path} was read: {data[:20]!r}"
        except PagurusError:
            continue
        except TimeoutError:
            return f"{path} blocks the host"
    return said
