"""Verdicts of a real daemon: what leaves nothing is captured by nothing, what is ignored neither; all else is."""

from __future__ import annotations

import pytest

from sandbox import Client, Sandbox
from sandbox.errors import Invalid
from sandbox.messages import IgnoreRules, Verdict

NONE, FILES, PROCESSES = Verdict.NONE, Verdict.FILES, Verdict.PROCESSES


async def verdict(sb: Sandbox, command: str) -> Verdict | None:
    result = await sb.exec(command)
    assert result.exit_code == 0, result.stderr
    return result.verdict


MADE_AND_GONE = (
    "echo x > /tmp/p && rm /tmp/p",
    "cat /etc/passwd > /tmp/p && rm /tmp/p",
    "mkdir /tmp/d && rmdir /tmp/d",
    "mkdir -p /tmp/a/b && rm -r /tmp/a",
)


async def test_what_is_made_and_gone_within_a_turn_needs_no_checkpoint(sb: Sandbox) -> None:
    assert await verdict(sb, "mkdir /work && echo same > /work/file") is FILES
    head = (await sb.exec("true")).checkpoint
    for command in MADE_AND_GONE:
        assert await verdict(sb, command) is NONE, command
    assert (await sb.exec("true")).checkpoint == head


async def test_in_a_new_sandbox_too(sb: Sandbox) -> None:
    """It has no snapshot yet: its upper layer was empty."""
    for command in MADE_AND_GONE:
        assert await verdict(sb, command) is NONE, command
    assert await verdict(sb, "chmod 600 /etc/passwd") is FILES


@pytest.mark.parametrize("rules", [None, IgnoreRules(paths=["/nowhere/**"])], ids=["plain", "compared"])
async def test_what_moved_before_it_went_is_nothing_where_files_are_compared(
    host: Client, rules: IgnoreRules | None
) -> None:
    async with host.create("debian", ignore=rules) as sb:
        await sb.exec("mkdir /work && echo same > /work/file")
        for command in ("echo x > /work/t && mv /work/t /t && rm /t", "mkdir /work/d && mv /work/d /e && rmdir /e"):
            assert await verdict(sb, command) is (FILES if rules is None else NONE), command
        result = await sb.exec("echo else > /work/file")
        assert result.verdict is FILES
        await sb.restore()
        assert (await sb.exec("cat /work/file")).stdout == b"else\n"


async def test_what_comes_to_something_is_captured(sb: Sandbox) -> None:
    assert await verdict(sb, "mkdir /work && echo same > /work/file") is FILES
    for command in (
        "echo else > /work/file",
        "chmod 600 /work/file",
        "touch -d @5 /work/file",
        "ln /work/file /work/twin",
        "rm /work/twin",
        "chmod 700 /work",
        "rm /etc/issue",
        "echo x >> /etc/passwd",
        "truncate -s 100 /work/file",
    ):
        assert await verdict(sb, command) is FILES, command


async def test_a_file_that_a_survivor_holds_is_not_replaced_by_its_like(sb: Sandbox) -> None:
    await sb.exec("mkdir /work && echo same > /work/file")
    assert await verdict(sb, "setsid sleep 1000 < /work/file > /dev/null 2>&1 &") is not NONE
    assert await verdict(sb, "echo same > /work/new && mv /work/new /work/file") is not NONE


async def test_ignored_paths_make_no_checkpoint_and_lie_in_those_of_others(host: Client) -> None:
    rules = IgnoreRules(paths=["/var/cache/**", "**/__pycache__/**"])
    async with host.create("debian", ignore=rules) as sb:
        assert await verdict(sb, "mkdir -p /work /var/cache/x && echo 1 > /work/file") is FILES
        assert await verdict(sb, "echo 2 > /var/cache/x/y") is NONE
        assert await verdict(sb, "mkdir -p /work/__pycache__ && echo 2 > /work/__pycache__/m.pyc") is NONE
        # A way into an ignored directory that leads out of it again.
        assert await verdict(sb, "ln -s /work /var/cache/out") is NONE
        assert await verdict(sb, "echo 3 > /var/cache/out/file") is FILES
        await sb.exec("echo 4 > /var/cache/x/y")
        await sb.restore()
        assert (await sb.exec("cat /var/cache/x/y /work/file")).stdout == b"2\n3\n"


async def test_an_ignored_process_makes_no_checkpoint_but_what_it_does_counts(host: Client) -> None:
    async with host.create("debian", ignore=IgnoreRules(processes=["/usr/bin/sleep"])) as sb:
        # Until it executes the program that is named, it is somebody else.
        leave = "{} > /dev/null 2>&1 < /dev/null & until grep -q {} /proc/$!/comm; do :; done"
        assert await verdict(sb, leave.format("sleep 1000", "sleep")) is NONE
        assert await verdict(sb, leave.format("tail -f /dev/null", "tail")) is PROCESSES
        while await verdict(sb, "true") is not NONE:  # until it has begun to wait
            pass
        assert (
            await verdict(sb, "pkill sleep || kill $(cat /proc/[0-9]*/stat | grep '(sleep)' | cut -d' ' -f1)")
            is PROCESSES
        )


async def test_rules_that_say_nothing_for_certain_are_refused(host: Client) -> None:
    for rules in (IgnoreRules(paths=["/**"]), IgnoreRules(processes=["a name that is far too long"])):
        with pytest.raises(Invalid):
            await host.create("debian", ignore=rules)
