"""`make setup` where a step fails: the real script, with steps of the test's own."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(os.geteuid() != 0, reason="set-up needs root")
def test_a_step_that_fails_ends_the_others(tmp_path: Path) -> None:
    scripts = tmp_path / "scripts"
    shutil.copytree(ROOT / "scripts", scripts)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "ready").mkdir()
    waiting = '#!/bin/sh\nsleep 1000 & echo $! >"$(dirname "$0")/../ready/$(basename "$0")"\nsleep 1000\necho went on\n'
    failing = """#!/bin/sh
while [ "$(cat "$(dirname "$0")"/../ready/* 2>/dev/null | wc -l)" != 2 ]; do sleep 0.05; done
exit 3
"""
    steps = {"system.sh": "#!/bin/sh\n", "criu.sh": failing, "python.sh": waiting, "image.sh": waiting}
    for name, text in steps.items():
        (scripts / name).write_text(text)
        (scripts / name).chmod(0o755)
    existing = {**os.environ, "PAGURUS_PREFIX": str(tmp_path / "prefix"), "PAGURUS_STATE": str(tmp_path / "state")}
    done = subprocess.run(
        ["bash", str(scripts / "setup.sh")], env=existing, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 3 and "went on" not in done.stdout, done.stderr
    left = [Path("/proc", path.read_text().strip()) for path in (tmp_path / "ready").iterdir()]
    until = time.monotonic() + 60  # they were told to end; a busy machine may take a moment
    while any((path / "fd/0").exists() for path in left) and time.monotonic() < until:
        time.sleep(0.05)
    assert len(left) == 2 and not any((path / "fd/0").exists() for path in left)


def own_scripts(tmp_path: Path) -> Path:
    """A copy of scripts/ in a checkout of the test's own."""
    shutil.copytree(ROOT / "scripts", tmp_path / "checkout" / "scripts")
    return tmp_path / "checkout" / "scripts"


def test_packages_are_pinned_by_their_content(tmp_path: Path) -> None:
    scripts, mirror = own_scripts(tmp_path), tmp_path / "mirror"
    (mirror / "pool").mkdir(parents=True)
    (mirror / "pool" / "a_1%2b1.deb").write_bytes(b"a package")
    pin = f"{hashlib.sha256(b'a package').hexdigest()} pool/a_1%2b1.deb\n"
    existing = {**os.environ, "PAGURUS_DEBIAN_MIRROR": mirror.as_uri()}
    command = ["bash", str(scripts / "debs.sh"), "fetch", "criu"]
    (mirror / "pool" / "a_1+1.deb").write_bytes(b"a package")
    for lines, target in ((f"python {pin}criu {pin}", 0), ("criu " + "0" * 64 + " pool/a_1%2b1.deb\n", 1)):
        (scripts / "debs.lock").write_text("# a comment\n" + lines)
        into = tmp_path / f"into-{target}"
        done = subprocess.run([*command, str(into)], env=existing, capture_output=True, text=True, check=False)
        assert done.returncode == target, done.stderr
        assert len(list(into.glob("*.deb"))) == 1 - target
    assert "a_1%2b1.deb, which scripts/debs.lock pins, is not at" in done.stdout


def test_the_lock_pins_criu_and_all_its_libraries() -> None:
    pins = [line.split() for line in (ROOT / "scripts" / "debs.lock").read_text().splitlines() if line[0] != "#"]
    assert all(len(pin) == 3 and len(pin[1]) == 64 and pin[2].endswith(".deb") for pin in pins)
    names = {(pin[0], pin[2].rpartition("/")[2].partition("_")[0]) for pin in pins}
    assert {("criu", item) for item in ("criu", "libc6", "python3-pycriu")} <= names


@pytest.mark.skipif(os.geteuid() != 0, reason="set-up needs root")
@pytest.mark.parametrize(
    ("said", "status"), [("E: Release file for mirror is expired (invalid since 3d).", 0), ("E: no network", 1)]
)
def test_an_index_past_its_date_is_used(tmp_path: Path, said: str, status: int) -> None:
    scripts = own_scripts(tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    dated = f'#!/bin/sh\ncase "$*" in *Check-Valid-Until=false*|*install*) exit 0;; esac\necho "{said}"; exit 100\n'
    for name, text in {"apt-get": dated, "dpkg-query": "#!/bin/sh\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    existing = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PAGURUS_PREFIX": str(tmp_path / "prefix")}
    done = subprocess.run(
        ["bash", str(scripts / "system.sh")], env=existing, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stderr
    assert ("past its date" in done.stdout) == (status == 0)
