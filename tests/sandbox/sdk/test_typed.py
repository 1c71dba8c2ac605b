"""The SDK has static types, the synchronous one too."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

SAMPLE = """
from sandbox import Limits
from sandbox.sync import Client, Sandbox, Session

with Client() as host, host.create("debian", limits=Limits(cpus=1)) as sb:
    code: int = sb.exec("true", timeout=1).exit_code
    data: bytes = b"".join(chunk.data for chunk in sb.stream("true"))
    names: list[str] = [entry.name for entry in sb.files.list("/")]
    children: list[Sandbox] = [fork.sandbox for fork in sb.fork(2)]
    with sb.sessions.open() as session, sb.turn() as turn, sb.ports.forward(80) as address:
        named: Session = session
        place: str = address.upper()
        assert turn.result is not None
    reader, writer = sb.ports.connect(80)
    content: bytes = reader.read(-1)
    for change in sb.diff(sb.checkpoint("label")):
        print(change.kind, change.path)
    with sb.pty("cat") as terminal:
        shown: list[bytes] = [part for part in terminal]
    number: str = host.images.get("debian").digest
"""
WRONG = {
    'sb.exec("true", time=1)': "call-arg",
    'sb.files.write("/a", 1)': "arg-type",
    'text: str = sb.exec("true").exit_code': "assignment",
    'sb.exce("true")': "attr-defined",
    'sb.fork(2)[0].sandbox.id = "x"': "misc",
    "for chunk in sb.stream(1): pass": "arg-type",
}


def stubs(*arguments: str) -> int:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "scripts/sync_stubs.py"), *arguments]
    return subprocess.run(command, env=environment, check=False).returncode


def test_the_types_of_the_synchronous_sdk_are_up_to_date() -> None:
    assert stubs("--check") == 0, "run `python scripts/sync_stubs.py`"


def test_packages_say_that_they_are_typed() -> None:
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for package in ("sandbox", "rollout"):
        assert (ROOT / package / "py.typed").is_file() and "py.typed" in shipped[package]
    assert "*.pyi" in shipped["sandbox"]


def test_mypy_knows_the_synchronous_sdk(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    lines = SAMPLE.count("\n")
    (tmp_path / "sample.py").write_text(SAMPLE + "".join(f"    {line}\n" for line in WRONG))
    (tmp_path / "mypy.ini").write_text("[mypy]\n")
    options = ["--config-file", "mypy.ini", "--cache-dir", "cache", "--follow-imports", "silent"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "--ignore-missing-imports", "--no-error-summary", "sample.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    result = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert len(result) == len(WRONG), done.stdout
    for number, (code, said) in enumerate(zip(WRONG.values(), result, strict=True)):
        assert said.startswith(f"sample.py:{lines + number + 1}:") and said.endswith(f"[{code}]"), said
