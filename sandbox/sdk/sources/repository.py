"""Git repositories for ``ADD https://host/project.git#ref:directory /target``, by the program git. Blocks.

Guarantee: nothing prompts at a terminal; no hook is run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from sandbox.errors import Invalid, Unsupported
from sandbox.tree import walk

CLONE_TIMEOUT = 1800.0  # seconds


def clone(address: str, directory: Path, commit: str, keep: bool) -> tuple[str, Path]:
    """Fill the empty directory `directory` with a repository: its commit, and the directory that is meant.

    `commit`: what it, or the annotated tag that names it, must be, or the beginning of that. `keep`: with its ``.git``.
    """
    if shutil.which("git") is None:
        raise Unsupported("git is missing", hint="apt-get install git")
    where, _, fragment = address.partition("#")
    name, _, below = fragment.partition(":")
    work = str(directory)
    _git("init", "-q", work)
    _git("-C", work, "fetch", "-q", "--depth=1", "--no-tags", "--", where, name or "HEAD")
    _git("-C", work, "-c", "core.hooksPath=/dev/null", "checkout", "-q", "--detach", "FETCH_HEAD")
    result = _git("-C", work, "rev-parse", "HEAD").strip()
    named = _git("-C", work, "rev-parse", "FETCH_HEAD").strip()
    if commit and not (result.startswith(commit) or named.startswith(commit)):
        raise Invalid(f"{address} is the commit {result}, not {commit}", hint="correct the checksum")
    if not keep:
        walk.remove_path(directory / ".git")
    top = directory / below.lstrip("/")
    if not top.is_dir() or not top.resolve().is_relative_to(directory.resolve()):
        raise Invalid(f"{address}: there is no directory {below}", hint="correct the part behind the colon")
    return result, top


def _git(*arguments: str) -> str:
    env = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": "https:http:ssh:git:file"}
    try:
        done = subprocess.run(
            ("git", *arguments), env=env, capture_output=True, text=True, timeout=CLONE_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        raise Invalid(
            f"git {arguments[-1]}: no end within {CLONE_TIMEOUT:.0f} s", hint="is it reachable from here?"
        ) from None
    if done.returncode:
        raise Invalid(
            f"git: {' | '.join(done.stderr.strip().splitlines()[-3:])}", hint="check the address and your access to it"
        )
    return done.stdout
