"""Which marks of an inode are content, on kernels whose type information does not say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

KERNEL = Path(__file__).parent.parent.parent / "ebpf" / "kernel.h"
#: SYNC, DATASYNC, PAGES and TIME in include/linux/fs.h: Debian's 6.1 and 6.12, as trace events of those kernels tell.
LAYOUTS = {"6.1": (1 << 0, 1 << 1, 1 << 2, 1 << 11), "6.12": (1 << 3, 1 << 4, 1 << 5, 1 << 11)}


def mask() -> int:
    result = re.search(r"#define CONTENT_MARKS_WITHOUT_ENUM \((.*)\)", KERNEL.read_text())
    assert result is not None
    return sum(1 << int(shift) for shift in re.findall(r"1 << (\d+)", result[1]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_content_counts_and_time_stamps_do_not(layout: str) -> None:
    """The bits moved between these; writes through mappings, which no system call tells, were missed on 6.12."""
    sync, data, pages, time = LAYOUTS[layout]
    assert mask() & data and mask() & pages
    assert not mask() & (sync | time)
