"""Memory that is written by us instead of by CRIU: what is chosen, and that it comes back byte for byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox import paths
from sandbox.criu import image_files, rpc
from sandbox.criu.carried import memory
from sandbox.criu.carried.memory import PAGE
from sandbox.errors import RestoreFailed
from tests.support.checkpoint_programs import CHECK, python_program
from tests.support.checkpoint_support import Bench, shell

# Private, shared by fork, huge-page advised, read-only and punched memory, each with its own content.
LAYOUT = (
    python_program("""
import hashlib
def fill(size):
    m = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    m.write(os.urandom(size)); return m
common = fill(4 << 20)
child = os.fork()
if child == 0:
    common[1 << 20] = 7
    own = fill(1 << 20)
    while True: signal.pause()
mine = fill(16 << 20); huge = fill(4 << 20); holes = fill(2 << 20); sealed = fill(2 << 20)
huge.madvise(14)
for at in range(0, 2 << 20, 1 << 18): holes.madvise(mmap.MADV_DONTNEED, at, 1 << 17)
libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(sealed))), ctypes.c_size_t(2 << 20), 1)
counts = [0] * 3; wake = threading.Condition()
def work(i):
    block = bytearray(os.urandom(1 << 20))
    while True:
        with wake: wake.wait(); counts[i] += 1
for i in range(3): threading.Thread(target=work, args=(i,), daemon=True).start()
def hashed(): return [hashlib.sha1(m[:]).hexdigest() for m in (common, mine, huge, holes, sealed)]
before = hashed()
def check():
    seen = sum(counts)
    while sum(counts) < seen + 3:
        with wake: wake.notify_all()
        time.sleep(0.01)
    return hashed() == before
serve(check)
"""),
    CHECK,
)


async def test_all_kinds_of_memory_come_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[memory.Fill] = []
    original = memory.write
    monkeypatch.setattr(memory, "QUICK", 60.0)  # also on a busy machine

    def write(memory: memory.Fill, processes: dict[int, int], sandbox: str) -> None:
        written.append(memory)
        original(memory, processes, sandbox)

    monkeypatch.setattr(memory, "write", write)
    sb = await bench.maker.create()
    await shell(sb, LAYOUT[0])
    saved = await bench.save(sb)
    for source in (saved.capture.dir, saved.dump):
        await bench.kill_and_restore(sb, saved, source)
        assert await shell(sb, CHECK) == "good\n"
    assert len(written) == 2
    counted = await shell(sb, "cat /proc/[0-9]*/smaps 2>/dev/null | awk '/AnonHugePages/ { n += $2 } END { print n }'")
    assert int(counted) > 8 << 10 or not memory._huge_pages()  # KiB; of the second restore
    # What parent and child share by fork stays CRIU's, so that it stays shared; so does what is read-only.
    assert 16 << 20 < sum(run.size for memory in written[0].memories for run in memory.runs) < 48 << 20


async def test_memory_that_cannot_be_written_fails_the_restore(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    sb = await bench.maker.create()
    await shell(sb, LAYOUT[0])
    saved = await bench.save(sb)
    monkeypatch.setattr(memory, "_address", lambda _source: 4096)  # nothing of ours lies there
    with pytest.raises(RestoreFailed, match="could not be written"):
        await bench.kill_and_restore(sb, saved, saved.capture.dir)
    assert sb.tasks() == []
    monkeypatch.undo()
    await bench.kill_and_restore(sb, saved, saved.capture.dir)
    assert await shell(sb, CHECK) == "good\n"


# ---------------------------------------------------------------- the decision


@pytest.fixture(scope="module")
def entry() -> type:
    if not (rpc.launcher().exists() and paths.criu().exists()):
        pytest.skip("CRIU's message classes are missing: run `make setup`")
    return image_files.messages().pagemap_entry  # type: ignore[no-any-return]


_numbers = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 6), st.booleans()), min_size=1, max_size=12)
_ranges = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 80)), max_size=6)


@given(_numbers, _ranges, st.sets(st.integers(0, 400), max_size=12))
def test_each_page_goes_one_way(
    entry: type, sizes: list[tuple[int, int, bool]], spans: list[tuple[int, int]], without: set[int]
) -> None:
    entries, at, content = [], 0, {}
    offset = 0
    for pages, gap, present in sizes:
        at += gap
        entries.append(entry(vaddr=at * PAGE, compat_nr_pages=pages, nr_pages=pages, flags=4 if present else 0))
        for page in range(pages if present else 0):
            content[at + page] = offset + page
        offset += pages if present else 0
        at += pages
    ranges, end = [], 0
    for start, length in sorted(spans):
        start = max(start, end)
        end = start + length
        ranges.append((start * PAGE, end * PAGE))
    retained, runs = memory.divide(entries, ranges, {page * PAGE for page in without})
    result: dict[int, int] = {}
    for record, (place, size) in retained:
        assert size in (0, record.nr_pages * PAGE)
        for page in range(size // PAGE):
            result[record.vaddr // PAGE + page] = place // PAGE + page
    for run in runs:
        assert run.size >= memory.MIN_RUN
        for page in range(run.size // PAGE):
            number = run.address // PAGE + page
            assert number not in result
            assert number not in without
            assert any(low <= number * PAGE < high for low, high in ranges)
            result[number] = run.offset // PAGE + page
    assert result == content
    addresses = [record.vaddr for record, _ in retained]
    assert addresses == sorted(addresses)


@given(st.integers(0, 100 << 20), st.integers(1, 100 << 20))
def test_steps_are_a_partition_at_borders_of_huge_pages(first: int, size: int) -> None:
    result = list(memory.steps(first, first + size))
    assert [start for start, _ in result] == [first, *(end for _, end in result[:-1])]
    assert result[-1][1] == first + size
    for start, end in result:
        assert 0 < end - start <= memory.STEP
    assert all(end % memory.HUGE == 0 for _, end in result[:-1])


@given(st.lists(st.integers(1, 50), max_size=6), st.integers(0, 300))
def test_what_is_left_after_a_short_write(sizes: list[int], written: int) -> None:
    pieces, at = [], 0
    for size in sizes:
        pieces.append((at, 1000 + at, size))
        at += size + 7
    every = [(source + n, address + n) for source, address, size in pieces for n in range(size)]
    left = [(source + n, address + n) for source, address, size in memory._after(pieces, written) for n in range(size)]
    assert left == every[written:]


def test_ranges_of_two_processes_that_overlap_are_left_out() -> None:
    result = memory._unshared({1: [(0, 10), (20, 30)], 2: [(25, 40), (50, 60)], 3: [(10, 20)], 4: [(52, 55)]})
    assert result == {1: [(0, 10), (20, 25)], 2: [(30, 40), (50, 52), (55, 60)], 3: [(10, 20)], 4: []}
    assert memory._unshared({1: [(0, 10), (10, 20)], 2: [(30, 40)]}) == {1: [(0, 20)], 2: [(30, 40)]}
