"""Pages of two image directories that are the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.criu import rpc, same_pages

PAGE = same_pages.PAGE


def write(directory: Path, runs: list[tuple[int, bytes]], monkeypatch: pytest.MonkeyPatch) -> Path:
    """`runs`: addresses, and the first bytes of the pages from there on."""
    directory.mkdir()
    entries = [{"pages_id": 1}, *({"vaddr": at, "nr_pages": len(firsts)} for at, firsts in runs)]
    (directory / "pagemap-7.img").touch()
    ENTRIES[directory / "pagemap-7.img"] = entries
    monkeypatch.setattr(rpc, "load", ENTRIES.__getitem__)
    pages = [bytes([first]) + bytes(PAGE - 1) for _, firsts in runs for first in firsts]
    (directory / "pages-1.img").write_bytes(b"".join(pages))
    return directory


ENTRIES: dict[Path, list[dict[str, int]]] = {}


def test_pages_are_compared_by_their_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = write(tmp_path / "one", [(0x10000, b"abc"), (0x40000, b"d")], monkeypatch)
    other = write(tmp_path / "other", [(0x0F000, b"xaBc"), (0x50000, b"d")], monkeypatch)
    assert same_pages.result(one, other) == {"pagemap-7.img": {0x10000, 0x12000}}
    assert same_pages.result(one, one) == {"pagemap-7.img": {0x10000, 0x11000, 0x12000, 0x40000}}
    (tmp_path / "none").mkdir()
    assert same_pages.result(one, tmp_path / "none") == {"pagemap-7.img": set()}
    assert same_pages.result(tmp_path / "none", one) == {}


def test_records_whose_pages_are_in_no_file_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = write(tmp_path / "one", [(0x10000, b"a"), (0x40000, b"d")], monkeypatch)
    without: list[dict[str, int]] = [{"vaddr": 0x20000, "nr_pages": 1 << 35, "flags": flags} for flags in (0, 2, 5)]
    without.append({"vaddr": 0x20000, "nr_pages": 1 << 35, "in_parent": 1})
    ENTRIES[one / "pagemap-7.img"][2:2] = without
    assert same_pages.result(one, one) == {"pagemap-7.img": {0x10000, 0x40000}}
