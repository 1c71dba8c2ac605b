"""The bounds of what a stranger's archive may make its reader do, each passed by one."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox.errors import Invalid
from sandbox.image import oci, unpacking
from sandbox.tree import archive, tar
from sandbox.tree.safe_path import directory

BLOCK = tarfile.BLOCKSIZE


def header(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE) -> bytes:
    made = tarfile.TarInfo(name)
    made.type, made.size = kind, size
    return made.tobuf(tarfile.GNU_FORMAT)


def extended(size: int, kind: bytes = tarfile.XHDTYPE) -> bytes:
    """An extended header of so many bytes, whole blocks."""
    text = f"{size} comment=".encode()
    return header("pax", size, kind) + text + b"x" * (size - len(text) - 1) + b"\n"


def sparse(pieces: int) -> bytes:
    """A file with holes whose map has so many pieces, in GNU's format 1.0."""
    made = tarfile.TarInfo("sparse")
    numbers = [pieces, *(number for piece in range(pieces) for number in (piece * 2, 1))]
    content = b"".join(b"%d\n" % number for number in numbers)
    content += bytes(-len(content) % BLOCK) + bytes(pieces)
    made.size = len(content)
    made.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(pieces * 2)}
    return made.tobuf(tarfile.PAX_FORMAT) + content + bytes(-len(content) % BLOCK)


WITHIN: dict[str, bytes] = {
    "header": extended(tar.MAX_HEADER - BLOCK) + header("f"),
    "shared": extended(tar.MAX_SHARED, tarfile.XGLTYPE) + header("f"),
    "chain": extended(BLOCK) * tar.MAX_CHAIN + header("f"),
    "depth": header("/".join(["d"] * (archive.MAX_DEPTH - 1)), 0, tarfile.DIRTYPE),
    "pieces": sparse(1000),
}
BEYOND: dict[str, tuple[bytes, str]] = {
    "header": (extended(tar.MAX_HEADER + BLOCK) + header("f"), "a header of a size of"),
    "all headers": (extended(tar.MAX_HEADER - BLOCK) * 5 + header("f"), "headers of more than"),
    "shared": (extended(tar.MAX_SHARED + BLOCK, tarfile.XGLTYPE) + header("f"), "headers for all members"),
    "chain": (extended(BLOCK) * (tar.MAX_CHAIN + 1) + header("f"), "headers before one member"),
    "depth": (header("/".join(["d"] * (archive.MAX_DEPTH + 1)), 0, tarfile.DIRTYPE), "nested more than"),
    "map": (sparse(600_000), "headers of more than"),
    "bytes": (header("f", 4096) + bytes(4096), "more than 4095 bytes"),
    "unfinished": (header("f", 1 << 40), "unexpected end"),
}


def unpack(data: bytes, tree: Path, limit: int = 4095) -> None:
    tree.mkdir(exist_ok=True)
    with directory(tree) as root:
        archive.unpack(io.BytesIO(data + bytes(2 * BLOCK)), root, limit=limit)


@pytest.mark.parametrize("name", WITHIN)
def test_as_much_as_is_allowed(tmp_path: Path, name: str) -> None:
    unpack(WITHIN[name], tmp_path / "tree")
    assert any((tmp_path / "tree").iterdir())


@pytest.mark.parametrize("name", BEYOND)
def test_more_is_refused(tmp_path: Path, name: str) -> None:
    data, why = BEYOND[name]
    with pytest.raises(Invalid, match=why):
        unpack(data, tmp_path / "tree", limit=1 << 50 if name == "unfinished" else 4095)


def test_entries_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar, "MAX_ENTRIES", 20)
    unpack(b"".join(header(f"f{number}") for number in range(20)), tmp_path / "tree")
    with pytest.raises(Invalid, match="more than 20 entries"):
        unpack(b"".join(header(f"f{number}") for number in range(21)), tmp_path / "tree")


# ------------------------------------------------------------------ images


def layout(directory: Path, layers: int, config: bytes = b"{}") -> Path:
    directory.mkdir()
    (directory / "layer").write_bytes(header("f", 100) + bytes(BLOCK) + bytes(2 * BLOCK))
    (directory / "config").write_bytes(config)
    (directory / "manifest.json").write_text(json.dumps([{"Config": "config", "Layers": ["layer"] * layers}]))
    return directory


def big(directory: Path) -> Path:
    return layout(directory, 1, b" " * oci.MAX_DOCUMENT + b"{}")


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda directory: layout(directory, oci.MAX_LAYERS + 1), f"more than {oci.MAX_LAYERS} layers"),
        (big, "larger than"),
        (lambda directory: layout(directory, 11), "more than 0 bytes"),
    ],
)
def test_an_image_has_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Callable[[Path], Path], why: str
) -> None:
    monkeypatch.setattr(oci, "MAX_IMAGE", 1000)  # of all layers together
    (tmp_path / "tree").mkdir()
    with pytest.raises(Invalid, match=why):
        oci.unpack(made(tmp_path / "layout"), tmp_path / "tree")


def test_unpacking_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "TIMEOUT", 0.5)
    os.mkfifo(tmp_path / "source")  # nobody writes to it
    with pytest.raises(Invalid, match="not unpacked within"):
        unpacking.unpack(tmp_path / "source", tmp_path / "tree")


def test_unpacking_has_its_own_memory() -> None:
    hungry = """
from sandbox.image import oci, unpacking
oci.is_layout = lambda source: bytearray(unpacking.MAX_MEMORY)  # what an archive may make its reader do
unpacking.main("/dev/null", "/nowhere")
"""
    done = subprocess.run([sys.executable, "-c", hungry], capture_output=True, check=True)
    assert b"takes more than 1024 MiB of memory" in done.stdout
