"""Agents work, the daemon is killed again and again: each answer is heard once. `pagurus bench gateway` kills more."""

from __future__ import annotations

import argparse
import asyncio

import pytest

from bench.gateway import run
from tests.support.daemon_host import image_tree, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


async def test_each_answer_is_heard_once_however_often_the_daemon_dies() -> None:
    options = argparse.Namespace(parts="kills", kills=4, sandboxes=3, image=image_tree())
    result = await asyncio.to_thread(run, options)
    assert result["gateway_turns"] >= 6
    wrong = ("gateway_answers_doubled", "gateway_asked_needlessly", "gateway_lost", "leaks")
    assert {name: result[name] for name in wrong} == dict.fromkeys(wrong, 0), result
