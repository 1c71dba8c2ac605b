"""The runtime layer, made from two programs without a compiler."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from sandbox import hints, paths
from sandbox.container import layer
from sandbox.errors import Unsupported

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="device nodes need root")


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    made = tmp_path / "runtime"
    made.mkdir()
    for name in ("init", "attend", "relay"):
        (made / name).write_bytes(b"\x7fELF " + name.encode())
    return made


def test_a_layer_has_pid_1_devices_and_mount_points(programs: Path, tmp_path: Path) -> None:
    name = layer.build(programs, tmp_path / "home")
    made = (tmp_path / "home" / "layer").resolve()
    assert made == tmp_path / "home" / "layers" / name
    assert (made / ".pagurus" / "init").read_bytes() == b"\x7fELF init"
    assert stat.S_IMODE((made / ".pagurus" / "attend").stat().st_mode) == 0o755
    null = (made / "dev" / "null").stat()
    assert stat.S_ISCHR(null.st_mode) and null.st_rdev == os.makedev(1, 3) and null.st_mode & 0o777 == 0o666
    assert stat.S_IMODE((made / "dev" / "shm").stat().st_mode) == 0o1777
    assert (made / "dev" / "tty").stat().st_rdev == os.makedev(5, 0)


def test_the_name_is_of_the_content(programs: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    old = layer.build(programs, home)
    assert layer.build(programs, home) == old
    (programs / "init").write_bytes(b"\x7fELF another init")
    new = layer.build(programs, home)
    assert new != old and (home / "layer").resolve().name == new
    assert {item.name for item in (home / "layers").iterdir()} == {old, new}
    assert (home / "layers" / old / ".pagurus" / "init").read_bytes() == b"\x7fELF init"


def test_the_layer_of_this_checkout_has_the_name_of_its_content(tmp_path: Path) -> None:
    if not (paths.prefix() / "runtime").is_dir():
        pytest.skip("not built: run `make native`")
    assert layer.build(paths.runtime_programs(), tmp_path) == paths.runtime_layer().name


def test_a_package_has_its_layer_in_the_state(programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGURUS_PREFIX", str(tmp_path))
    monkeypatch.setenv("PAGURUS_STATE", str(tmp_path / "state"))
    layer.ensure()
    assert paths.runtime_layer().parent == tmp_path / "state" / "runtime" / "layers"
    assert paths.runtime_layer(paths.runtime_layer().name) == paths.runtime_layer()
    (programs / "attend").unlink()
    with pytest.raises(Unsupported, match="has no programs") as refused:
        layer.ensure()
    assert refused.value.hint == hints.parts()


def test_parts_are_of_the_environment_a_package_or_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PAGURUS_PREFIX", raising=False)
    assert paths.prefix() == paths.CHECKOUT / ".prefix"
    monkeypatch.setattr(paths, "PREBUILT", tmp_path)
    assert paths.prefix() == tmp_path
    monkeypatch.setenv("PAGURUS_PREFIX", "/elsewhere")
    assert paths.prefix() == Path("/elsewhere")
