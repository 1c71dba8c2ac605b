"""A program that changes its memory in all ways, a little at each check, and knows what must be in it."""

from __future__ import annotations

from tests.support.checkpoint_programs import python_program

_PROGRAM = """
import random, zlib
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
P = 4096
SIZE = 64 * P
def at_(place): return ctypes.c_void_p(place)
def of_(size): return ctypes.c_size_t(size)
def get(size, at=None): return libc.mmap(at_(at), of_(size), 3, 0x22 | (0x10 if at else 0), -1, 0)
def put(at, size): ctypes.memmove(at, os.urandom(size), size)
def move(at, to): return libc.mremap(at_(at), of_(SIZE), of_(SIZE), 3, at_(to))
def advise(at, size, what): libc.madvise(at_(at), of_(size), what)
def protect(at, size, what): libc.mprotect(at_(at), of_(size), what)
regions = [get(SIZE) for _ in range(30)]
for each in regions: put(each, SIZE)
loose = get(SIZE); put(loose, SIZE)
hidden = get(SIZE); put(hidden, SIZE); protect(hidden, SIZE, 0)
held = bytearray(os.urandom(6 << 20))
huge = get(8 << 20); advise(huge, 8 << 20, 14); put(huge, 8 << 20)
with open("/tmp/mapped", "wb") as file: file.write(os.urandom(SIZE))
file = open("/tmp/mapped", "rb")
mapped = libc.mmap(None, of_(SIZE), 3, 2, file.fileno(), 0)
random.seed(SEED)
busy = bytearray(1 << 20)
def work(i):
    n = 0
    while True:
        busy[(n * 4 + i) * P % len(busy)] = n % 251
        n += 1
        time.sleep(0.001)
for i in range(3): threading.Thread(target=work, args=(i,), daemon=True).start()
def replace(i): libc.munmap(at_(regions[i]), of_(SIZE)); get(SIZE, regions[i]); put(regions[i] + P, P)
def away(i): regions[i] = move(regions[i], get(SIZE))
def over(i):
    other = (i + 1) % len(regions)
    move(regions[i], regions[other]); regions[i] = get(SIZE); put(regions[i] + 2 * P, SIZE // 2)
def hide(i): protect(hidden, SIZE, 3); put(hidden + i * P, 7); put(hidden + 2 * i * P, 7); protect(hidden, SIZE, 0)
def shut(i): protect(regions[i], 8 * P, 1); protect(regions[i], 8 * P, 3); put(regions[i] + P, 9)
acts = [
    lambda i, at: put(at, 3), lambda i, at: advise(at, 3 * P, 4), lambda i, at: replace(i), lambda i, at: away(i),
    lambda i, at: over(i), lambda i, at: shut(i), lambda i, at: (advise(loose, SIZE, 8), put(loose + (i % 60) * P, 1)),
    lambda i, at: put(huge + random.randrange(2000) * P, 2), lambda i, at: put(mapped + (i % 60) * P, 5),
    lambda i, at: advise(mapped, SIZE, 4), lambda i, at: advise(mapped, SIZE, 21),
    lambda i, at: held.__setitem__(random.randrange(len(held)), 1), lambda i, at: hide(i),
]
child = 0
def summed():
    protect(hidden, SIZE, 1)
    found = zlib.crc32((ctypes.c_char * SIZE).from_address(hidden), zlib.crc32(held))
    protect(hidden, SIZE, 0)
    for at, size in [*((each, SIZE) for each in regions), (huge, 8 << 20), (mapped, SIZE)]:
        found = zlib.crc32((ctypes.c_char * size).from_address(at), found)
    return found
known = summed()
def change():
    global child, known
    if summed() != known: return False
    for _ in range(16):
        i = random.randrange(len(regions))
        random.choice(acts)(i, regions[i] + random.randrange(60) * P)
    if random.random() < 0.3:
        if child: os.kill(child, 9); os.waitpid(child, 0)
        child = os.fork()
        while child == 0: time.sleep(0.01); put(regions[0] + random.randrange(60) * P, 1)
    known = summed()
    return True
serve(change)
"""


def changing(seed: int) -> str:
    """The script that starts it; `checkpoint_programs.CHECK` has it change."""
    return python_program(_PROGRAM.replace("SEED", str(seed)))
