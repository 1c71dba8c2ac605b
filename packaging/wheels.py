"""Wheels of the distributions in distributions.toml: ``python packaging/wheels.py [--into dist]``.

The compiled parts of `pagurus-runtime` are those of this checkout's prefix, without what only a build needs; device
nodes and links, which no wheel can hold, are not among them (sandbox/container/layer.py makes the former).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_name("distributions.toml")
PLATFORM = "manylinux_2_36_x86_64"  # the C library of Debian 12, where the parts are built
PREBUILT = "pagurus_runtime"
PARTS = ("bin", "bpf/inspector.bpf.o", "bpf/addresses.bpf.o", "criu", "criu-plugins", "lib", "runtime")
AGAIN = "`rm -r .prefix/criu && make setup`: a set-up of before wrote launchers that cannot be moved"
LEFT_OUT = ("gconv", "compel", "libcompel.so", "__pycache__", "ld.so.conf.d", "lib64", "libexec", "audit")


def version() -> str:
    """The one of the tree: pagurus/__init__.py."""
    result: dict[str, Any] = {}
    exec((ROOT / "pagurus" / "__init__.py").read_text(), result)
    return str(result["VERSION"])


def pyproject(name: str, row: dict[str, Any]) -> str:
    """The pyproject.toml of a distribution."""
    tree = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = tree["optional-dependencies"]
    needs = [f"{item}=={version()}" for item in row.get("requires", [])] or list(tree["dependencies"])
    for item in row.get("extras", []):
        needs += extras[item]
    lines = [
        "[build-system]",
        'requires = ["setuptools>=77"]',
        'build-backend = "setuptools.build_meta"',
        "[project]",
        f"name = {_quoted(name)}",
        f"version = {_quoted(version())}",
        f"description = {_quoted(row['description'])}",
        'readme = "README.md"',
        'license = "Apache-2.0"',
        'license-files = ["LICENSE"]',
        f"requires-python = {_quoted(tree['requires-python'])}",
        f"dependencies = {_array(needs)}",
        "[project.optional-dependencies]",
        *(f"{item} = {_array(extras[item])}" for item in row.get("optional", [])),
    ]
    if row.get("scripts"):
        lines += ["[project.scripts]", *(f"{key} = {_quoted(value)}" for key, value in tree["scripts"].items())]
        for group, points in tree.get("entry-points", {}).items():
            lines.append(f"[project.entry-points.{_quoted(group)}]")
            lines += [f"{key} = {_quoted(value)}" for key, value in points.items()]
    names = [f"{item}*" for item in row["packages"]]
    lines += ["[tool.setuptools.packages.find]", f"include = {_array([*names, PREBUILT + '*'])}", "namespaces = true"]
    lines += ["[tool.setuptools.package-data]", f'"*" = {_array(["py.typed", "*.pyi"])}']
    lines += [f'"pagurus.page" = {_array(["built/*", "built/assets/*"])}'] if "pagurus" in row["packages"] else []
    if row.get("prebuilt"):
        lines += [f'{PREBUILT} = ["**/*"]', "[tool.distutils.bdist_wheel]", f"plat-name = {_quoted(PLATFORM)}"]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _array(items: list[str]) -> str:
    return "[" + ", ".join(_quoted(item) for item in items) + "]"


def copy_parts(prefix: Path, into: Path) -> None:
    """The compiled parts of a prefix: regular files alone, each library under the name that it is loaded by."""
    for part in PARTS:
        source = prefix / part
        if not source.exists():
            raise SystemExit(f"error: {source} is missing\nhint: run `make setup` first")
        for path in [source] if source.is_file() else sorted(source.rglob("*")):
            if path.is_dir() or any(word in str(path.relative_to(prefix)) for word in LEFT_OUT):
                continue
            target = into / path.relative_to(prefix)
            if path.is_symlink() and not path.resolve().is_file():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)  # follows links, keeps modes
    _drop_long_names(prefix, into)
    if bound := sorted(str(path.relative_to(into)) for path in into.rglob("*") if _names(path, prefix)):
        raise SystemExit(f"error: {bound[0]} names {prefix}, which no other host has\nhint: {AGAIN}")


def _names(path: Path, prefix: Path) -> bool:
    """Whether a script or a list names the prefix that it was copied from. Programs do, in what only debuggers read."""
    if not path.is_file():
        return False
    content = path.read_bytes()
    return b"\0" not in content and any(os.fsencode(item) in content for item in (prefix, ROOT / ".prefix", ROOT))


def _drop_long_names(prefix: Path, into: Path) -> None:
    """Of libfoo.so.1 and libfoo.so.1.2.3, which are the same file, keep the first."""
    for path in prefix.rglob("*.so.*"):
        if path.is_symlink() and path.parent == path.resolve().parent:
            (into / path.resolve().relative_to(prefix.resolve())).unlink(missing_ok=True)


def build(name: str, row: dict[str, Any], into: Path, prefix: Path) -> Path:
    """One wheel."""
    with tempfile.TemporaryDirectory() as directory:
        stage = Path(directory)
        for package in row["packages"]:
            ignored = shutil.ignore_patterns("__pycache__", "*.c", "*.h", "native", "front")
            shutil.copytree(ROOT / package, stage / package, ignore=ignored)
        for item in ("README.md", "LICENSE"):
            shutil.copy(ROOT / item, stage)
        if row.get("prebuilt"):
            copy_parts(prefix, stage / PREBUILT)
        (stage / "pyproject.toml").write_text(pyproject(name, row))
        before = set(into.glob("*.whl"))
        for old in into.glob(f"{name.replace('-', '_')}-*.whl"):
            old.unlink()
            before.discard(old)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
        environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        subprocess.run([*command, "--wheel-dir", into, stage], check=True, env=environment)
        (made,) = set(into.glob("*.whl")) - before
        return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--into", type=Path, default=ROOT / "dist")
    parser.add_argument("--prefix", type=Path, default=Path(os.environ.get("PAGURUS_PREFIX", ROOT / ".prefix")))
    arguments = parser.parse_args()
    arguments.into.mkdir(exist_ok=True)
    for name, row in tomllib.loads(TABLE.read_text()).items():
        print(build(name, row, arguments.into, arguments.prefix))


if __name__ == "__main__":
    main()
