"""The Debian package: ``python packaging/deb.py [--into dist]``, from the wheels that lie there.

It brings an interpreter of its own (Debian 12's, pinned in scripts/debs.lock; shared libraries are the host's, which
Debian 12 and everything newer has under the same names), the wheels of client and runtime with what they need at the
versions of requirements.lock, the units, /etc/pagurus/daemon.toml and the program /usr/bin/pagurus. No compiler and no
pip is needed where it is installed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEBIAN = Path(__file__).with_name("debian")
HOME = Path("opt/pagurus")
PYTHON = HOME / "bin/python3.11"
PACKAGES = HOME / "lib/python3/dist-packages"  # where Debian's interpreter looks, below its prefix
PLATFORMS = [*(f"manylinux_2_{minor}_x86_64" for minor in (17, 28, 34, 36)), "manylinux2014_x86_64"]
# Parts of the standard library that a daemon has no use for, and that would ask for more libraries of the host.
LEFT_OUT = ("nis", "_dbm", "readline", "_curses", "_curses_panel", "_crypt", "ossaudiodev", "_codecs_jp")
NOTICE = re.compile("licen[cs]e|copying|notice|copyright", re.IGNORECASE)
COPYRIGHT = """{licence}

----------------------------------------------------------------------------------------------------------------------

This package also holds parts of others, unchanged, each under the licence that stands in the file behind its name.
Debian has the sources of its packages, CRIU's (GPL-2) and the libraries' (GPL and LGPL) among them, under the versions
that /{packages}/pagurus_runtime/criu/notices/PACKAGES lists: in its archive, and later in its archive of snapshots.
The helpers in pagurus_runtime/bin and pagurus_runtime/runtime hold parts of the GNU C library (LGPL-2.1, see libc6).

{parts}
""".replace("{packages}", str(PACKAGES))


def interpreter(stage: Path) -> None:
    """Python of the pinned packages below the package's own directory."""
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(["bash", ROOT / "scripts" / "debs.sh", "fetch", "python", directory], check=True)
        tree = Path(directory, "tree")
        for deb in Path(directory).glob("*python3.11*.deb"):
            subprocess.run(["dpkg-deb", "-x", deb, tree], check=True)
        (stage / PYTHON).parent.mkdir(parents=True)
        shutil.copy(tree / "usr/bin/python3.11", stage / PYTHON)
        library = stage / HOME / "lib/python3.11"
        shutil.copytree(tree / "usr/lib/python3.11", library, symlinks=True)
        for item in library.glob("lib-dynload/*.so"):
            if item.name.partition(".")[0] in LEFT_OUT:
                item.unlink()
        for item in (library / "sitecustomize.py", library / "EXTERNALLY-MANAGED"):
            item.unlink(missing_ok=True)
        shutil.copy(tree / "usr/share/doc/libpython3.11-minimal/copyright", library / "copyright")


def packages(stage: Path, wheels: Path) -> None:
    """Client and runtime with what they need, compiled: nothing is written there later."""
    result = [next(wheels.glob(f"pagurus_{item}-*.whl")) for item in ("client", "runtime")]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    command += ["--target", str(stage / PACKAGES), "--only-binary=:all:", "--python-version=3.11"]
    command += ["--implementation=cp", *(f"--platform={item}" for item in PLATFORMS)]
    command += ["--constraint", str(ROOT / "requirements.lock"), *map(str, result)]
    subprocess.run(command, check=True)
    shutil.rmtree(stage / PACKAGES / "bin", ignore_errors=True)
    # By content: what the deb holds stays valid whatever times dpkg gives its files.
    compiled = [str(stage / PYTHON), "-I", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"]
    compiled += ["-s", str(stage), "-p", "/", str(stage / HOME / "lib")]
    subprocess.run(compiled, check=False, stdout=subprocess.DEVNULL)  # test data of the library is not meant to compile


def unit(text: str) -> str:
    """A unit of the tree as the package has it: its interpreter, its configuration, its group.

    >>> unit("ExecStart=/opt/pagurus/.venv/bin/python -m daemon $PAGURUS_OPTIONS")
    'ExecStart=/opt/pagurus/bin/python3.11 -I -m daemon $PAGURUS_OPTIONS'
    """
    text = text.replace("/opt/pagurus/.venv/bin/python", f"/{PYTHON} -I")
    if "-m daemon" in text and "[Service]" in text:
        options = 'Environment="PAGURUS_OPTIONS=--config /etc/pagurus/daemon.toml"\n'
        text = text.replace("EnvironmentFile=", options + "EnvironmentFile=", 1)
        text = text.replace("# Sockets; root's alone.\n", "# Sockets; the group may pass to the API's.\n")
        text = text.replace("RuntimeDirectoryMode=0700", "RuntimeDirectoryMode=0711")
    if "[Socket]" in text:
        text = re.sub(
            r"# A Unix socket of root's alone: .*", "# The group pagurus may open it, and is root by that.", text
        )
        text = text.replace(
            "SocketMode=0600\nDirectoryMode=0700", "SocketMode=0660\nSocketGroup=pagurus\nDirectoryMode=0711"
        )
    return text


def around(stage: Path) -> None:
    """Units, configuration, the program."""
    units = stage / "usr/lib/systemd/system"
    units.mkdir(parents=True)
    for item in (ROOT / "systemd").iterdir():
        (units / item.name).write_text(unit(item.read_text()))
    for source, target, mode in (("daemon.toml", "etc/pagurus", 0o644), ("pagurus", "usr/bin", 0o755)):
        (stage / target).mkdir(parents=True, exist_ok=True)
        shutil.copy(DEBIAN / source, stage / target / source)
        (stage / target / source).chmod(mode)
    documents = stage / "usr/share/doc/pagurus"
    documents.mkdir(parents=True)
    for name, target in (("README.md", "README.md"), ("CHANGELOG.md", "changelog")):
        shutil.copy(ROOT / name, documents / target)
    (documents / "copyright").write_text(copyright_text(stage))


def copyright_text(stage: Path) -> str:
    """The licence of Pagurus, then each part of others that the package brings, with the file of its notice.

    Raises SystemExit when a part has none: whoever passes the package on has to pass on the notices.
    """
    parts = {"python3.11, of Debian 12": stage / HOME / "lib/python3.11/copyright"}
    notices = stage / PACKAGES / "pagurus_runtime/criu/notices"
    parts |= {f"{item.name}, beside CRIU": item for item in sorted(notices.glob("*")) if item.name != "PACKAGES"}
    for item in sorted((stage / PACKAGES).glob("*.dist-info")):
        files = [path for path in sorted(item.rglob("*")) if path.is_file() and NOTICE.search(path.name)]
        parts[f"{item.name.removesuffix('.dist-info')}, from PyPI"] = (files or [item / "METADATA"])[0]
    if "criu, beside CRIU" not in parts:
        raise SystemExit("error: the licence notices of CRIU are missing\nhint: `rm -r .prefix/criu && make setup`")
    lines = [f"{name}: /{path.relative_to(stage)}" for name, path in parts.items()]
    return COPYRIGHT.format(licence=(ROOT / "LICENSE").read_text().strip(), parts="\n".join(lines))


def control(stage: Path, version: str) -> None:
    """What dpkg reads."""
    size = sum(path.lstat().st_size for path in stage.rglob("*") if not path.is_dir()) // 1024
    (stage / "DEBIAN").mkdir()
    for item in ("control", "conffiles", "postinst", "prerm", "postrm"):
        text = (DEBIAN / item).read_text().replace("@VERSION@", version).replace("@SIZE@", str(size))
        (stage / "DEBIAN" / item).write_text(text)
        (stage / "DEBIAN" / item).chmod(0o755 if text.startswith("#!") else 0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--into", type=Path, default=ROOT / "dist")
    into = parser.parse_args().into
    version = next(into.glob("pagurus_client-*.whl")).name.split("-")[1]
    os.umask(0o022)
    with tempfile.TemporaryDirectory() as directory:
        stage = Path(directory, "stage")
        stage.mkdir(mode=0o755)
        interpreter(stage)
        packages(stage, into)
        around(stage)
        control(stage, version)
        target = into / f"pagurus_{version}_amd64.deb"
        subprocess.run(["dpkg-deb", "--root-owner-group", "-Zzstd", "--build", stage, target], check=True)


if __name__ == "__main__":
    main()
