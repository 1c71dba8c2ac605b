"""Captures that hold only what was written since the one before: no page is missed, whatever a program does."""

from __future__ import annotations

import ctypes
import os
import shlex
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from sandbox.container.container import Container
from sandbox.content import dumpfile, layers
from sandbox.content.layers import PAGE, Layers, numbers
from sandbox.content.page_hashes import HashedPages, hash_pages
from sandbox.criu import rewrite
from sandbox.criu.carried import memory as carried
from sandbox.criu.tracking import orders, precopy, tracker, userfault
from sandbox.descriptors import closing
from sandbox.libc import library
from tests.support import frozen_memory
from tests.support.checkpoint_programs import CHECK, python_program
from tests.support.checkpoint_support import Bench, Saved, shell, started
from tests.support.container_support import Maker
from tests.support.memory_program import changing

pytestmark = pytest.mark.skipif(bool(userfault.missing()), reason=f"this kernel cannot: {userfault.missing()}")


@pytest_asyncio.fixture
async def bench(maker: Maker, tmp_path: Path) -> AsyncIterator[Bench]:
    async with started(maker, tmp_path, track=True) as made:
        yield made


async def captured(bench: Bench, sandbox: Container) -> tuple[Saved, list[str]]:
    """A capture, and which of its pages are not what they were while the sandbox was frozen."""
    truth: list[frozen_memory.Memory] = []
    saved = await bench.save(sandbox, on_frozen=lambda: truth.append(frozen_memory.frozen(sandbox.tasks())))
    scratch = saved.capture.dir.with_name(saved.capture.dir.name + "-scratch")
    capture = frozen_memory.captured(saved.capture.dir, scratch)
    return saved, frozen_memory.differences(truth[-1], capture, frozen_memory.kernel_written(saved.capture.dir))


def own_bytes(saved: Saved) -> int:
    return sum(path.stat().st_size for path in saved.capture.dir.glob("pages-*.img"))


async def test_no_page_is_missed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "MAX_LAYERS", 4)
    sandbox = await bench.maker.create()
    await shell(sandbox, changing(7))
    counts = set()
    for _ in range(12):
        assert await shell(sandbox, CHECK) == "good\n"
        saved, wrong = await captured(bench, sandbox)
        assert not wrong
        counts |= {len(item.names) for item in layers.read(saved.capture.dir).values()}
    assert {1, 4} <= counts <= {1, 2, 3, 4}


HOLDER = python_program("""
import random
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
held = bytearray(os.urandom(SIZE << 20))
hidden = libc.mmap(None, ctypes.c_size_t(1 << 16), 0, 0x22, -1, 0)
def protect(what): libc.mprotect(ctypes.c_void_p(hidden), ctypes.c_size_t(1 << 16), what)
def check():
    for at in random.sample(range(len(held)), 5): held[at] = (held[at] + 1) % 256
    protect(3)
    ctypes.memset(hidden + 4096 * random.randrange(16), random.randrange(256), 9)
    protect(0)  # not readable without force
    return True
serve(check)
""").replace("SIZE", "24")


@pytest.mark.parametrize("size", [7, 24])  # in MiB: what CRIU reads, and what is written after it
async def test_a_chain_is_restored_and_stored_as_a_whole(bench: Bench, size: int) -> None:
    sandbox = await bench.maker.create()
    await shell(sandbox, HOLDER.replace("24", str(size)))
    saved = await bench.save(sandbox)
    assert own_bytes(saved) > size << 20
    for _ in range(3):
        assert await shell(sandbox, CHECK) == "good\n"
        saved = await bench.save(sandbox)
        assert own_bytes(saved) < 5 << 20
    memory = 1 << 30  # what it holds only grows what CRIU looks at
    assert memory // 8 < bench.checkpointer.expected_bytes(sandbox, memory) < memory // 8 + (6 << 20)
    one, other = bench.directory / "one", bench.directory / "other"
    rewrite.copy(saved.capture.dir, one)
    dumpfile.unpack(saved.dump, other, bench.checkpointer.pages)
    for path in (*one.glob("pages-*"), *one.glob("pagemap-*")):
        assert path.read_bytes() == (other / path.name).read_bytes()
    for source in (saved.capture.dir, saved.dump):
        await bench.kill_and_restore(sandbox, saved, source)
        assert await shell(sandbox, CHECK) == "good\n"
    written_by_us = size << 20 > carried.MIN_PARALLEL_BYTES
    assert (bench.checkpointer.expected_bytes(sandbox, memory) < memory) == written_by_us
    after, wrong = await captured(bench, sandbox)
    assert not wrong
    assert (own_bytes(after) < 5 << 20) == written_by_us  # of another process: of memory from CRIU nothing is known
    await bench.kill_and_restore(sandbox, after, after.capture.dir)
    assert await shell(sandbox, CHECK) == "good\n"


FAMILY = python_program("""
import hashlib
class Kept:
    def __init__(self, size): self.held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS); \\
        self.held.write(os.urandom(size)); self.now = hashlib.sha1(self.held).digest()
    def check(self):
        good = hashlib.sha1(self.held).digest() == self.now
        for at in range(0, len(self.held), 1 << 18): self.held[at] = (self.held[at] + 1) % 256
        self.now = hashlib.sha1(self.held).digest()
        return good
common = Kept(8 << 20)
(ask, asked), (answer, answered) = os.pipe(), os.pipe()
if os.fork() == 0:
    while os.read(ask, 1): os.write(answered, b"%d" % common.check())
own = Kept(SIZE << 20)
def check():
    os.write(asked, b"1")
    return own.check() & common.check() & (os.read(answer, 1) == b"1")
serve(check)
""")


@pytest.mark.parametrize("size", [4, 24])  # in MiB: what CRIU reads, and what is written after it
async def test_memory_in_several_files_comes_back_whoever_writes_it(bench: Bench, size: int) -> None:
    """CRIU writes what parent and child have in common, and so all of the child's; we write what only one has."""
    sandbox = await bench.maker.create()
    await shell(sandbox, FAMILY.replace("SIZE", str(size)))
    for _ in range(3):
        assert await shell(sandbox, CHECK) == "good\n"
        saved = await bench.save(sandbox)
    spread = layers.read(saved.capture.dir)
    assert sum(len(item.names) > 1 for item in spread.values()) >= 2
    for verify in (False, True):
        await bench.kill_and_restore(sandbox, saved, saved.capture.dir, verify=verify)
        assert await shell(sandbox, CHECK) == "good\n"


async def test_a_page_of_a_file_that_is_reclaimed_is_not_captured(bench: Bench) -> None:
    """The kernel remembers of it that it was protected, in an entry that looks like that of a swapped page."""
    sandbox = await bench.maker.create()
    await shell(sandbox, HOLDER)
    await bench.save(sandbox)
    before = mapped_pages(await bench.save(sandbox))
    reclaim_files(sandbox)
    assert mapped_pages(await bench.save(sandbox)) == before


def reclaim_files(sandbox: Container) -> None:
    for pid in sandbox.tasks():
        lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
        with closing(os.pidfd_open(pid)) as process:
            for span in (line[0] for line in lines if line[-1].startswith("/usr")):
                start, end = (int(part, 16) for part in span.split("-"))
                vector = (ctypes.c_size_t * 2)(start, end - start)
                library.syscall(440, process, vector, ctypes.c_ulong(1), 21, ctypes.c_ulong(0))  # MADV_PAGEOUT


def mapped_pages(saved: Saved) -> int:
    """How many pages of the largest process are in a capture."""
    return max(len(item.pages) for item in layers.read(saved.capture.dir).values())


async def test_what_a_restore_wrote_is_not_hashed_again(bench: Bench) -> None:
    sandbox = await bench.maker.create()
    await shell(sandbox, HOLDER)
    first = await bench.save(sandbox)
    (name,) = {item.names for item in layers.read(first.capture.dir).values()}.pop()
    await bench.kill_and_restore(sandbox, first, first.capture.dir, verify=False)
    second = await bench.save(sandbox)
    assert any(name in item.names[1:] for item in layers.read(second.capture.dir).values())


async def test_pages_of_several_files_are_found_by_their_hashes(bench: Bench) -> None:
    sandbox = await bench.maker.create()
    await shell(sandbox, HOLDER)
    complete = await bench.save(sandbox)
    for _ in range(2):
        assert await shell(sandbox, CHECK) == "good\n"
        saved = await bench.save(sandbox)
    assert layers.present(saved.capture.dir)
    given = dumpfile.hashed(saved.capture.dir)
    parts = [part for _, items in sorted(given.pages.items()) for part in items]
    hashes = np.concatenate(list(given.hashes().values()))
    part, place = given.places()
    pages = [bytes(parts[number].data[at * PAGE : (at + 1) * PAGE]) for number, at in zip(part, place, strict=True)]
    assert [blake3(page).digest() if any(page) else bytes(32) for page in pages] == [item.tobytes() for item in hashes]
    # What is hashed by comparing with it has the hashes that it has otherwise.
    plain, compared = dumpfile.hashed(complete.capture.dir), dumpfile.hashed(complete.capture.dir, given)
    assert {name: item.tobytes() for name, item in plain.hashes().items()} == {
        name: item.tobytes() for name, item in compared.hashes().items()
    }


def test_a_layer_is_no_model_for_the_hashes_of_other_pages() -> None:
    """Its hashes are of the pages at its places, not of its data in order."""
    one, other = bytes([1]) * PAGE, bytes([2]) * PAGE
    of_layer = hash_pages(other + one)
    like = HashedPages(memoryview(one + other), of_layer.hashes, of_layer.filled, np.array([1, 0]), "layer")
    assert hash_pages(one + other, like).hashes.tobytes() == hash_pages(one + other).hashes.tobytes()


async def test_a_capture_that_failed_is_followed_by_a_whole_one(bench: Bench) -> None:
    sandbox = await bench.maker.create()
    await shell(sandbox, HOLDER)
    await bench.save(sandbox)

    def fail() -> None:
        raise OSError("no snapshot")

    with pytest.raises(OSError, match="no snapshot"):
        await bench.checkpointer.capture(sandbox, bench.checkpointer.captures / "failed", on_frozen=fail)
    assert await shell(sandbox, CHECK) == "good\n"
    saved, wrong = await captured(bench, sandbox)
    assert not wrong
    assert own_bytes(saved) > 24 << 20


async def test_pages_that_nobody_has_are_captured_again(bench: Bench) -> None:
    sandbox = await bench.maker.create()
    await shell(sandbox, HOLDER)
    await bench.save(sandbox)
    existing = bench.checkpointer._trackers[sandbox.spec.id]
    existing._last = {
        number: Layers.of(item.pagemap, item.names, item.runs()[:-2]) for number, item in existing._last.items()
    }
    saved, wrong = await captured(bench, sandbox)
    assert not wrong
    assert own_bytes(saved) > 24 << 20


MOVER = python_program("""
libc = ctypes.CDLL(None)
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
held = bytearray(os.urandom(6 << 20))
SIZE = 64 * 4096
at = libc.mmap(None, ctypes.c_size_t(4 * SIZE), 3, 0x22, -1, 0)
def put(place): ctypes.memmove(place, os.urandom(SIZE), SIZE)
def move(source, target):
    size = ctypes.c_size_t(SIZE)
    assert libc.mremap(ctypes.c_void_p(source), size, size, 3, ctypes.c_void_p(target)) == target
put(at); put(at + SIZE)
count = 0
def check():
    global count
    count += 1
    if count % 2: move(at + SIZE, at + 2 * SIZE)
    else:
        move(at + 2 * SIZE, at + SIZE)
        put(at)
    return True
serve(check)
""")


async def test_memory_that_is_moved_back_next_to_other_memory_is_captured(bench: Bench) -> None:
    """The kernel lets go of both: see :mod:`sandbox.criu.tracking.userfault`."""
    sandbox = await bench.maker.create()
    await shell(sandbox, MOVER)
    for _ in range(5):
        _, wrong = await captured(bench, sandbox)
        assert not wrong
        assert await shell(sandbox, CHECK) == "good\n"


async def test_a_program_that_replaced_itself_is_captured_whole(bench: Bench) -> None:
    sandbox = await bench.maker.create()
    after = "import os, time; held = bytearray(os.urandom(24 << 20)); open('/tmp/new', 'w'); time.sleep(1e9)"
    before = f"""import os, sys, time; held = bytearray(os.urandom(24 << 20)); open('/tmp/old', 'w')
while not os.path.exists('/tmp/go'): time.sleep(0.01)
os.execv(sys.executable, ['python3', '-c', {after!r}])"""
    wait = "while [ ! -e /tmp/{} ]; do sleep 0.01; done"
    await shell(sandbox, f"python3 -c {shlex.quote(before)} </dev/null >/dev/null 2>&1 & {wait.format('old')}")
    await bench.save(sandbox)
    await shell(sandbox, f"touch /tmp/go; {wait.format('new')}")
    for complete in (True, False):
        saved, wrong = await captured(bench, sandbox)
        assert not wrong
        assert (own_bytes(saved) > 24 << 20) == complete


async def test_what_was_written_before_the_freeze_is_copied_before_it(bench: Bench) -> None:
    sandbox = await bench.maker.create()
    await shell(
        sandbox, HOLDER.replace("at = random.randrange(len(held))", "held[:8 << 20] = os.urandom(8 << 20); at = 0")
    )
    await bench.save(sandbox)
    assert await shell(sandbox, CHECK) == "good\n"
    saved, wrong = await captured(bench, sandbox)
    assert not wrong
    assert own_bytes(saved) < 2 << 20
    below = max(path.stat().st_size for path in (saved.capture.dir / layers.BELOW).glob(f"*{layers.SUFFIX}"))
    assert below >= 24 << 20
    await bench.kill_and_restore(sandbox, saved, saved.capture.dir)
    assert await shell(sandbox, CHECK) == "good\n"


async def test_a_page_that_cannot_be_copied_is_dumped(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = await bench.maker.create()
    await shell(sandbox, HOLDER)
    await bench.save(sandbox)
    assert await shell(sandbox, CHECK) == "good\n"
    monkeypatch.setattr(precopy.PagesOf, "_read", lambda *_: (0, []))
    saved, wrong = await captured(bench, sandbox)
    assert not wrong
    assert own_bytes(saved) > 24 << 20


def test_more_regions_than_one_call_lists_are_found() -> None:
    count = userfault._REGIONS + 100
    library.mmap.restype = ctypes.c_void_p
    at = library.mmap(None, ctypes.c_size_t(2 * count * PAGE), 3, 0x22, -1, 0)
    mappings = [userfault.Mapping(at + 2 * n * PAGE, at + (2 * n + 1) * PAGE) for n in range(count)]
    try:
        for mapping in mappings:
            library.munmap(ctypes.c_void_p(mapping.end), ctypes.c_size_t(PAGE))
            ctypes.memset(mapping.start, 1, PAGE)
        assert userfault.unregistered(os.getpid(), mappings) == mappings
        with open("/proc/self/pagemap", "rb") as pagemap:
            query = userfault.PageQuery(every=userfault.PRESENT)
            ends = mappings[0].start, mappings[-1].end
            for limit in (0, 10, count - 1):
                regions = list(query.regions(pagemap.fileno(), *ends, limit=limit))
                assert [start for start, *_ in regions] == [mapping.start for mapping in mappings][: limit or None]
    finally:
        library.munmap(ctypes.c_void_p(at), ctypes.c_size_t(2 * count * PAGE))


PAGES = st.lists(st.integers(0, 40), unique=True, max_size=30).map(sorted)


@given(st.lists(st.tuples(PAGES, PAGES), min_size=1, max_size=8))
def test_where_pages_lie(captures: list[tuple[list[int], list[int]]]) -> None:
    """Against a dictionary: page -> (file, place in it)."""
    last: Layers | None = None
    model: dict[int, tuple[str, int]] = {}
    for number, (dumped, unwritten) in enumerate(captures):
        existing = [page for page in unwritten if page in model and page not in dumped]
        model = {page: model[page] for page in existing} | {page: (str(number), at) for at, page in enumerate(dumped)}
        unwritten = last and last.only(np.array(existing, np.int64))
        last = tracker.joined("pagemap-1.img", str(number), np.array(dumped, np.int64), unwritten)
        assert Layers.of(last.pagemap, last.names, last.runs()).runs().tolist() == last.runs().tolist()
        places = zip(last.pages.tolist(), last.layer.tolist(), last.place.tolist(), strict=True)
        assert {page: (last.names[layer], place) for page, layer, place in places} == model
        assert last.pages.tolist() == sorted(model)


def captured_pages(pages: list[int]) -> Layers:
    return tracker.joined("pagemap-1.img", "a", np.array(pages, np.int64), None)


@given(PAGES, PAGES)
def test_pages_that_are_chosen(pages: list[int], others: list[int]) -> None:
    layers, chosen = captured_pages(pages), np.array(others, np.int64)
    assert layers.without(chosen).pages.tolist() == sorted(set(pages) - set(others))
    assert layers.only(chosen).pages.tolist() == sorted(set(pages) & set(others))


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 3000)), max_size=30), st.integers(1, 5))
def test_batches_have_all_pages_in_order(sizes: list[tuple[int, int]], most: int) -> None:
    regions = [(gap + 9000 * number, gap + 9000 * number + size) for number, (gap, size) in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(precopy, "MAX_BATCH", most)
        batches = list(precopy.batches(regions))
    for batch in batches:
        assert len(batch) <= most
        assert 0 < len(numbers(batch)) <= precopy.MAX_BATCH_PAGES
    assert numbers([region for batch in batches for region in batch]).tolist() == numbers(regions).tolist()


REGIONS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)).map(lambda each: (each[0], sum(each))), max_size=12)


@given(REGIONS, PAGES)
def test_regions_of_pages(regions: list[tuple[int, int]], known: list[int]) -> None:
    answer = orders.ProcessAnswer(orders.merged(np.array(regions, np.int64).reshape(-1, 2)), protected=True)
    pages = sorted({page for start, end in regions for page in range(start, end)})
    assert numbers(answer.unwritten).tolist() == pages
    last = captured_pages(known)
    assert answer.within(last.spans) == (set(pages) <= set(known))
    assert last.within(answer.unwritten).pages.tolist() == sorted(set(pages) & set(known))


def test_a_page_that_no_capture_has_is_refused() -> None:
    answer = orders.ProcessAnswer(np.array([[2, 3], [4, 5]], np.int64), protected=True)
    tracker.require_pages(answer, captured_pages([1, 2, 4]))
    for last in (None, captured_pages([1, 2, 3])):
        with pytest.raises(tracker.UnknownPages):
            tracker.require_pages(answer, last)
