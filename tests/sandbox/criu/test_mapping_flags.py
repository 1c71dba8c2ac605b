"""The flags of mappings without /proc/PID/smaps: a dump must say the same of them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from ebpf.inspector import Inspector
from sandbox.criu import rpc
from sandbox.criu.tracking import mapping_flags, orders, userfault
from tests.support.checkpoint_programs import CHECK, python_program
from tests.support.checkpoint_support import Bench, shell, started
from tests.support.container_support import Maker

pytestmark = pytest.mark.skipif(bool(userfault.missing()), reason=f"this kernel cannot: {userfault.missing()}")

PROGRAM = python_program("""
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
held = bytearray(os.urandom(6 << 20))
def get(kind, access=3): return libc.mmap(None, ctypes.c_size_t(1 << 16), access, kind | 0x20, -1, 0)
kinds = [get(kind) for kind in (2, 1, 2 | 0x4000, 2 | 0x100)] + [get(2, access) for access in (0, 1, 5)]
for advice in (1, 2, 10, 12, 14, 15, 16, 18): libc.madvise(ctypes.c_void_p(get(2)), ctypes.c_size_t(1 << 16), advice)
serve(lambda: True)
""")

MANY = python_program("""
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
held = bytearray(os.urandom(6 << 20))
start = libc.mmap(None, ctypes.c_size_t(4000 * 4096), 3, 0x22, -1, 0)
for at in range(start, start + 4000 * 4096, 8192): libc.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(4096), 1)
serve(lambda: True)
""")


@pytest_asyncio.fixture
async def bench(maker: Maker, tmp_path: Path) -> AsyncIterator[Bench]:
    with Inspector.load() as inspector:
        async with started(maker, tmp_path, track=True, mappings=inspector.mappings) as made:
            assert made.checkpointer._letters
            yield made


async def test_a_dump_says_the_same_of_mappings(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = await bench.maker.create()
    await shell(sandbox, PROGRAM)
    seen: list[set[int]] = []
    remove = orders.remove

    def removed(directory: Path) -> None:
        seen.append(orders.read(directory).brief)
        remove(directory)

    monkeypatch.setattr(orders, "remove", removed)
    brief = await bench.save(sandbox)
    tracker = bench.checkpointer._trackers[sandbox.spec.id]
    monkeypatch.setattr(tracker, "_letters", b"")
    whole = await bench.save(sandbox)
    compared = 0
    for path in whole.capture.dir.glob("mm-*.img"):
        vmas = [rpc.load(each.capture.dir / path.name)[0]["vmas"] for each in (brief, whole)]
        assert vmas[0] == vmas[1]
        compared += len(vmas[0])
    assert compared > 40
    assert [len(pids) for pids in seen] == [1, 0]
    assert await shell(sandbox, CHECK) == "good\n"


def test_letters_are_learned() -> None:
    with Inspector.load() as inspector:
        letters = mapping_flags.learned(inspector.mappings)
    known = {letters[at : at + 2] for at in range(0, len(letters), 2)} - {b"\0\0"}
    assert known >= {b"rd", b"wr", b"ex", b"gd", b"lo", b"nr", b"dc", b"dd", b"wf", b"hg", b"nh", b"sr", b"rr", b"uw"}


def test_more_mappings_than_one_buffer_of_the_kernel_are_read_once() -> None:
    """1,365 of them fit. The kernel tells the last buffer again for ever where it needs several."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    size = 4000 * mapping_flags.PAGE
    start = int(libc.mmap(None, ctypes.c_size_t(size), 3, 0x22, -1, 0))
    try:
        for at in range(start, start + size, 2 * mapping_flags.PAGE):  # neighbours with other rights do not merge
            libc.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(mapping_flags.PAGE), 1)
        with Inspector.load() as inspector:
            assert inspector.mappings is not None
            told = [(low, high) for low, high, _ in mapping_flags._mappings(inspector.mappings, os.getpid())]
        assert told == sorted(set(told))
        assert len([low for low, _ in told if start <= low < start + size]) == 4000
    finally:
        libc.munmap(ctypes.c_void_p(start), ctypes.c_size_t(size))


async def test_a_program_with_many_mappings_is_dumped(bench: Bench) -> None:
    sandbox = await bench.maker.create()
    await shell(sandbox, MANY)
    saved = [await bench.save(sandbox) for _ in range(2)][-1]
    await bench.kill_and_restore(sandbox, saved, saved.dump)
    assert await shell(sandbox, CHECK) == "good\n"
