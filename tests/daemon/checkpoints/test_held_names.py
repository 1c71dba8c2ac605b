"""Turns that change files alone, beside processes that hold the things by any name: the checkpoint can be restored."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox import CheckpointFailed, Client
from tests.support.checkpoint_programs import CHECK, python_program
from tests.support.daemon_host import IMAGE, Daemon

SERVE = "\nserve(check)\n"
LINKED = "a file that lost one of its names"
#: what is held -> (the program, what a turn does to it)
HELD = {
    "a watched directory, moved": (
        """
os.makedirs('/t/watched'); libc = ctypes.CDLL(None); watch = libc.inotify_init1(os.O_NONBLOCK)
assert libc.inotify_add_watch(watch, b'/t/watched', 0x100) > 0
def check(): return True""",
        "mv /t/watched /t/elsewhere",
    ),
    "a watched directory, made again": (
        """
os.makedirs('/t/watched'); libc = ctypes.CDLL(None); watch = libc.inotify_init1(os.O_NONBLOCK)
assert libc.inotify_add_watch(watch, b'/t/watched', 0x100) > 0
def check(): return True""",
        "rmdir /t/watched; mkdir /t/watched",
    ),
    "a root directory, moved": (
        """
os.makedirs('/t/jail')
if os.fork() == 0:
    os.chroot('/t/jail'); os.chdir('/'); open('/ready', 'w').close()
    while True: signal.pause()
while not os.path.exists('/t/jail/ready'): time.sleep(0.01)
def check(): return True""",
        "mv /t/jail /t/prison",
    ),
    "a device node, moved": (
        """
device = os.open('/dev/full', os.O_RDWR)
def check(): return len(os.read(device, 3)) == 3""",
        "mv /dev/full /dev/fuller",
    ),
    "a symbolic link, replaced": (
        """
os.symlink('here', '/t/link'); link = os.open('/t/link', os.O_PATH | os.O_NOFOLLOW)
def check(): return os.readlink('', dir_fd=link) == 'here'""",
        "ln -sfn there /t/link",
    ),
    "a symbolic link, removed": (
        """
os.symlink('here', '/t/link'); link = os.open('/t/link', os.O_PATH | os.O_NOFOLLOW)
def check(): return True""",
        "rm /t/link",
    ),
    "the path of a listener, removed": (
        """
listener = socket.socket(socket.AF_UNIX); listener.bind('/t/socket'); listener.listen()
def check(): return not os.path.exists('/t/socket')""",
        "rm /t/socket",
    ),
    "the path of a receiver, bound from where it worked, removed": (
        """
os.mkdir('/t/run'); os.chdir('/t/run')
receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); receiver.bind('socket')
def check(): return True""",
        "rm /t/run/socket",
    ),
    "a FIFO, replaced": (
        """
os.mkfifo('/t/pipe'); pipe = os.open('/t/pipe', os.O_RDWR)
def check(): return os.write(pipe, b'x') == 1 and os.read(pipe, 1) == b'x'""",
        "rm /t/pipe; mkfifo /t/pipe",
    ),
    LINKED: (
        """
file = open('/t/file', 'w+'); file.write('kept'); file.flush(); os.link('/t/file', '/t/twin'); os.unlink('/t/file')
def check(): return (file.seek(0) or file.read()) == 'kept'""",
        "touch /t/other",
    ),
    "a program, removed": (
        """
import shutil; shutil.copy('/bin/sleep', '/t/sleeper'); child = subprocess.Popen(['/t/sleeper', '1000000'])
def check(): return child.poll() is None""",
        "rm /t/sleeper",
    ),
    "a mapped file, renamed over": (
        """
open('/t/file', 'w').write('kept' * 1024); file = os.open('/t/file', os.O_RDWR); mapped = mmap.mmap(file, 4096)
os.close(file)
def check(): return mapped[:4] == b'kept'""",
        "cp /t/file /t/new; mv /t/new /t/file",
    ),
    "the same name, held twice": (
        """
first = open('/t/name', 'w+'); first.write('first'); first.flush(); os.unlink('/t/name')
second = open('/t/name', 'w+'); second.write('second'); second.flush(); os.unlink('/t/name')
def check(): return [one.seek(0) or one.read() for one in (first, second)] == ['first', 'second']""",
        "touch /t/name",
    ),
}


@pytest.mark.parametrize("held", list(HELD))
async def test_a_checkpoint_of_such_a_turn_can_be_restored(host: Client, held: str) -> None:
    body, act = HELD[held]
    async with host.create(IMAGE) as sb:
        started = await sb.exec(python_program(body + SERVE))
        assert started.verdict is not None and started.verdict.processes, started.reason
        await sb.exec("true")
        done = await sb.exec(act)
        assert done.exit_code == 0, done.stderr
        result = await sb.checkpoint(wait="durable")
        for verify in (False, True):
            await sb.exec("true > /t/later")
            await sb.restore(result.id, verify=verify)
            assert (await sb.exec(CHECK)).stdout == b"good\n"


async def test_no_checkpoint_has_the_link_that_criu_makes(host: Client) -> None:
    async with host.create(IMAGE) as sb:
        await sb.exec(python_program(HELD[LINKED][0] + SERVE))
        first = await sb.checkpoint(wait="durable")
        names = (await sb.exec("ls -A /t")).stdout
        await sb.exec("true > /t/later")
        second = await sb.checkpoint(wait="durable")
        assert "/t/later" in {change.path for change in await sb.diff(first)}
        for checkpoint in (first, second):
            assert not [change for change in await sb.diff(checkpoint) if "link_remap" in change.path]
        await sb.restore(first.id, verify=True)
        assert (await sb.exec("ls -A /t")).stdout == names and b"twin" in names
        assert (await sb.exec(CHECK)).stdout == b"good\n"


#: what has become of something held, so that CRIU could not bring it back -> (the program, what a turn does to it)
LOST = {
    "the path of a listener, moved": (
        """
os.mkdir('/t/run'); listener = socket.socket(socket.AF_UNIX); listener.bind('/t/run/socket'); listener.listen()
def check(): return True""",
        "mv /t/run /t/ran",
    ),
    "where a deleted file was, replaced by a file": (
        """
os.mkdir('/t/dir'); file = open('/t/dir/file', 'w+'); file.write('kept'); file.flush(); os.unlink('/t/dir/file')
def check(): return True""",
        "rmdir /t/dir; touch /t/dir",
    ),
    "a working directory, made again": (
        """
os.mkdir('/t/work'); os.chdir('/t/work')
def check(): return True""",
        "rmdir /t/work; mkdir /t/work",
    ),
    "an open directory, replaced by a file": (
        """
os.mkdir('/t/dir'); held = os.open('/t/dir', os.O_RDONLY | os.O_DIRECTORY)
def check(): return True""",
        "rmdir /t/dir; touch /t/dir",
    ),
    "a watched file, removed": (
        """
open('/t/file', 'w').close(); libc = ctypes.CDLL(None); watch = libc.inotify_init1(os.O_NONBLOCK)
file = os.open('/t/file', os.O_RDONLY); assert libc.inotify_add_watch(watch, b'/t/file', 0x2) > 0
def check(): return True""",
        "rm /t/file",
    ),
}


@pytest.mark.parametrize("lost", list(LOST))
async def test_what_cannot_come_back_is_refused_with_the_hint(host: Client, lost: str) -> None:
    body, act = LOST[lost]
    async with host.create(IMAGE) as sb:
        await sb.durable(await sb.exec(python_program(body + SERVE)))
        await sb.exec(act)
        with pytest.raises(CheckpointFailed) as caught:
            await sb.checkpoint(wait="durable")
        assert caught.value.hint
        assert (await sb.exec(CHECK)).stdout == b"good\n"  # it goes on


# Holds one of each. What it reads through its descriptors stays what it was, whatever becomes of their names.
ONE_OF_ITEM = """
for name in ('plain', 'mapped', 'program'):
    with open(f'/t/{name}', 'wb') as file: file.write(open('/bin/sleep', 'rb').read())
os.chmod('/t/program', 0o755)
for name in ('dir', 'work', 'watched'): os.mkdir(f'/t/{name}')
os.symlink('here', '/t/link'); os.mkfifo('/t/fifo')
plain, mapped = os.open('/t/plain', os.O_RDONLY), os.open('/t/mapped', os.O_RDONLY)
held = mmap.mmap(mapped, 4096, prot=mmap.PROT_READ); os.close(mapped)
fifo, link = os.open('/t/fifo', os.O_RDWR), os.open('/t/link', os.O_PATH | os.O_NOFOLLOW)
listing = os.open('/t/dir', os.O_RDONLY | os.O_DIRECTORY)
listener = socket.socket(socket.AF_UNIX); listener.bind('/t/socket'); listener.listen()
watch = ctypes.CDLL(None).inotify_init1(os.O_NONBLOCK)
assert ctypes.CDLL(None).inotify_add_watch(watch, b'/t/watched', 0x100) > 0
child = subprocess.Popen(['/t/program', '1000000']); os.chdir('/t/work')
def check():
    os.write(fifo, b'x')
    return os.read(fifo, 1) == b'x' and os.pread(plain, 4, 0) == held[:4] == b'\\x7fELF' and \\
        os.readlink('', dir_fd=link) == 'here' and child.poll() is None and not os.listdir(listing)
"""
NAMES = st.sampled_from(["plain", "mapped", "program", "dir", "work", "watched", "link", "fifo", "socket"])
ACTS = st.one_of(
    st.just("echo more >> /t/other"),
    st.builds("touch /t/{0}.new".format, NAMES),
    st.builds("mv /t/{0} /t/{0}.moved".format, NAMES),
    st.builds("rm -r /t/{0}".format, NAMES),
    st.builds(
        "cp -a /t/{0} /t/{0}.copy && mv -T /t/{0}.copy /t/{0}".format, st.sampled_from(["plain", "mapped", "link"])
    ),
)


@settings(max_examples=15)
@given(turns=st.lists(st.lists(ACTS, min_size=1, max_size=3, unique=True), min_size=1, max_size=3))
async def test_whatever_turns_do_to_what_is_held_a_durable_checkpoint_can_be_restored(
    daemon: Daemon, turns: list[list[str]]
) -> None:
    """A checkpoint may be refused, since some of these states cannot be dumped; it never lies."""
    async with daemon.client() as host, host.create(IMAGE) as sb:
        await sb.exec(python_program(ONE_OF_ITEM + SERVE))
        for acts in turns:
            await sb.exec("; ".join(acts))
            try:
                result = await sb.checkpoint(wait="durable")
            except CheckpointFailed as error:
                assert error.hint
                continue
            await sb.restore(result.id, verify=True)
            assert (await sb.exec(CHECK)).stdout == b"good\n", turns
