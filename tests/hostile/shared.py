"""What two sandboxes share without seeing each other: the files of one image, one pool, one kernel that counts.

Each act asks the kernel for something that a neighbour's doing could change, has the neighbour do it, and compares.
"""

from __future__ import annotations

from tests.hostile.act import ATTEMPT, Scene, act, judge, run

SHARED = "/usr/bin/env"  # a file of the image that both stand on
READS = f"cat {SHARED} >/dev/null; ls /usr/bin >/dev/null; {SHARED} true; readlink /bin >/dev/null; cp {SHARED} /x"
WATCH = f"""
import select
events = 0xfff  # whatever there is
made = libc.inotify_init1(0)
watched = [libc.inotify_add_watch(made, path, events) for path in (b'{SHARED}', b'/usr/bin', b'/')]
if min(watched) < 0: sys.exit('no watch')
open('/armed', 'w').close(); os.read(made, 65536)  # our own
end = time.time() + 15
while not os.path.exists('/done') and time.time() < end: time.sleep(0.02)
seen = os.read(made, 65536) if select.select([made], [], [], 0)[0] else b''
at, names = 0, []
while at < len(seen):
    wd, mask, _, size = struct.unpack_from('iIII', seen, at)
    names.append((wd == watched[0], seen[at + 16 : at + 16 + size].rstrip(b'\\0')))
    at += 16 + size
print('tried', len(names))  # what leads to /done is ours as well
for own, name in names:
    if own or name in (b'env', b'ls', b'readlink', b'cp', b'x'): print('BREACH seen', name)
"""
STATES = """
def look():
    found = []
    for path in ('{shared}', '/usr/bin', '/bin', '/usr/lib', '/etc/passwd'):
        s = os.stat(path, follow_symlinks=False)
        found.append((path, s.st_atime_ns, s.st_mtime_ns, s.st_ctime_ns, s.st_nlink, s.st_blocks))
    # Locks of open file descriptions are shown to everybody (docs/isolation.md says so), without whose they are.
    return found + [os.listxattr('{shared}'), *(line for line in open('/proc/locks') if 'OFDLCK' not in line)]
""".replace("{shared}", SHARED)
FIEMAP = """
import fcntl
def extents(path):
    with open(path, 'rb') as file:
        head = bytearray(struct.pack('=QQIIII', 0, 1 << 62, 1, 0, 64, 0) + bytes(64 * 56))  # FIEMAP_FLAG_SYNC
        fcntl.ioctl(file, 0xC020660B, head)
        (count,) = struct.unpack_from('=I', head, 20)
        return [struct.unpack_from('=I', head, 32 + 56 * n + 40)[0] for n in range(count)]
"""
EQUAL = "import random; open('/equal', 'wb').write(random.Random(7).randbytes(4 << 20)); import os; os.sync()"


@act("watch a neighbour read and run files of the image (inotify)")
async def _inotify(scene: Scene) -> str:
    start = 'setsid python3 -c "$1" >/said 2>&1 & until test -e /armed; do sleep 0.01; done'
    await scene.attacker.exec(["sh", "-c", start, "sh", ATTEMPT + WATCH], timeout=20)
    done = await scene.neighbour.exec(["sh", "-c", READS], timeout=20)
    if done.exit_code:
        return f"was not tried: {done.stderr[-200:]!r}"
    said = await scene.attacker.exec(
        ["sh", "-c", ": >/done; until grep -q tried /said; do sleep 0.01; done; cat /said"]
    )
    return judge(said)


@act("tell by times, link counts and locks what a neighbour does with files of the image")
async def _times(scene: Scene) -> str:
    code = STATES + "print('tried', *look(), sep='\\n')"
    await run(scene, code)  # what looking does itself is done
    before = await run(scene, code)
    script = f"{READS}; ln /usr/bin/env /y; flock /etc/passwd -c 'sleep 3' & sleep 0.5; exec cat /etc/passwd"
    done = await scene.neighbour.exec(["sh", "-c", script], timeout=20)
    if done.exit_code:
        return f"was not tried: {done.stderr[-200:]!r}"
    after = await run(scene, code)
    wrong = judge(before) or judge(after)
    changed = set(before.stdout.splitlines()) ^ set(after.stdout.splitlines())
    return wrong or (f"it shows: {sorted(changed)}" if changed else "")


@act("hold a lock on a file of the image against a neighbour")
async def _locks(scene: Scene) -> str:
    lock = "import fcntl; f = open('/etc/group'); fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)"
    code = f"{lock}; print('tried', flush=True)"
    start = f'setsid python3 -c "{code}; import time; time.sleep(60)" >/said 2>&1 & until test -s /said; do :; done'
    done = await scene.attacker.exec(["sh", "-c", f"{start}; cat /said"], timeout=20)
    theirs = await scene.neighbour.exec(["python3", "-c", code], timeout=20)
    return judge(done) or ("" if theirs.stdout == b"tried\n" else f"the neighbour: {theirs.stderr[-200:]!r}")


@act("learn by FIEMAP's flag of shared extents what a neighbour has written")
async def _fiemap(scene: Scene) -> str:
    """Equal content of two sandboxes shares no extent, and says nothing."""
    done = await scene.neighbour.exec(["python3", "-c", EQUAL], timeout=30)
    mine = await scene.attacker.exec(["python3", "-c", EQUAL], timeout=30)
    if done.exit_code or mine.exit_code:
        return f"was not tried: {done.stderr[-200:]!r} {mine.stderr[-200:]!r}"
    code = FIEMAP + (
        "flags = extents('/equal'); print('tried' if flags else 'no extents', flags)\n"
        "if any(flag & 0x2000 for flag in flags): print('BREACH shared')\n"
        "try: print(len(extents('/usr/bin/env')))\nexcept OSError as e: print(e)"
    )
    return judge(await run(scene, code, timeout=20))
