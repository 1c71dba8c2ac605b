"""The seal of a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.errors import EngineFailed
from trainer.seal import verify_directory, write_manifest


def test_a_seal_holds_and_breaks(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    manifest = write_manifest(tmp_path, 3)
    assert verify_directory(tmp_path, 3) == manifest
    with pytest.raises(EngineFailed, match="holds version 3, not 4"):
        verify_directory(tmp_path, 4)
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    with pytest.raises(EngineFailed, match=r"model\.safetensors differs"):
        verify_directory(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(EngineFailed, match="was not sealed"):
        verify_directory(tmp_path)
