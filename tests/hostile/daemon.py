"""Acts against what a whole daemon does with file trees and with checkpoints that come from elsewhere."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

from sandbox import PagurusError
from sandbox.content import transfer
from sandbox.content.transfer import FrameKind, TransferHeader
from sandbox.messages import CheckpointInfo, Mount
from sandbox.sdk.processes import Process
from tests.hostile.api import ApiScene, act

TIMEOUT = 600.0  # seconds after which something is held to have no end
EXCHANGE = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None)
one, other = sys.argv[1:3]
pairs = [(f'{one}{n}'.encode(), f'{other}{n}'.encode()) for n in range(int(sys.argv[3]))]
print('racing', flush=True)
while True:
    for a, b in pairs: libc.syscall(316, -100, a, -100, b, 2)
"""
DIFFS = 40
FILES = 300


async def exchanging(scene: ApiScene, one: str, other: str, count: int) -> Process:
    """Pairs of names (``ONE0`` and ``OTHER0``, ...) change places as fast as they can, while commands go on."""
    await scene.attacker.files.write("/race.py", EXCHANGE)
    racer = await scene.attacker.processes.start(["python3", "/race.py", one, other, str(count)])
    async for _ in racer.stream():
        break  # it has begun
    return racer


@act("lead a comparison out by exchanging a directory and a symlink")
async def _diff_directory(scene: ApiScene) -> str:
    before = await scene.attacker.checkpoint()
    directory = scene.secret.parent
    said = await scene.tried(
        f"import os; os.makedirs('/race/dir0/sub'); os.symlink('{directory}', '/race/link0')\n"
        f"for n in range({FILES}): open(f'/race/dir0/f{{n}}', 'w').close()"
    )
    racer = await exchanging(scene, "/race/dir", "/race/link", 1)
    try:
        for _ in range(DIFFS):
            async with asyncio.timeout(TIMEOUT):
                result = await scene.attacker.diff(before)
            if led := [change.path for change in result if change.path.endswith(f"/{scene.secret.name}")]:
                return f"the comparison read {directory} of the host: {led}"
    finally:
        await racer.kill()
    return said


@act("block a comparison by exchanging a file and a FIFO")
async def _diff_fifo(scene: ApiScene) -> str:
    write = f"for n in range({FILES}): open(f'/race/a{{n}}', 'w').write('%s')"
    said = await scene.tried("import os; os.makedirs('/race')\n" + write % "x")
    before = await scene.attacker.checkpoint()
    fifos = f"for n in range({FILES}): os.mkfifo(f'/race/b{{n}}')"
    said = said or await scene.tried(f"import os\n{write % 'y'}\n{fifos}")
    racer = await exchanging(scene, "/race/a", "/race/b", FILES)
    try:
        for _ in range(DIFFS):
            async with asyncio.timeout(TIMEOUT):
                await scene.attacker.diff(before)
    except TimeoutError:
        return "a comparison waits for a FIFO of the sandbox"
    finally:
        await racer.kill()
    return said


@act("have the host read a hole of a tebibyte")
async def _hole(scene: ApiScene) -> str:
    before = await scene.attacker.checkpoint()
    said = await scene.tried("f = open('/hole', 'w'); f.truncate(1 << 40); f.seek(1 << 39); f.write('x'); f.close()")
    return said or await _everything(scene, before, "/hole")


@act("nest directories beyond the longest path")
async def _nested(scene: ApiScene) -> str:
    before = await scene.attacker.checkpoint()
    said = await scene.tried(
        "import os\nfor n in range(1500):\n"
        " name = f'nested{n % 10}' if n else 'top'\n os.mkdir(name); os.mkdir(f'{name}.too'); os.chdir(name)\n"
        "open('end', 'w').write('bottom')"
    )
    return said or await _everything(scene, before, "/top")


async def _everything(scene: ApiScene, before: CheckpointInfo, path: str) -> str:
    """Whatever reads a whole tree comes to its end, and comes to the right one."""
    host, sandbox = scene.host, scene.attacker
    step = "checkpoint"
    try:
        async with asyncio.timeout(TIMEOUT):
            after = await sandbox.checkpoint()
            step = "verify"
            if damage := [item for report in await host.store.verify() for item in report.damage]:
                return f"verify: {damage[0][-200:]}"
            step = "diff"
            if path not in {change.path for change in await sandbox.diff(before)}:
                return f"diff does not tell {path}"
            step = "export"
            data = await rewritten(host.store.stream(after), {})
            step = "import"
            came = await host.store.receive(parts(data))
            await host.store.remove(came.checkpoint)
            step = "commit"
            await host.images.commit(after, name := f"act-{secrets.token_hex(6)}")
            await host.images.remove(name)
            step = "restore"
            await sandbox.restore(after, verify=True)
            step = "remove"
            await sandbox.files.remove(path, recursive=True)
    except TimeoutError:
        return f"{step} does not come to an end"
    except PagurusError as error:
        return f"{step}: {error}"
    return "" if len(data) < 8 << 20 else f"the export has {len(data)} bytes"


# --------------------------------------------------------------------------- streams

SETTINGS: dict[str, dict[str, Any]] = {
    "mounts a directory of the host": {"mounts": [{"target": "/x", "source": "{folder}"}]},
    "mounts over a part of the runtime": {"mounts": [{"target": "/etc"}]},
    "mounts scratch at a place that leads out": {"mounts": [{"target": "/a/../../b"}]},
    "names a runtime layer elsewhere": {"layer": "../../../../{folder}"},
    "names a gateway": {"gateway": {"upstream": "http://127.0.0.1:1/"}},
    "has a limit that is no size": {"limits": {"memory": "-1"}},
    "has a limit beyond all bounds": {"limits": {"processes": -5}},
    "has a network that cannot be enforced": {"network": {"mode": "allow", "cidrs": ["everything"], "names": []}},
    "has a variable with a NUL byte": {"env": {"A": "\0"}},
    "has a variable without a name": {"env": {"": "x"}},
    "works in a place that is none": {"workdir": "nowhere"},
    "runs as nobody there can be": {"user": "a\0b"},
    "ignores by a pattern that is none": {"ignore": {"paths": ["relative"]}},
    "keeps no checkpoint": {"retention": {"last": 0}},
    "has a lifetime that never was": {"lifetime": -1.0},
    "has the name of an image that is a path": {"image": "../../etc"},
    "has more settings than a request may have": {"labels": {"x": "y" * (2 << 20)}},
}


async def rewritten(stream: AsyncIterator[bytes], changes: dict[str, Any]) -> bytes:
    """A stream as it came, but for settings of its head and its id."""
    reader, frames = transfer.Reader(), bytearray()
    async for part in stream:
        frames += part
    ((_, head), *_) = list(reader.feed(bytes(frames)))
    assert isinstance(head, TransferHeader)
    head.id = f"c-{secrets.token_hex(6)}"
    head.template = {**head.template, **changes}
    writer = transfer.TransferWriter()
    made = bytearray(writer.start(head))
    place = len(transfer.MAGIC)
    while place < len(frames):
        kind, size = frames[place], int.from_bytes(frames[place + 1 : place + 5], "little")
        if kind not in (FrameKind.HEAD, FrameKind.END):
            made += writer.frame(FrameKind(kind), bytes(frames[place + 5 : place + 5 + size]))
        place += 5 + size
    return bytes(made) + writer.end()


def _filled(value: Any, directory: str) -> Any:
    if isinstance(value, dict):
        return {name: _filled(item, directory) for name, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, directory) for item in value]
    return value.replace("{folder}", directory) if isinstance(value, str) else value


async def parts(data: bytes) -> AsyncIterator[bytes]:
    yield data


def _import_act(name: str, settings: dict[str, Any]) -> None:
    @act(f"import a checkpoint that {name}")
    async def check(scene: ApiScene) -> str:
        taken = await scene.attacker.checkpoint()
        data = await rewritten(scene.host.store.stream(taken), {})
        control = await scene.host.store.receive(parts(data))  # the same stream without the attempt comes in
        await scene.host.store.remove(control.checkpoint)
        data = await rewritten(scene.host.store.stream(taken), _filled(settings, str(scene.secret.parent)))
        try:
            result = await scene.host.store.receive(parts(data))
        except PagurusError as error:
            return "" if error.status < 500 else f"refused as a failure of the daemon: {error}"
        await scene.host.store.remove(result.checkpoint)
        return "it was taken in"


for _name, _settings in SETTINGS.items():
    _import_act(_name, _settings)


VOLUMES = """
import errno, fcntl, os, struct, sys
here, made = os.open('/scratch', os.O_RDONLY), 0
create, snapshot = struct.pack('=q', 0) + b'inner', struct.pack('=q', here) + b'shot'
flags = struct.pack('=Q', 2)
for number, args in ((0x5000940e, create), (0x50009401, snapshot), (0x80089418, b''), (0x4008941a, flags)):
    try: fcntl.ioctl(here, number, bytearray(args.ljust(4096, b'\\0')))
    except OSError as error: made += error.errno != errno.ENOTTY
    else: made += 1
open('/scratch/one', 'w').write('x' * 100_000)
fcntl.ioctl(open('/scratch/two', 'w'), 0x40049409, os.open('/scratch/one', os.O_RDONLY))  # what cp --reflink does
sys.exit(f'{made} calls went through' if made else 0)
"""


@act("make subvolumes outside the limit of a scratch mount")
async def _volumes(scene: ApiScene) -> str:
    mounts = [Mount.scratch("/scratch", size="16MiB")]
    async with scene.host.create(scene.attacker.info.image, mounts=mounts) as sandbox:
        done = await sandbox.exec(["python3", "-c", VOLUMES])
    return done.stderr.decode(errors="replace")[-200:]


TAKEN = """
import ctypes, errno, os, signal, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def until_refused(most, take):
    for n in range(most):
        if take(n) < 0: return n
    return most
kept = [ctypes.c_ulong(0) for _ in range(64)]
signal.pthread_sigmask(signal.SIG_BLOCK, [40])
value = struct.pack('=iiiiiq', 40, 0, -1, 0, 0, 0).ljust(128, b'\\0')
attributes = (ctypes.c_long * 8)(0, 10, 8192, 0)
print({
    'asynchronous requests': until_refused(8, lambda n: libc.syscall(206, 65000, ctypes.byref(kept[n]))),
    'inotify instances': until_refused(1000, lambda n: libc.inotify_init()),
    'queued signals': until_refused(200_000, lambda n: libc.syscall(129, os.getpid(), 40, value)),
    'message queues': until_refused(64, lambda n: libc.syscall(240, b'a%d' % n, 0o102, 0o600, attributes)),
}, flush=True)
time.sleep(1000)
"""
STILL = """
import ctypes, os, signal, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
context = ctypes.c_ulong(0)
signal.pthread_sigmask(signal.SIG_BLOCK, [40])
value = struct.pack('=iiiiiq', 40, 0, -1, 0, 0, 0).ljust(128, b'\\0')
attributes = (ctypes.c_long * 8)(0, 10, 8192, 0)
sys.exit(', '.join(what for what, got in (
    ('asynchronous requests', libc.syscall(206, 1000, ctypes.byref(context))),
    ('inotify instances', libc.inotify_init()),
    ('queued signals', libc.syscall(129, os.getpid(), 40, value)),
    ('message queues', libc.syscall(240, b'still', 0o102, 0o600, attributes)),
) if got < 0) or 0)
"""


@act("take all of what the kernel counts for the whole host")
async def _complete_host(scene: ApiScene) -> str:
    """Asynchronous requests, inotify instances, queued signals, message queues: the neighbour still gets some."""
    taker = await scene.attacker.processes.start(["python3", "-c", TAKEN])
    try:
        async for _ in taker.stream():
            break  # it has taken what it could
        done = await scene.neighbour.exec(["python3", "-c", STILL])
        state = await taker.refresh()
    finally:
        await taker.kill()
    if state.exit_code is not None:
        return f"was not tried: exit {state.exit_code}"
    return f"nothing left for the neighbour of: {done.stderr.decode(errors='replace').strip()}" * bool(done.exit_code)
