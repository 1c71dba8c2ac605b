"""Users of a sandbox's own passwd and group files, and the script that a session's shell reads."""

from __future__ import annotations

import os
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.turns.sessions import _script
from sandbox.container.users import MAX_GROUPS, User, UserTable, parse, parse_groups, resolve
from sandbox.errors import Invalid

PASSWD = """root:x:0:0:root:/root:/bin/bash
crab:x:1000:100:Crab,,,:/home/crab:/bin/sh
first:x:13:8::/first:/bin/sh
second:x:13:9::/second:/bin/sh
far:x:70000:1:beyond the sandbox's ids:/:/bin/sh
odd:x:12:13:no home:relative:/bin/sh
broken:x:1000
crab:x:1:1:again:/:/bin/sh
42:x:7:7:a name of digits:/seven:/bin/sh
"""
GROUP = """root:x:0:
disk:x:6:root,crab
users:x:100:crab
staff:x:50:odd,crab
audio:x:29:crab
beyond:x:70000:crab
short:x:5
staff:x:51:again
"""


@pytest.mark.parametrize(
    ("who", "user"),
    [
        ("crab", User(1000, 100, "/home/crab", (100, 6, 29, 50))),
        (1000, User(1000, 100, "/home/crab", (100, 6, 29, 50))),
        ("1000", User(1000, 100, "/home/crab", (100, 6, 29, 50))),
        ("odd", User(12, 13, "/", (13, 50))),
        ("crab:staff", User(1000, 50, "/home/crab", (50,))),
        ("crab:77", User(1000, 77, "/home/crab", (77,))),
        ("1000:1000", User(1000, 1000, "/home/crab", (1000,))),
        ("0:staff", User(0, 50, "/root", (50,))),
        ("root", User(0, 0, "/root", (0, 6))),
        (0, User(0, 0, "/root", (0, 6))),
        ("root:", User(0, 0, "/root", (0, 6))),
        (":staff", User(0, 50, "/root", (50,))),
        ("second", User(13, 9, "/first", (9,))),  # the home of a number is that of its first name
        ("root:root", User(0, 0, "/root", (0,))),
        (1234, User(1234, 0, "/", (0,))),
        ("1234:audio", User(1234, 29, "/", (29,))),
        ("42", User(7, 7, "/seven", (7,))),
        (65_535, User(65_535, 0, "/", (0,))),
    ],
)
def test_who_somebody_is(who: int | str, user: User) -> None:
    assert resolve(who, UserTable(PASSWD), UserTable(GROUP)) == user


@pytest.mark.parametrize(
    "who",
    ["nonesuch", "far", "broken", -1, 70_000, "70000", "1e3", "", ":", "crab:nobody", "crab:short",
     "crab:beyond", "crab:70000", "crab:-1", "a:b:c", "٣", "crab:٣"],
)  # fmt: skip
def test_who_nobody_is(who: int | str) -> None:
    with pytest.raises(Invalid):
        resolve(who, UserTable(PASSWD), UserTable(GROUP))


def test_a_refusal_says_which_file_does_not_know_it_and_why() -> None:
    with pytest.raises(Invalid, match=r"no user 'ghost' in the sandbox's /etc/passwd \(use"):
        resolve("ghost", UserTable(PASSWD), UserTable(GROUP))
    with pytest.raises(Invalid, match="/etc/passwd: it has no such file"):
        resolve("ghost", UserTable(trouble="it has no such file"), UserTable())
    with pytest.raises(Invalid, match="no group 'ghosts' in the sandbox's /etc/group: not a regular file"):
        resolve("crab:ghosts", UserTable(PASSWD), UserTable(trouble="not a regular file"))
    assert resolve(1000, UserTable(trouble="it has no such file"), UserTable()) == User(1000, 0, "/", (0,))


@pytest.mark.parametrize("who", ["root", "0", 0])
def test_root_is_there_without_files(who: int | str) -> None:
    assert resolve(who, UserTable(trouble="it has no such file"), UserTable()) == User(0, 0, "/", (0,))
    elsewhere = resolve(who, UserTable("root:x:0:5:root:/home/root:/bin/sh"), UserTable("wheel:x:10:root"))
    assert elsewhere == User(0, 5, "/home/root", (5, 10))


def test_a_user_of_too_many_groups_must_say_which() -> None:
    many = "".join(f"g{n}:x:{2000 + n}:crab\n" for n in range(MAX_GROUPS + 1))
    with pytest.raises(Invalid, match="257 groups"):
        resolve("crab", UserTable(PASSWD), UserTable(many))
    assert resolve("crab:g3", UserTable(PASSWD), UserTable(many)) == User(1000, 2003, "/home/crab", (2003,))
    few = many[: many.rindex("g255")]  # and its own
    assert len(resolve("crab", UserTable(PASSWD), UserTable(few)).groups) == MAX_GROUPS


_LINES = st.lists(st.text(st.sampled_from("ab0179:,x/\0"), max_size=30), max_size=8).map("\n".join)


@given(st.text(max_size=300) | _LINES, st.text(max_size=300) | _LINES, st.text(max_size=20) | st.integers())
def test_any_files_give_users_of_the_sandbox(passwd: str, group: str, who: int | str) -> None:
    for user in parse(passwd).values():
        assert 0 <= user.uid < 65_536 and 0 <= user.gid < 65_536 and user.home.startswith("/")
    assert all(0 <= item.gid < 65_536 for item in parse_groups(group).values())
    for requested in (
        who,
        *parse(passwd),
        *(f"{name}:{which}" for name in parse(passwd) for which in parse_groups(group)),
    ):
        try:
            result = resolve(requested, UserTable(passwd), UserTable(group))
        except Invalid:
            continue
        assert all(0 <= number < 65_536 for number in (result.uid, result.gid, *result.groups))
        assert result.home.startswith("/") and len(result.groups) <= MAX_GROUPS


@settings(max_examples=40, deadline=None)
@given(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=60))
def test_a_shell_evaluates_exactly_the_command(command: str) -> None:
    line = _script(command, os.urandom(16), 7).decode().replace("eval ", "printf %s ")
    said = subprocess.run(["/bin/sh", "-c", f"exec 7>&1 8>&2; {line}"], capture_output=True, check=True).stdout
    assert said.decode() == command
