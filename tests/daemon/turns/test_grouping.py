"""Several acts that are one turn, through a real daemon."""

from __future__ import annotations

import pytest

from sandbox import Client, Sandbox
from sandbox.errors import Conflict
from sandbox.messages import Verdict
from tests.support.daemon_host import until


async def test_several_acts_are_one_turn(sb: Sandbox) -> None:
    first = await sb.exec("true")
    async with sb.turn() as turn:
        inner = await sb.exec("echo a > /a")
        assert inner.turn is None and inner.checkpoint is None
        await sb.files.write("/b", "b")
        session = await sb.sessions.open()
        await session.exec("cd /usr")
        with pytest.raises(Conflict):
            async with sb.turn():
                pass
    assert turn.result is not None and first.turn is not None
    assert turn.result.turn == first.turn + 1 and turn.result.verdict is Verdict.BOTH
    await sb.exec("rm /a /b")
    await sb.restore(turn.result.checkpoint)
    assert (await session.exec("cat /a /b; pwd")).text == "a\nb/usr\n"


async def test_a_client_that_dies_ends_the_turn(host: Client, sb: Sandbox) -> None:
    turn = sb.turn()
    await turn.__aenter__()
    await sb.exec("echo x > /x")
    assert turn._socket is not None
    turn._socket._response.close()  # no farewell
    await until(sb.turns, "the daemon notices that we are gone")
    await turn._stack.aclose()
    (ended,) = await sb.turns()
    assert ended.verdict in (Verdict.FILES, Verdict.BOTH)
    assert (await sb.exec("true")).turn == 2
