"""Explanations beside changes: the last one of a path, with its turn; nothing made up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from daemon.verdict.explain import explained
from sandbox import Sandbox
from sandbox.messages import Change, Effects, TurnInfo, Verdict


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
    return explained([Change(path=path, kind="modified")], turns, now)[0].why


def test_the_last_explanation_of_a_path_is_given() -> None:
    turns = [turn(1, "openat /a by sh[5]"), turn(2, "content of /a by vi[6]", "mkdir /b by sh[7]"), turn(3)]
    assert why("/a", turns, []) == "content of by vi[6] in turn 2"
    assert why("/a", turns, ["rename /a by mv[8]"]) == "rename by mv[8]"
    assert why("/b", turns, []) == "mkdir by sh[7] in turn 2"
    assert why("/c", turns, []) == ""


def test_names_with_blanks_are_paths_too() -> None:
    assert why("/a b by c[1]", [turn(1, "openat /a b by c[1] by sh[5]")], []) == "openat by sh[5] in turn 1"


@given(st.lists(st.text(max_size=40), max_size=8))
def test_whatever_is_written_no_change_is_lost(lines: list[str]) -> None:
    changes = [Change(path="/a", kind="added"), Change(path="/b", kind="removed")]
    assert [(one.path, one.kind) for one in explained(changes, [turn(1, *lines)], lines)] == [
        ("/a", "added"),
        ("/b", "removed"),
    ]


async def test_a_diff_says_who_did_it(sb: Sandbox) -> None:
    before = await sb.checkpoint()
    await sb.exec("mkdir /work; echo 1 > /work/file; echo 2 > /work/new; mv /work/new /work/moved; rm /etc/issue")
    found = {change.path: change.why for change in await sb.diff(before, why=True)}
    assert "mkdir" in found["/work"] and "in turn 1" in found["/work"]
    assert "by sh[" in found["/work/file"]
    assert "rename" in found["/work/moved"] and "by mv[" in found["/work/moved"]
    assert "unlink" in found["/etc/issue"] and "by rm[" in found["/etc/issue"]
    assert all(not change.why for change in await sb.diff(before))
