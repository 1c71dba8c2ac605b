"""Programs whose state hangs on names: directories, replaced and deleted files, links, locks; and stopped ones.

Each is (start, check), as in :mod:`tests.support.checkpoint_programs`.
"""

from __future__ import annotations

from tests.support.checkpoint_programs import CHECK, python_program

EMPTY_EPOLL = (
    python_program("""
ep = select.epoll(); r, w = os.pipe()
def check():
    ep.register(r, select.EPOLLIN); os.write(w, b'1'); ready = ep.poll(5); os.read(r, 1); ep.unregister(r)
    return ready == [(r, select.EPOLLIN)]
serve(check)
"""),
    CHECK,
)
DIRECTORIES = (
    python_program("""
os.makedirs('/t/dir/below', exist_ok=True)
os.path.lexists('/t/link') or os.symlink('dir', '/t/link')
held = {flags: os.open('/t/dir', flags) for flags in (os.O_RDONLY | os.O_DIRECTORY, os.O_RDONLY,
    os.O_PATH | os.O_DIRECTORY, os.O_PATH, os.O_RDONLY | os.O_DIRECTORY | os.O_NOATIME)}
link = os.open('/t/link', os.O_PATH | os.O_NOFOLLOW)
listing = os.open('/t', os.O_RDONLY | os.O_DIRECTORY)
os.chdir('/t/dir/below')
def check():
    kept = all(os.stat('below', dir_fd=fd).st_ino == os.stat('.').st_ino for fd in held.values())
    listed = 'dir' in os.listdir(listing) and os.getcwd() == '/t/dir/below'
    return kept and listed and os.readlink('', dir_fd=link) == 'dir'
serve(check)
"""),
    CHECK,
)
SEGMENTS = (
    python_program("""
libc = ctypes.CDLL(None, use_errno=True); libc.shmat.restype = ctypes.c_void_p
def make(key, size): return libc.shmget(key, size, 0o1600)
def at(number, flags=0): return libc.shmat(number, None, flags)
attached, loose, doomed, part = make(91, 8192), make(92, 8192), make(0, 4096), make(94, 5000)
places = {number: at(number) for number in (attached, doomed, part)}
for number, place in places.items(): ctypes.memmove(place, b'kept %d' % (number == doomed), 6)
other = at(loose); ctypes.memmove(other, b'nobody', 6); libc.shmdt(ctypes.c_void_p(other))
reader = at(attached, 0o10000)
libc.shmctl(doomed, 0, None)
child = os.fork()
if child == 0:
    while True: signal.pause()
def check():
    again = at(loose); got = ctypes.string_at(again, 6); libc.shmdt(ctypes.c_void_p(again))
    marked = [line.split()[2] for line in open('/proc/sysvipc/shm') if line.split()[1] == str(doomed)] == ['1600']
    return (marked and got == b'nobody' and ctypes.string_at(reader, 6) == b'kept 0' and
            ctypes.string_at(places[doomed], 6) == b'kept 1' and ctypes.string_at(places[part], 6) == b'kept 0')
serve(check)
"""),
    CHECK,
)
CONNECTED = (
    python_program("""
def connected(kind, listener, own):
    server = socket.socket(socket.AF_UNIX, kind); server.bind(listener); server.listen(1)
    client = socket.socket(socket.AF_UNIX, kind); client.bind(own); client.connect(listener)
    return server, client, server.accept()[0]
kept = [connected(kind, f'/t/listens{kind}', f'/t/client{kind}') for kind in (1, 5)]
kept += [connected(1, b'\\0listens', b'\\0client')]
kept[0][0].close()
pairs = [socket.socketpair(socket.AF_UNIX, kind) for kind in (1, 5)]
[end.bind('') for pair in pairs for end in pair]
names = [end.getsockname() for pair in pairs for end in pair]
timer = ctypes.CDLL(None).timerfd_create(1, 0o4000)
ctypes.CDLL(None).timerfd_settime(timer, 0, struct.pack('4q', 0, 1000000, 0, 1000000), None)
threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()
os.setpriority(os.PRIO_PROCESS, 0, 5)
r, w = os.pipe(); os.write(w, b'1')
ep = select.epoll(); ep.register(r, select.EPOLLIN | select.EPOLLONESHOT); ep.poll(1)
def check():
    for _, client, accepted in kept: client.send(b'x')
    heard = [accepted.recv(1) for _, _, accepted in kept] == [b'x'] * 3
    files = all(os.path.exists(f'/t/{who}{kind}') for who in ('listens', 'client') for kind in (1, 5))
    nice = sorted(os.getpriority(os.PRIO_PROCESS, int(task)) for task in os.listdir('/proc/self/task')) == [0, 5]
    return heard and files and nice and names == [end.getsockname() for pair in pairs for end in pair]
serve(check)
"""),
    CHECK,
)
REPLACED_FIFO = (
    python_program("""
if not os.path.exists('/t/pipe'): os.mkfifo('/t/pipe')
old = os.open('/t/pipe', os.O_RDWR); os.write(old, b'old')
os.unlink('/t/pipe'); os.mkfifo('/t/pipe')
new = os.open('/t/pipe', os.O_RDWR); os.write(new, b'new')
os.mkfifo('/t/gone'); gone = os.open('/t/gone', os.O_RDWR); os.write(gone, b'bye'); os.unlink('/t/gone')
def check():
    got = os.read(old, 3), os.read(new, 3), os.read(gone, 3)
    os.write(old, b'old'); os.write(new, b'new'); os.write(gone, b'bye')
    return got == (b'old', b'new', b'bye')
serve(check)
"""),
    CHECK,
)
REUSED_NAME = (
    python_program("""
def write(path, text):
    file = open(path, 'w+'); file.write(text); file.flush(); return file
first = write('/t/name', 'first'); os.unlink('/t/name')
second = write('/t/name', 'second'); os.unlink('/t/name')
third = write('/t/name', 'third')
moved = write('/t/old', 'moved'); os.rename('/t/old', '/t/new'); again = write('/t/old', 'again')
def check():
    return [f.seek(0) or f.read() for f in (first, second, third, moved, again)] == \\
        ['first', 'second', 'third', 'moved', 'again'] and open('/t/name').read() == 'third'
serve(check)
"""),
    CHECK,
)
RENAMED_OVER = (
    python_program("""
def write(path, text):
    file = open(path, 'w+'); file.write(text); file.flush(); return file
old = write('/t/config', 'old'); write('/t/config.new', 'new').close(); os.rename('/t/config.new', '/t/config')
log = write('/t/log', 'before'); os.rename('/t/log', '/t/log.1'); fresh = write('/t/log', 'after')
def check():
    return (old.seek(0) or old.read()) == 'old' and open('/t/config').read() == 'new' and \\
        (log.seek(0) or log.read()) == 'before' and (fresh.seek(0) or fresh.read()) == 'after'
serve(check)
"""),
    CHECK,
)
DELETED_DIRECTORY = (
    python_program("""
os.makedirs('/t/gone', exist_ok=True)
file = open('/t/gone/file', 'w+'); file.write('kept'); file.flush()
os.unlink('/t/gone/file'); os.rmdir('/t/gone')
def check(): return (file.seek(0) or file.read()) == 'kept' and not os.path.exists('/t/gone')
serve(check)
"""),
    CHECK,
)
DELETED_DIRECTORIES = (
    python_program("""
os.makedirs('/t/a/b', exist_ok=True)
file = open('/t/a/b/file', 'w+'); file.write('kept'); file.flush()
os.unlink('/t/a/b/file'); os.rmdir('/t/a/b'); os.rmdir('/t/a')
def check(): return (file.seek(0) or file.read()) == 'kept' and not os.path.exists('/t/a')
serve(check)
"""),
    CHECK,
)
WORKING_DIRECTORY_GONE = (
    python_program("""
os.makedirs('/t/work', exist_ok=True); os.chdir('/t/work'); os.rmdir('/t/work')
def check():
    try: os.getcwd()
    except FileNotFoundError: return not os.path.exists('/t/work') and os.listdir('.') == []
serve(check)
"""),
    CHECK,
)
LINKED_PLACE = (
    "if [ ! -L /tmp ]; then rm -rf /tmp; mkdir -p /t/tmp; chmod 1777 /t/tmp; ln -s /t/tmp /tmp; fi; "
    + python_program("""
listener = socket.socket(socket.AF_UNIX); listener.bind('/tmp/socket'); listener.listen()
receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); receiver.bind('/tmp/letters')
file = open('/tmp/file', 'w+'); file.write('kept'); file.flush()
gone = open('/tmp/gone', 'w+'); gone.write('gone'); gone.flush(); os.unlink('/tmp/gone')
def check():
    with socket.socket(socket.AF_UNIX) as c:
        c.connect('/tmp/socket'); p, _ = listener.accept(); p.sendall(b'x'); ok = c.recv(1) == b'x'; p.close()
    return ok and (file.seek(0) or file.read()) == 'kept' and (gone.seek(0) or gone.read()) == 'gone'
serve(check)
"""),
    CHECK,
)
STOPPED = (
    python_program("""
child = os.fork()
if child == 0:
    while True: signal.pause()
twin = os.fork()
if twin == 0:
    threading.Thread(target=lambda: time.sleep(1e6), daemon=True).start()
    os.open('/t', os.O_RDONLY)
    while True: time.sleep(1000)
job = os.fork()  # as after Ctrl-Z
if job == 0:
    os.setpgid(0, 0)
    while True: signal.pause()
reader = os.fork()  # as a job in the background that reads its terminal; it has a thread
if reader == 0:
    os.setpgid(0, 0)
    threading.Thread(target=lambda: time.sleep(1e6), daemon=True).start()
    open('/t/started', 'w').close()
    while True: time.sleep(1000)
writer = os.fork()
if writer == 0:
    os.setpgid(0, 0)
    while True: signal.pause()
while any(os.getpgid(one) != one for one in (job, writer)) or not os.path.exists('/t/started'): time.sleep(0.01)
stops = {child: signal.SIGSTOP, twin: signal.SIGSTOP, job: signal.SIGTSTP, reader: signal.SIGTTIN,
         writer: signal.SIGTTOU}
for pid, how in stops.items():
    os.kill(pid, how); os.waitpid(pid, os.WUNTRACED)
def state(pid): return open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[0]
def check():
    while {state(pid) for pid in stops} != {'T'}: time.sleep(0.01)
    for pid, how in stops.items():  # of those that are told again that they have stopped
        told, status = os.waitpid(pid, os.WUNTRACED | os.WNOHANG)
        if told and os.WSTOPSIG(status) != how: return False
    os.kill(child, signal.SIGCONT)
    while state(child) == 'T': time.sleep(0.01)
    os.kill(child, signal.SIGSTOP)
    while state(child) != 'T': time.sleep(0.01)
    return True
serve(check)
"""),
    CHECK,
)
AT_LIMITS = (
    python_program("""
import contextlib, resource
def limited(kind, limit):
    child = os.fork()
    if child == 0:
        os.dup2(0, 90)
        if kind == resource.RLIMIT_AS: limit = int(open('/proc/self/statm').read().split()[0]) * 4096 + 4096
        resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))
        with contextlib.suppress(OSError):
            while kind == resource.RLIMIT_NOFILE: os.dup(0)
        while True: signal.pause()
    return child, kind
children = [limited(resource.RLIMIT_NOFILE, number) for number in (0, 1, 60, 100)] + [limited(resource.RLIMIT_AS, 0)]
time.sleep(0.5)
def limits(): return [resource.prlimit(pid, kind) for pid, kind in children]
def descriptors(): return [sorted(map(int, os.listdir(f'/proc/{pid}/fd'))) for pid, _ in children]
before = limits(), descriptors()
def check(): return before == (limits(), descriptors()) and before[0][0][0] == 0 and len(before[1][3]) == 100
serve(check)
"""),
    CHECK,
)
UNREAD_TERMINALS = (
    python_program("""
def pair():
    ends = os.openpty()
    for end in ends: os.set_blocking(end, False)
    return ends
def unread(end): return struct.unpack('i', fcntl.ioctl(end, 0x541B, b'....'))[0]
def fill(master, slave):
    os.write(slave, b'one\\ntwo\\n'); os.write(master, b'typed\\nmore\\x7fe\\n')
    while unread(slave) < 11 or unread(master) < 27: time.sleep(0.001)  # the kernel takes its time
def read_from(end):
    result = []
    with contextlib.suppress(BlockingIOError):
        while True: result.append(os.read(end, 100))
    return result
import contextlib
plain, packets = pair(), pair()
fill(*plain); expected = [read_from(end) for end in plain]; read_from(plain[0])
fcntl.ioctl(packets[0], 0x5420, struct.pack('i', 1))
for ends in (plain, packets): fill(*ends)
def check():
    for ends, prefix in ((plain, b''), (packets, b'\\0')):
        got = [read_from(end) for end in ends]
        if b''.join(one.removeprefix(prefix) for one in got[0]) != b''.join(expected[0]) or got[1] != expected[1]:
            raise ValueError(got)
        fill(*ends)
    return True
serve(check)
"""),
    CHECK,
)
LEFT_TERMINALS = (
    python_program("""
def left():
    master, slave = os.openpty(); os.close(slave); os.set_blocking(master, False)
    return master
masters = left(), left(), os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)  # the last was never opened
def read_from(master):
    try: return os.read(master, 100)
    except OSError as error: return error.errno
def check(): return [read_from(one) for one in masters] == [errno.EIO, errno.EIO, errno.EAGAIN]
serve(check)
"""),
    CHECK,
)
LOCKS = (
    python_program("""
file = os.open('/t/locked', os.O_RDWR | os.O_CREAT); os.write(file, bytes(8192))
mapped = mmap.mmap(file, 8192)
fcntl.lockf(file, fcntl.LOCK_EX, 10, 100); fcntl.lockf(file, fcntl.LOCK_SH, 5, 4000)
plain = os.open('/t/plain', os.O_RDWR | os.O_CREAT); fcntl.lockf(plain, fcntl.LOCK_EX)
fcntl.flock(plain, fcntl.LOCK_SH)
ofd = os.open('/t/ofd', os.O_RDWR | os.O_CREAT); fcntl.fcntl(ofd, 37, struct.pack('hhqqi', fcntl.F_WRLCK, 0, 5, 5, 0))
def seen(path, kind, start, length):
    # what another process is told about a lock: (type, start, length)
    r, w = os.pipe(); pid = os.fork()
    if pid == 0:
        fd = os.open(path, os.O_RDWR)
        got = fcntl.fcntl(fd, fcntl.F_GETLK, struct.pack('hhqqi', kind, 0, start, length, 0))
        os.write(w, repr(struct.unpack('hhqqi', got)[:4:]).encode()); os._exit(0)
    os.waitpid(pid, 0); got = eval(os.read(r, 1000)); os.close(r); os.close(w)
    return got[0], got[2], got[3]
READ, WRITE = fcntl.F_RDLCK, fcntl.F_WRLCK
naps = []
def nap():
    # the locks are taken again by a call that this process makes meanwhile: it ends none of its own
    libc = ctypes.CDLL(None, use_errno=True)
    while True: naps.append(libc.nanosleep(struct.pack('qq', 0, 300_000_000), None))
threading.Thread(target=nap, daemon=True).start()
def check():
    done = len(naps)
    while len(naps) < done + 2: time.sleep(0.01)
    if any(naps): raise ValueError(f'{naps} of its sleeps ended early')
    return [seen('/t/locked', WRITE, 100, 10), seen('/t/locked', WRITE, 4000, 5), seen('/t/locked', READ, 4000, 5)[0],
        seen('/t/plain', READ, 0, 0), seen('/t/ofd', READ, 5, 5)] == \\
        [(WRITE, 100, 10), (READ, 4000, 5), fcntl.F_UNLCK, (WRITE, 0, 0), (WRITE, 5, 5)]
serve(check)
"""),
    CHECK,
)
# A transaction is held open in one database; in the other, writers move amounts and readers add them up, all the time.
SQLITE = (
    python_program("""
import glob, random, sqlite3
def connect(name, timeout=60):
    connection = sqlite3.connect(name, timeout=timeout, isolation_level=None)
    connection.execute('pragma journal_mode=wal')
    return connection
def make(name):
    connection = connect(name)
    connection.execute('create table account(id integer primary key, amount)')
    connection.executemany('insert into account values (?, 100)', [(i,) for i in range(10)])
    connection.execute('create table moves(n)'); connection.execute('insert into moves values (0)'); connection.close()
def write():
    busy = connect('/t/busy.db')
    while True:
        a, b = random.sample(range(10), 2)
        busy.execute('begin immediate')
        for account, change in ((a, -1), (b, 1)):
            amount, = busy.execute('select amount from account where id=?', (account,)).fetchone()
            busy.execute('update account set amount=? where id=?', (amount + change, account))
        busy.execute('update moves set n = n + 1'); busy.execute('commit'); time.sleep(0.001)
def read():
    busy = connect('/t/busy.db')
    while True:
        busy.execute('begin')
        for _ in range(2):
            total, = busy.execute('select sum(amount) from account').fetchone()
            if total != 1000: open('/t/bad', 'a').write(f'{total} ')
            time.sleep(0.002)
        busy.execute('commit')
for name in glob.glob('/t/*.db*'): os.unlink(name)
make('/t/held.db'); make('/t/busy.db')
for work in (write, write, write, read, read):
    if os.fork() == 0:
        try: work()
        except Exception as error: open('/t/bad', 'a').write(repr(error))
OTHER = '''
import sqlite3, sys
try: print(sqlite3.connect('/t/held.db', timeout=0, isolation_level=None).execute(sys.argv[1]).fetchall())
except Exception as error: print(error)
'''
def answered(statement):
    # what another process gets, which does not wait
    return subprocess.run([sys.executable, '-c', OTHER, statement], capture_output=True, text=True).stdout.strip()
def hold():
    # the snapshot that the reader has is older than what the writer wrote and has not committed
    global reader, writer
    reader, writer = connect('/t/held.db'), connect('/t/held.db')
    reader.execute('begin'); reader.execute('select sum(amount) from account').fetchone()
    writer.execute('begin immediate'); writer.execute('update account set amount = amount + 1')
hold(); rounds = 0
def moves(): return connect('/t/busy.db').execute('select n from moves').fetchone()[0]
def check():
    global rounds
    total = 1000 + 10 * rounds
    if (got := answered('begin immediate')) != 'database is locked': raise ValueError('other writer: ' + got)
    if (got := answered('select sum(amount) from account')) != f'[({total},)]': raise ValueError('other reader: ' + got)
    if reader.execute('select sum(amount) from account').fetchone() != (total,): raise ValueError('own reader')
    writer.execute('commit'); reader.execute('commit'); rounds += 1
    if (got := answered('select sum(amount) from account')) != f'[({total + 10},)]': raise ValueError('after: ' + got)
    writer.close(); reader.close(); hold()
    before = moves()
    while moves() < before + 50: time.sleep(0.01)
    sound = connect('/t/busy.db').execute('pragma integrity_check').fetchall() == [('ok',)]
    if os.path.exists('/t/bad'): raise ValueError(open('/t/bad').read())
    return sound and answered('pragma integrity_check') == "[('ok',)]"
serve(check)
"""),
    CHECK,
)
STRANGE_NAMES = (
    python_program(r"""
libc = ctypes.CDLL(None)
name = b'\xff\r0-1 rw-p\x0b\xe2\x80\xa8'
libc.prctl(15, b'\xff\x0bNSpid:\t1', 0, 0, 0)  # PR_SET_NAME
def make(path):
    file = open(path, 'w+b', buffering=0); file.write(b'kept' * 1024); return file
mapped = make(b'/t/mapped' + name); view = mmap.mmap(mapped.fileno(), 4096)
gone = make(b'/t/gone' + name); os.unlink(b'/t/gone' + name)
fifo = b'/t/fifo' + name
os.path.exists(fifo) or os.mkfifo(fifo); pipe = os.open(fifo, os.O_RDWR); os.write(pipe, b'in')
bound = socket.socket(socket.AF_UNIX); bound.bind(b'/t/socket\n0: 3 2 1\n' + name); bound.listen()
memory = libc.memfd_create(name, 0); os.write(memory, b'kept')
os.makedirs(b'/t/dir' + name, exist_ok=True); os.chdir(b'/t/dir' + name)
def check():
    got = os.read(pipe, 2); os.write(pipe, got)
    with socket.socket(socket.AF_UNIX) as caller: caller.connect(bound.getsockname()); bound.accept()[0].close()
    here = os.getcwdb() == b'/t/dir' + name and open('/proc/self/comm', 'rb').read() == b'\xff\x0bNSpid:\t1\n'
    files = view[:4] == os.pread(gone.fileno(), 4, 0) == os.pread(memory, 4, 0) == b'kept'
    return here and files and got == b'in'
serve(check)
"""),
    CHECK,
)
UNIX_LISTENERS = (
    python_program("""
os.makedirs('/t/d', exist_ok=True); os.makedirs('/t/real', exist_ok=True)
os.path.lexists('/t/link') or os.symlink('real', '/t/link')
held = {path: socket.socket(socket.AF_UNIX) for path in ('/t/socket', '/t/d/socket', '/t/link/socket')}
for path, one in held.items(): one.bind(path); one.listen()
def check():
    for path, one in held.items():
        if not os.path.exists(path): continue
        with socket.socket(socket.AF_UNIX) as caller: caller.connect(path); one.accept()[0].close()
    return [one.getsockname() for one in held.values()] == list(held)
serve(check)
"""),
    CHECK,
)
#: Open files that lost one of several names: by two descriptors, with the directory, by a mapping, of the image.
HALF_NAMED = (
    python_program("""
os.makedirs('/t/deep/er', exist_ok=True); os.makedirs('/t/other', exist_ok=True)
def make(path, *more):
    file = open(path, 'w+'); file.write(path); file.flush()
    for name in more: os.link(path, name)
    return file
one = make('/t/one', '/t/other/first', '/t/second'); again = open('/t/one'); os.unlink('/t/one')
deep = make('/t/deep/er/two', '/t/two'); os.unlink('/t/deep/er/two'); os.rmdir('/t/deep/er')
mapped = make('/t/three', '/t/other/three'); view = mmap.mmap(mapped.fileno(), 8); os.unlink('/t/three')
os.link('/etc/passwd', '/etc/copied'); os.link('/etc/copied', '/t/image')
image = open('/etc/copied'); os.unlink('/etc/copied')
def check():
    read = [file.seek(0) or file.read() for file in (one, again, deep)] == ['/t/one', '/t/one', '/t/deep/er/two']
    linked = all(os.path.samestat(os.fstat(file.fileno()), os.stat(name)) for file, name in (
        (one, '/t/second'), (again, '/t/other/first'), (deep, '/t/two'), (image, '/t/image'),
        (mapped, '/t/other/three')))
    extra = [name for top in ('/t', '/etc') for _, _, names in os.walk(top) for name in names if 'link_remap' in name]
    return read and linked and not extra and view[:8] == b'/t/three'
serve(check)
"""),
    CHECK,
)
ALL = {
    "connected": CONNECTED, "empty epoll": EMPTY_EPOLL, "directories": DIRECTORIES, "segments": SEGMENTS,
    "replaced fifo": REPLACED_FIFO, "reused name": REUSED_NAME, "renamed over": RENAMED_OVER,
    "deleted directory": DELETED_DIRECTORY,
    "deleted directories": DELETED_DIRECTORIES, "working directory gone": WORKING_DIRECTORY_GONE,
    "linked place": LINKED_PLACE, "stopped": STOPPED, "at limits": AT_LIMITS, "left terminals": LEFT_TERMINALS,
    "unread terminals": UNREAD_TERMINALS, "locks": LOCKS,
    "sqlite": SQLITE, "half named": HALF_NAMED, "strange names": STRANGE_NAMES, "unix listeners": UNIX_LISTENERS,
}  # fmt: skip
