"""Explanations beside changes: the last one of a path, with its turn; nothing made up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from daemon.verdict.explain import by_api, last_reasons, reason
from sandbox import Sandbox
from sandbox.messages import Effects, TurnInfo, Verdict


def turn(number: int, *reasons: str) -> TurnInfo:
    return TurnInfo(
        sandbox="s",
        turn=number,
        command="",
        started_at=0.0,
        duration=0.0,
        exit_code=0,
        verdict=Verdict.FILES,
        reason="",
        effects=Effects(reasons=list(reasons)),
    )


def why(path: str, turns: list[TurnInfo], now: list[str]) -> str:
    return reason(last_reasons(turns, now), path)


def test_the_last_explanation_of_a_path_is_given() -> None:
    turns = [turn(1, "openat /a by sh[5]"), turn(2, "content of /a by vi[6]", "mkdir /b by sh[7]"), turn(3)]
    assert why("/a", turns, []) == "written by vi[6] in turn 2"
    assert why("/a", turns, ["rename /a by mv[8]"]) == "rename by mv[8]"
    assert why("/b", turns, []) == "mkdir by sh[7] in turn 2"
    assert why("/c", turns, []) == ""


def test_names_with_blanks_are_paths_too() -> None:
    assert why("/a b by c[1]", [turn(1, "openat /a b by c[1] by sh[5]")], []) == "openat by sh[5] in turn 1"


@given(st.lists(st.text(max_size=40), max_size=8))
def test_whatever_is_written_only_paths_are_explained(lines: list[str]) -> None:
    result = last_reasons([turn(1, *lines)], [*lines, "mkdir /b by sh[7]"])
    assert all(path.startswith("/") and said for path, said in result.items())
    assert result["/b"] == "mkdir by sh[7]"


def test_what_is_said_of_a_directory_holds_below_it() -> None:
    renamed = ("renameat2 /old by mv[5]", "renameat2 /new by mv[5]")
    turns = [turn(3, *renamed, "openat /new/b by sh[6]", "mkdir /d by sh[6]")]
    assert why("/old/a", turns, []) == why("/new/a", turns, []) == "renameat2 by mv[5] in turn 3"
    assert why("/new/b", turns, []) == "openat by sh[6] in turn 3"
    assert why("/d/a", turns, []) == "" and why("/olden", turns, []) == ""
    assert why("/tree/x/y", turns, [by_api("unpack", "/tree")]) == "unpack by the API"


def test_no_program_is_the_api() -> None:
    """A program may be called so; its number stays behind its name."""
    assert why("/a", [turn(1, "openat /a by the API[5]")], []) == "openat by the API[5] in turn 1"
    assert why("/a", [turn(1, "openat /a by the API by sh[5]")], []) == ""


async def test_files_of_the_image_and_former_names_have_reasons(sb: Sandbox) -> None:
    await sb.exec("mkdir /own; for name in a b c d; do echo 1 > /own/$name; done")
    before = await sb.checkpoint()
    await sb.exec("echo x >> /etc/issue; chmod 600 /own/a; mv /own/a /own/moved; truncate -s 0 /own/d")
    await sb.exec("printf Z | dd of=/etc/issue.net conv=notrunc 2>/dev/null; truncate -s 1 /etc/debian_version")
    await sb.exec(": >/etc/motd; chmod 700 /etc/host.conf")
    result = {change.path: change.why for change in await sb.diff(before, why=True)}
    said = {
        "/etc/issue": ("written", "sh["),
        "/etc/issue.net": ("written", "dd["),
        "/etc/debian_version": ("ftruncate", "truncate["),
        "/etc/motd": ("openat", "sh["),
        "/etc/host.conf": ("chmod", "chmod["),
        "/own/a": ("rename", "mv["),
        "/own/moved": ("rename", "mv["),
        "/own/d": ("ftruncate", "truncate["),
    }
    assert {path for path, (call, who) in said.items() if call not in result[path] or who not in result[path]} == set()


async def test_what_the_api_changes_is_said_to_be_its(sb: Sandbox) -> None:
    await sb.exec("mkdir -p /own/dir; echo 1 > /own/gone; echo 1 > /own/old; echo 1 > /own/dir/a")
    before = await sb.checkpoint()
    await sb.files.write("/own/written", b"x")
    await sb.files.write("/etc/issue", b"x")
    await sb.files.move("/own/old", "/own/new")
    await sb.files.remove("/own/gone")
    await sb.files.remove("/own/dir", recursive=True)
    result = {change.path: change.why for change in await sb.diff(before, why=True)}
    assert result.pop("/own", None) in (None, "")
    assert result == {
        "/own/written": "write by the API",
        "/etc/issue": "write by the API",
        "/own/old": "move by the API",
        "/own/new": "move by the API",
        "/own/gone": "remove by the API",
        "/own/dir": "remove by the API",
    }
    await sb.captured(await sb.exec("true"))  # its turn keeps them
    later = {change.path: change.why for change in await sb.diff(before, why=True)}
    assert later["/own/written"].startswith("write by the API in turn ")


async def test_a_diff_says_who_did_it(sb: Sandbox) -> None:
    before = await sb.checkpoint()
    work = "mkdir /work; echo 1 > /work/file; echo 2 > /work/new; mv /work/new /work/moved; rm /etc/issue"
    await sb.captured(await sb.exec(work))  # what it did is its turn's from then on
    result = {change.path: change.why for change in await sb.diff(before, why=True)}
    assert "mkdir" in result["/work"] and "in turn 1" in result["/work"]
    assert "by sh[" in result["/work/file"]
    assert "rename" in result["/work/moved"] and "by mv[" in result["/work/moved"]
    assert "unlink" in result["/etc/issue"] and "by rm[" in result["/etc/issue"]
    assert all(not change.why for change in await sb.diff(before))
