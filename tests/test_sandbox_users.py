"""Users of a sandbox's own passwd file, and the script that a session's shell reads."""

from __future__ import annotations

import os
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.sessions import _script
from sandbox.errors import Invalid
from sandbox.users import User, among, parse

PASSWD = """root:x:0:0:root:/root:/bin/bash
crab:x:1000:100:Crab,,,:/home/crab:/bin/sh
far:x:70000:1:beyond the sandbox's ids:/:/bin/sh
odd:x:12:13:no home:relative:/bin/sh
broken:x:1000
crab:x:1:1:again:/:/bin/sh
"""


def test_the_users_of_a_file() -> None:
    known = parse(PASSWD)
    assert known["crab"] == User(1000, 100, "/home/crab") and known["odd"] == User(12, 13, "/")
    assert set(known) == {"root", "crab", "odd"}
    assert among(known, "crab") == among(known, 1000) == among(known, "1000")
    assert among(known, 1234) == User(1234, 1234, "/")
    for wrong in ("nonesuch", "far", -1, 70_000, "70000", "1e3", ""):
        with pytest.raises(Invalid):
            among(known, wrong)


@given(st.text(max_size=300))
def test_any_file_gives_users_of_the_sandbox(text: str) -> None:
    for user in parse(text).values():
        assert 0 <= user.uid < 65_536 and 0 <= user.gid < 65_536 and user.home.startswith("/")


@settings(max_examples=40, deadline=None)
@given(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=60))
def test_a_shell_evaluates_exactly_the_command(command: str) -> None:
    line = _script(command, os.urandom(16), 7).decode().replace("eval ", "printf %s ")
    said = subprocess.run(["/bin/sh", "-c", f"exec 7>&1 8>&2; {line}"], capture_output=True, check=True).stdout
    assert said.decode() == command
