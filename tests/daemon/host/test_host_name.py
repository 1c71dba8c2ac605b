"""The host name of a sandbox, and of each fork, resolves, and is in the environment as Docker has it."""

from __future__ import annotations

import pytest

from sandbox import Sandbox
from sandbox.container.identity import hosts_for

OWN = b"127.0.1.1\tcrab\t# this sandbox\n"


@pytest.mark.parametrize(
    ("text", "fresh", "target"),
    [
        (b"", True, b"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n" + OWN),
        (b"127.0.0.1 localhost\n", True, b"127.0.0.1 localhost\n" + OWN),
        (b"127.0.0.1 localhost\n", False, b"127.0.0.1 localhost\n"),
        (b"127.0.1.1\tother\t# this sandbox\n10.0.0.1 db\n", False, OWN + b"10.0.0.1 db\n"),
        (OWN, False, OWN),
    ],
)
def test_lines(text: bytes, fresh: bool, target: bytes) -> None:
    assert hosts_for(text, "crab", fresh=fresh) == target


async def resolved(sb: Sandbox) -> str:
    done = await sb.exec('test "$HOSTNAME" = "$(hostname)" && getent hosts $HOSTNAME')
    assert done.exit_code == 0, done
    assert not done.verdict.files, "the line is no change of the sandbox"
    return done.text.split()[0]


async def test_it_resolves_in_a_new_sandbox_a_fork_and_after_restores(sb: Sandbox) -> None:
    assert await resolved(sb) == "127.0.1.1"
    assert await sb.restore((await sb.tree())[0])
    assert await resolved(sb) == "127.0.1.1"
    await sb.exec("echo 10.0.0.1 database >> /etc/hosts; sleep 1000 </dev/null >/dev/null 2>&1 &")
    await sb.restore(verify=True)
    assert await resolved(sb) == "127.0.1.1"
    (child,) = await sb.fork(verify=True)
    async with child.sandbox as fork:
        assert await resolved(fork) == "127.0.1.1"
        assert (await fork.exec("getent hosts database")).text.split() == ["10.0.0.1", "database"]


async def test_a_name_that_the_sandbox_took_away_stays_away(sb: Sandbox) -> None:
    await sb.exec("echo 127.0.0.1 localhost > /etc/hosts")
    await sb.restore()
    assert (await sb.exec("cat /etc/hosts")).text == "127.0.0.1 localhost\n"
