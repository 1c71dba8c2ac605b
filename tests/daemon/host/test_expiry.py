"""When the time of a sandbox is over: the rule, then a real daemon."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.host.expiry import SOON, ExpiryCheck, Life, judge
from sandbox import Client
from sandbox.errors import Invalid, NotFound
from sandbox.messages import AtEnd, SandboxState

TABLE = [
    # created, used, busy, lifetime, idle, now -> over?, again
    ((0, 0, False, None, None, 1e9), (False, None)),
    ((0, 0, False, 10, None, 9), (False, 1)),
    ((0, 0, False, 10, None, 10), (True, None)),
    ((0, 9, True, 10, None, 20), (False, SOON)),
    ((0, 9, False, 10, None, 20), (True, None)),
    ((0, 5, False, None, 10, 14), (False, 1)),
    ((0, 5, False, None, 10, 15), (True, None)),
    ((0, 5, True, None, 10, 99), (False, SOON)),
    ((7, 5, False, None, 10, 16), (False, 1)),  # used before it was created: another daemon's clock
    ((0, 5, False, 12, 10, 11), (False, 1)),
    ((0, 5, False, 99, 10, 11), (False, 4)),
]


@pytest.mark.parametrize(("observed", "expected"), TABLE)
def test_the_rule(
    observed: tuple[float, float, bool, float | None, float | None, float], expected: tuple[bool, float]
) -> None:
    created, used, busy, lifetime, idle, now = observed
    result = judge(Life(created=created, used=used, busy=busy, lifetime=lifetime, idle_timeout=idle), now)
    assert (result.over is not None, result.again) == expected


seconds = st.floats(min_value=0, max_value=1e6, allow_nan=False)
lives = st.builds(
    Life,
    created=seconds,
    used=seconds,
    busy=st.booleans(),
    lifetime=st.none() | st.floats(min_value=0.001, max_value=1e6),
    idle_timeout=st.none() | st.floats(min_value=0.001, max_value=1e6),
)


@given(lives, seconds)
def test_it_is_never_over_while_used_and_never_missed(life: Life, now: float) -> None:
    result = judge(life, now)
    assert not (life.busy and result.over)
    if result.over is None and result.again is not None and not life.busy and result.again > 0:
        early = judge(life, now + result.again * 0.99)
        assert early.over is None or early == judge(life, now)
        assert judge(life, (now + result.again) * (1 + 1e-9) + 1e-6).over is not None
    if life.lifetime is None and life.idle_timeout is None:
        assert result == ExpiryCheck(None, None)


async def until(host: Client, sandbox: str, state: SandboxState | None) -> None:
    async with asyncio.timeout(240):
        while True:
            try:
                if (await (await host.get(sandbox)).refresh()).state is state:
                    return
            except NotFound:
                assert state is None
                return
            await asyncio.sleep(0.1)


async def test_a_call_under_way_defers_the_end_and_a_stopped_sandbox_comes_back(host: Client) -> None:
    sb = await host.create("debian", lifetime=6.0)
    done = await sb.exec("echo kept > /file; sleep 7; echo whole")
    assert done.text == "whole\n"
    await until(host, sb.id, SandboxState.DEAD)
    await sb.restore()
    assert (await sb.files.read("/file")) == b"kept\n"
    await sb.remove()


async def test_an_end_that_was_moved_comes_sooner(host: Client) -> None:
    sb = await host.create("debian", lifetime=1e6, at_end=AtEnd.REMOVE)
    await sb.extend(0.01)
    await until(host, sb.id, None)


async def test_an_unused_sandbox_is_removed(host: Client) -> None:
    sb = await host.create("debian", idle_timeout=2.5, at_end=AtEnd.REMOVE)
    began = time.monotonic()
    while time.monotonic() < began + 4:  # in use, for longer than that
        await sb.exec("true", ends_turn=False)
    await until(host, sb.id, None)


async def test_an_unused_sandbox_is_stopped(host: Client) -> None:
    """The checkpoint that is made for it at the end is no use of it."""
    sb = await host.create("debian", idle_timeout=3.0)
    await sb.exec("echo kept > /file")
    await until(host, sb.id, SandboxState.DEAD)
    await sb.restore()
    assert (await sb.files.read("/file")) == b"kept\n"
    await sb.remove()


async def test_nonsense_is_refused(host: Client) -> None:
    for wrong in (0.0, -1.0):
        with pytest.raises(Invalid):
            await host.create("debian", lifetime=wrong)
