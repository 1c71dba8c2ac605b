"""What `make package` builds: wheels that work outside of a checkout, and the parts of the Debian package."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.daemon_host import missing

ROOT = Path(__file__).parent.parent


def program(name: str) -> ModuleType:
    """A program of packaging/, which is no package: its name is that of a library."""
    described = importlib.util.spec_from_file_location(name, ROOT / "packaging" / f"{name}.py")
    assert described is not None and described.loader is not None
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    return module


wheels, deb = program("wheels"), program("deb")
TABLE = tomllib.loads((ROOT / "packaging" / "distributions.toml").read_text())


def installed(tmp_path: Path, *names: str) -> Path:
    """A directory with the unpacked wheels of these distributions, as pip leaves it."""
    into = tmp_path / "dist"
    into.mkdir()
    for name in names:
        made = wheels.build(name, TABLE[name], into, wheels.ROOT / ".prefix")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--no-index"]
        subprocess.run([*command, "--target", tmp_path / "site", made], check=True, capture_output=True)
    return tmp_path / "site"


def run(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Python with these wheels before everything else, outside of the checkout."""
    existing = {name: value for name, value in os.environ.items() if name != "PAGURUS_PREFIX"}
    existing["PYTHONPATH"] = str(site)
    return subprocess.run([sys.executable, *words], env=existing, cwd="/", capture_output=True, text=True, check=False)


def test_the_client_is_small_and_takes_no_name_of_others(tmp_path: Path) -> None:
    site = installed(tmp_path, "pagurus-client")
    assert {item.name for item in site.iterdir() if item.is_dir() and "dist-info" not in item.name} <= {
        "sandbox",
        "pagurus",
        "bin",
    }
    (made,) = (tmp_path / "dist").iterdir()
    assert made.stat().st_size < 1 << 20
    assert (site / "pagurus/page/built/index.html").exists() == (wheels.ROOT / "pagurus/page/built/index.html").exists()
    assert not (site / "pagurus/page/front").exists()
    assert run(site, "-c", "import sandbox, sandbox.sync as s; s.Client; print(sandbox.__file__)").stdout.startswith(
        str(site)
    )
    assert run(site, "-m", "pagurus", "--version").stdout.startswith("pagurus ")


def test_what_a_smaller_distribution_lacks_is_named(tmp_path: Path) -> None:
    """Alone: nothing of the checkout can be found."""
    site = installed(tmp_path, "pagurus-client")
    hidden = "import sys; sys.modules['daemon'] = None; sys.argv = ['pagurus', 'daemon']"
    done = run(site, "-c", f"{hidden}; from pagurus.__main__ import main; main()")
    assert (done.returncode, done.stdout) == (1, "") and "pip install pagurus-runtime" in done.stderr


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_the_runtime_brings_its_compiled_parts(tmp_path: Path) -> None:
    """Doctor tries them: the sandbox that it starts is the package's, with a runtime layer of its own making."""
    site = installed(tmp_path, "pagurus-client", "pagurus-runtime")
    assert not [path for path in (site / "pagurus_runtime").rglob("*") if path.is_symlink()]
    for item in ("bin/pagurus-shim", "criu/bin/criu", "runtime/init"):
        assert os.access(site / "pagurus_runtime" / item, os.X_OK), item
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    done = run(site, "-c", f"import os; os.environ['PAGURUS_STATE'] = {str(state)!r}\n" + DOCTOR)
    assert done.returncode == 0, done.stderr
    prefix, levels = json.loads(done.stdout)
    assert prefix == str(site / "pagurus_runtime")
    assert [name for name in ("inspector", "sandbox", "criu", "criu tcp") if levels[name] != "ok"] == []
    assert {path.name for path in (state / "runtime").iterdir()} == {"layer", "layers"}


def test_parts_that_cannot_be_moved_are_not_packed(tmp_path: Path) -> None:
    """A launcher that names the prefix of the machine that built it runs nowhere else: once all of a package's CRIU."""
    prefix = tmp_path / "prefix"
    for part in wheels.PARTS:
        (prefix / part).parent.mkdir(parents=True, exist_ok=True)
        (prefix / part).write_bytes(b"\x7fELF\0" + bytes(prefix)) if part.endswith(".o") else (prefix / part).mkdir()
    (prefix / "criu" / "bin").mkdir()
    launcher = prefix / "criu" / "bin" / "criu"
    launcher.write_text('#!/bin/sh\nexec "${0%/bin/criu}/usr/sbin/criu" "$@"\n')
    wheels.copy_parts(prefix, tmp_path / "good")
    launcher.write_text(f'#!/bin/sh\nexec "{prefix}/criu/usr/sbin/criu" "$@"\n')
    with pytest.raises(SystemExit, match=r"criu/bin/criu names .*which no other host has"):
        wheels.copy_parts(prefix, tmp_path / "wrong")


DOCTOR = """
import json
from daemon import doctor
from sandbox import paths
print(json.dumps([str(paths.prefix()), {each.name: each.level for each in doctor.examine()}]))
"""


@pytest.mark.parametrize("name", TABLE)
def test_names_versions_and_needs(name: str) -> None:
    made = tomllib.loads(wheels.pyproject(name, TABLE[name]))
    assert made["project"]["name"] != "pagurus" and made["project"]["version"] == wheels.version()
    for item in TABLE[name].get("requires", []):
        assert f"{item}=={wheels.version()}" in made["project"]["dependencies"]


def test_no_message_names_a_distribution_of_others() -> None:
    """`pagurus` on PyPI is another project."""
    listing = ["git", "ls-files", "*.py", "*.md", "*.sh"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    wrong = re.compile(r"pip install ['\"]?pagurus(?!-client|-runtime|-rl)")
    result = [path for path in listed if path != "tests/test_packages.py" and wrong.search((ROOT / path).read_text())]
    assert not result


@pytest.mark.parametrize("name", ["pagurus.service", "pagurus.socket", "pagurus-cluster.service"])
def test_units_of_the_package(name: str) -> None:
    text = deb.unit((ROOT / "systemd" / name).read_text())
    assert ".venv" not in text
    if name == "pagurus.service":
        assert "ExecStart=/opt/pagurus/bin/python3.11 -I -m daemon $PAGURUS_OPTIONS" in text
        assert '"PAGURUS_OPTIONS=--config /etc/pagurus/daemon.toml"' in text and "RuntimeDirectoryMode=0711" in text
    if name == "pagurus.socket":
        assert "SocketMode=0660\nSocketGroup=pagurus\nDirectoryMode=0711" in text
