"""Programs that run in sandboxes of the checkpoint tests.

Each is (start, check): `start` leaves background processes behind, `check` prints "good" while they still hold what
they held. A check after a restore thus proves more than equality of images: the processes go on.
"""

from __future__ import annotations

# Every Python program answers "check" on a FIFO pair, so that a check needs no timing: it blocks until the answer.
_SERVE = """
import os, sys, mmap, select, signal, socket, threading, time, fcntl, struct, subprocess, tempfile, ctypes, errno
def serve(check):
    os.makedirs('/t', exist_ok=True)
    for name in ('/t/ask', '/t/answer'):
        if not os.path.exists(name): os.mkfifo(name)
    ask, answer = os.open('/t/ask', os.O_RDWR), os.open('/t/answer', os.O_RDWR)
    open('/t/ready', 'w').close()
    while True:
        try:
            os.read(ask, 1)
        except InterruptedError:
            continue
        try:
            result = 'good' if check() else 'bad'
        except Exception as error:
            result = repr(error)
        os.write(answer, (result + '\\n').encode())
"""
CHECK = "printf x > /t/ask; head -n1 /t/answer"


def python_program(body: str) -> str:
    source = _SERVE + body
    return (
        "mkdir -p /t; rm -f /t/ready; cat > /t/program.py <<'PROGRAM'\n"
        + source
        + "\nPROGRAM\npython3 /t/program.py > /t/log 2>&1 & while [ ! -e /t/ready ]; do sleep 0.05; done"
    )


SHELL = (
    "mkdir -p /t; (n=0; while :; do n=$((n+1)); echo $n > /t/count; sleep 0.05; done) > /dev/null 2>&1 & "
    "while [ ! -s /t/count ]; do sleep 0.05; done",
    'a=$(cat /t/count); while b=$(cat /t/count); [ "$a" = "$b" ] || [ -z "$b" ]; do sleep 0.05; done; '
    '[ "$b" -gt "${a:-0}" ] && echo good',
)
TCP = (
    python_program("""
listener = socket.create_server(('127.0.0.1', 80))
client = socket.create_connection(('127.0.0.1', 80))
server, _ = listener.accept()
client.sendall(b'left in flight')
def check():
    global first
    got = server.recv(14, socket.MSG_WAITALL) if first else b'left in flight'
    first = False
    server.sendall(b'back'); ok = client.recv(4, socket.MSG_WAITALL) == b'back'
    with socket.create_connection(('127.0.0.1', 80)) as c:
        peer, _ = listener.accept(); peer.sendall(b'new'); ok = ok and c.recv(3) == b'new'; peer.close()
    return ok and got == b'left in flight'
first = True
serve(check)
"""),
    CHECK,
)
LISTENER = (
    python_program("""
listener = socket.create_server(('127.0.0.1', 8080))
def check():
    with socket.create_connection(('127.0.0.1', 8080)) as c:
        peer, _ = listener.accept(); peer.sendall(b'new'); ok = c.recv(3) == b'new'
        peer.close()
    return ok
serve(check)
"""),
    CHECK,
)
UNIX = (
    python_program("""
listener = socket.socket(socket.AF_UNIX); listener.bind('/t/socket'); listener.listen()
abstract = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); abstract.bind('\\0crab')
a, b = socket.socketpair()
a.sendall(b'queued')
first = True
def check():
    global first
    ok = True
    if first:
        ok = b.recv(6) == b'queued'; first = False
    with socket.socket(socket.AF_UNIX) as c:
        c.connect('/t/socket'); p, _ = listener.accept(); p.sendall(b'x'); ok = ok and c.recv(1) == b'x'; p.close()
    return ok
serve(check)
"""),
    CHECK,
)
PIPES = (
    python_program("""
r, w = os.pipe(); r2, w2 = os.pipe()
os.write(w, b'kept in the pipe')
child = os.fork()
if child == 0:
    while True:
        os.write(w2, os.read(r, 4096))
os.close(r); os.close(w2)
got = b''
def check():
    global got
    os.write(w, b'!')
    while not got.endswith(b'!'): got += os.read(r2, 4096)
    ok = got == b'kept in the pipe!' ; got = b'kept in the pipe'
    return ok
serve(check)
"""),
    CHECK,
)
FILES = (
    python_program("""
log = open('/t/data', 'w+'); log.write('0123456789'); log.flush(); log.seek(4)
gone = open('/t/gone', 'w+b'); gone.write(os.urandom(1) * (3 << 20)); gone.flush(); os.unlink('/t/gone')
os.link('/t/data', '/t/link')
fcntl.flock(log, fcntl.LOCK_EX)
mapped = mmap.mmap(os.open('/t/map', os.O_RDWR | os.O_CREAT), 0) if os.path.exists('/t/map') else None
def check():
    with open('/t/data') as other:
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB); locked = False
        except OSError: locked = True
    return locked and log.read(2) == '45' and log.seek(4) == 4 and os.fstat(gone.fileno()).st_size == 3 << 20
serve(check)
"""),
    CHECK,
)
THREADS = (
    python_program("""
counts = [0] * 4; lock = threading.Lock(); wake = threading.Condition()
def work(i):
    while True:
        with wake: wake.wait()
        with lock: counts[i] += 1
for i in range(4): threading.Thread(target=work, args=(i,), daemon=True).start()
def check():
    before = sum(counts)
    while sum(counts) < before + 4:
        with wake: wake.notify_all()
        time.sleep(0.01)
    return True
serve(check)
"""),
    CHECK,
)
EVENTS = (
    python_program("""
libc = ctypes.CDLL(None, use_errno=True)
event = libc.eventfd(7, 0)
ep = select.epoll(); r, w = os.pipe(); ep.register(r, select.EPOLLIN); ep.register(event, select.EPOLLIN)
timer = libc.timerfd_create(1, 0)
libc.timerfd_settime(timer, 0, struct.pack('qqqq', 3600, 0, 3600, 0), None)
mask = struct.pack('Q', 1 << (signal.SIGUSR1 - 1)) + bytes(120)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
sfd = libc.signalfd(-1, mask, 0)
memory = os.memfd_create('crab'); os.write(memory, b'in memory')
shared = mmap.mmap(-1, 1 << 20); shared[:5] = b'twins'
if os.fork() == 0:
    while True:
        if shared[100] != shared[101]: shared[101] = shared[100]
        time.sleep(0.02)
def check():
    os.write(w, b'1'); ready = dict(ep.poll(1)); os.read(r, 1)
    os.kill(os.getpid(), signal.SIGUSR1); got = os.read(sfd, 128)
    shared[100] = (shared[100] + 1) % 250
    while shared[101] != shared[100]: time.sleep(0.01)
    return r in ready and event in ready and len(got) == 128 and os.pread(memory, 9, 0) == b'in memory'
serve(check)
"""),
    CHECK,
)
TERMINAL = (
    python_program("""
import pty
pid, master = pty.fork()
if pid == 0:
    while True:
        line = sys.stdin.readline()
        print('echo ' + line.strip(), flush=True)
def check():
    os.write(master, b'hello\\n'); got = b''
    while b'echo hello' not in got: got += os.read(master, 100)
    return True
serve(check)
"""),
    CHECK,
)
MEMORY = (
    python_program("""
import hashlib
block = bytearray(os.urandom(50 << 20)); digest = hashlib.sha1(block).hexdigest()
def check(): return hashlib.sha1(block).hexdigest() == digest
serve(check)
"""),
    CHECK,
)
USERS = (
    python_program("""
os.makedirs('/t/own', exist_ok=True); os.chown('/t/own', 1000, 1000)
child = os.fork()
if child == 0:
    os.setgroups([1000, 44]); os.setgid(1000); os.setuid(1000); os.umask(0o27); os.chdir('/t/own')
    signal.alarm(5000)
    import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
    signal.signal(signal.SIGUSR2, lambda *_: open('/t/own/seen', 'w').write(repr((os.getuid(), os.getgroups(),
        os.umask(0o27), os.getcwd(), resource.getrlimit(resource.RLIMIT_NOFILE)))))
    os.mkdir('/t/own/set')
    while True: signal.pause()
while not os.path.exists('/t/own/set'): time.sleep(0.02)
def check():
    if os.path.exists('/t/own/seen'): os.unlink('/t/own/seen')
    os.kill(child, signal.SIGUSR2)
    while not os.path.exists('/t/own/seen') or not os.path.getsize('/t/own/seen'): time.sleep(0.02)
    return open('/t/own/seen').read() == repr((1000, [44, 1000], 0o27, '/t/own', (100, 200)))
serve(check)
"""),
    CHECK,
)
IPC = (
    python_program("""
libc = ctypes.CDLL(None, use_errno=True); libc.shmat.restype = ctypes.c_void_p
number = libc.shmget(77, 8192, 0o1600)
address = libc.shmat(number, None, 0)
ctypes.memmove(address, b'system five', 11)
queue = libc.msgget(78, 0o1600)
libc.msgsnd(queue, struct.pack('q', 5) + b'message', 7, 0)
sem = libc.semget(79, 1, 0o1600)
def check():
    again = libc.shmat(libc.shmget(77, 8192, 0), None, 0)
    got = ctypes.string_at(again, 11); libc.shmdt(ctypes.c_void_p(again))
    buffer = ctypes.create_string_buffer(64); n = libc.msgrcv(queue, buffer, 56, 5, 0)
    libc.msgsnd(queue, buffer, 7, 0)
    return got == b'system five' and n == 7 and buffer.raw[8:15] == b'message'
serve(check)
"""),
    CHECK,
)
SEQPACKET = (
    python_program("""
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); listener.bind('/t/packets'); listener.listen()
client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); client.connect('/t/packets')
server, _ = listener.accept()
client.send(b'one'); client.send(b'three')
receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); receiver.bind('/t/letters')
sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); sender.connect('/t/letters'); sender.send(b'letter')
first = True
def check():
    global first
    ok = True
    if first:
        ok = server.recv(100) == b'one' and server.recv(100) == b'three' and receiver.recv(100) == b'letter'
        first = False
    client.send(b'again'); sender.send(b'more')
    return ok and server.recv(100) == b'again' and receiver.recv(100) == b'more'
serve(check)
"""),
    CHECK,
)
FIFO = (
    python_program("""
os.path.exists('/t/fifo') or os.mkfifo('/t/fifo', 0o640)
both = os.open('/t/fifo', os.O_RDWR | os.O_NONBLOCK); reader = os.open('/t/fifo', os.O_RDONLY)
os.write(both, b'kept in the fifo')
first = True
def check():
    global first
    ok = os.read(reader, 100) == b'kept in the fifo' if first else True
    first = False
    os.write(both, b'x')
    return ok and os.read(reader, 100) == b'x' and fcntl.fcntl(both, fcntl.F_GETFL) & os.O_NONBLOCK
serve(check)
"""),
    CHECK,
)
SHARED = (
    python_program("""
from multiprocessing import shared_memory, resource_tracker
fd = os.open('/dev/shm/crab', os.O_RDWR | os.O_CREAT, 0o600); os.ftruncate(fd, 1 << 16)
posix = mmap.mmap(fd, 1 << 16); posix[:6] = b'named!'
gone = os.open('/dev/shm/gone', os.O_RDWR | os.O_CREAT, 0o600); os.ftruncate(gone, 1 << 16)
unnamed = mmap.mmap(gone, 1 << 16); unnamed[:7] = b'deleted'; os.unlink('/dev/shm/gone')
libc = ctypes.CDLL(None, use_errno=True)
child = os.fork()
if child == 0:
    while True:
        if posix[100] != unnamed[100]: unnamed[100] = posix[100]
        time.sleep(0.02)
def check():
    posix[100] = (posix[100] + 1) % 250
    while unnamed[100] != posix[100]: time.sleep(0.01)
    return posix[:6] == b'named!' and unnamed[:7] == b'deleted' and os.pread(fd, 6, 0) == b'named!'
serve(check)
"""),
    CHECK,
)
TIMERS = (
    python_program("""
libc = ctypes.CDLL(None, use_errno=True)
ticks = []
signal.signal(signal.SIGALRM, lambda *_: ticks.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
signal.setitimer(signal.ITIMER_PROF, 1000, 1000)
event = ctypes.create_string_buffer(64); struct.pack_into('Pii', event, 0, 0, signal.SIGUSR1, 0)
number = ctypes.c_void_p()
signal.signal(signal.SIGUSR1, lambda *_: ticks.append(2))
assert libc.timer_create(1, event, ctypes.byref(number)) == 0
libc.timer_settime(number, 0, struct.pack('qqqq', 0, 20_000_000, 0, 20_000_000), None)
def check():
    seen = len(ticks); deadline = time.monotonic() + 10
    while not {1, 2} <= set(ticks[seen:]) and time.monotonic() < deadline: time.sleep(0.01)
    return {1, 2} <= set(ticks[seen:])
serve(check)
"""),
    CHECK,
)
CONFINED = (
    python_program("""
libc = ctypes.CDLL(None, use_errno=True)
child = os.fork()
if child == 0:
    # Without the capability to override permissions, and with a filter that refuses chmod.
    header = struct.pack('Ii', 0x20080522, 0); none = struct.pack('IIIIII', 0, 0, 0, 0, 0, 0)
    assert libc.capset(header, none) == 0
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, 90), (0x06, 0, 0, 0x50000 | 77), (0x06, 0, 0, 0x7fff0000)]
    program = b''.join(struct.pack('HBBI', *one) for one in code)
    buffer = ctypes.create_string_buffer(program)
    filter = struct.pack('HxxxxxxP', len(code), ctypes.addressof(buffer))
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.c_char_p(filter), 0, 0) == 0
    def say(*_):
        libc.chmod(b'/t', 0o755); refused = ctypes.get_errno()
        lines = open('/proc/self/status').read().splitlines()
        kept = [line.split()[1] for line in lines if line.startswith(('CapEff', 'Seccomp:', 'NoNewPrivs'))]
        open('/t/said', 'a').write(repr((refused, kept)) + '\\n')
    signal.signal(signal.SIGUSR1, say); open('/t/confined', 'w').close()
    while True: signal.pause()
while not os.path.exists('/t/confined'): time.sleep(0.02)
def check():
    if os.path.exists('/t/said'): os.unlink('/t/said')
    os.kill(child, signal.SIGUSR1)
    while not os.path.exists('/t/said') or not open('/t/said').read().endswith('\\n'): time.sleep(0.02)
    return open('/t/said').read() == repr((77, ['0000000000000000', '1', '2'])) + '\\n'
serve(check)
"""),
    CHECK,
)
WATCH = (
    python_program("""
libc = ctypes.CDLL(None, use_errno=True)
os.makedirs('/t/watched', exist_ok=True); os.path.exists('/t/watched/file') or open('/t/watched/file', 'w').close()
watch = libc.inotify_init1(os.O_NONBLOCK)
assert libc.inotify_add_watch(watch, b'/t/watched', 0x100 | 0x8) > 0  # created, closed after writing
def check():
    open('/t/watched/new', 'w').close()
    got = os.read(watch, 4096); os.unlink('/t/watched/new')
    return b'new' in got
serve(check)
"""),
    CHECK,
)
PASSED = (
    python_program("""
a, b = socket.socketpair()
r, w = os.pipe(); os.write(w, b'inside')
socket.send_fds(a, [b'descriptor'], [r]); os.close(r)
watched = os.pidfd_open(os.getpid())
first = True
def check():
    global first, r
    if first: _, (r,), _, _ = socket.recv_fds(b, 100, 1)
    ok = os.read(r, 6) == b'inside' if first else True
    first = False
    signal.pidfd_send_signal(watched, 0)
    os.write(w, b'!')
    return ok and os.read(r, 1) == b'!'
serve(check)
"""),
    CHECK,
)
ALL = {
    "shell": SHELL, "listener": LISTENER, "tcp": TCP, "unix": UNIX, "pipes": PIPES, "files": FILES, "threads": THREADS,
    "events": EVENTS, "terminal": TERMINAL, "memory": MEMORY, "users": USERS, "ipc": IPC,
    "seqpacket": SEQPACKET, "fifo": FIFO, "shared": SHARED, "timers": TIMERS, "confined": CONFINED, "watch": WATCH,
    "passed": PASSED,
}  # fmt: skip
