"""SandboxFusion's POST /run_code against a real daemon, called as verl calls it."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import ClientSession, web

from pagurus.integrations import common, sandbox_fusion
from sandbox import Client
from tests.support.daemon_host import Daemon


@pytest.fixture
async def url(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    monkeypatch.setenv("PAGURUS_HOST", str(daemon.socket))
    monkeypatch.setattr(common, "_runs", {})
    runner = web.AppRunner(sandbox_fusion.application("debian", internet=False))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield "http://{}:{}/run_code".format(*runner.addresses[0][:2])
    await runner.cleanup()
    await asyncio.to_thread(common.leave_run)


async def call(url: str, code: str, language: str = "python", **more: object) -> dict[str, Any]:
    body = {"code": code, "language": language, **more}
    async with ClientSession() as session, session.post(url, json=body) as answer:
        assert answer.status == 200
        made: dict[str, Any] = await answer.json()
        return made


async def test_each_call_has_a_fork_of_its_own(url: str, host: Client) -> None:
    made = await call(url, "print(int(input()) * 2); open('x', 'w').write('1')", stdin="21\n", fetch_files=["x", "y"])
    assert (made["status"], made["message"], made["compile_result"]) == ("Success", "", None)
    ran = made["run_result"]
    assert (ran["status"], ran["return_code"], ran["stdout"], ran["stderr"]) == ("Finished", 0, "42\n", "")
    assert made["files"] == {"x": base64.b64encode(b"1").decode()}
    again = await call(url, "import os; print(os.listdir('.'))")
    assert again["run_result"]["stdout"] == "['main.py']\n"
    assert [info.labels[common.TOOL] for info in await host.sandboxes()] == ["sandbox-fusion"]  # the warm one alone


async def test_what_fails_is_told_apart(url: str) -> None:
    failed = await call(url, "print('so far'); raise SystemExit(3)")
    assert (failed["status"], failed["run_result"]["return_code"]) == ("Failed", 3)
    slow = await call(url, "while True: pass", run_timeout=0.5)
    assert (slow["status"], slow["run_result"]["status"]) == ("Failed", "TimeLimitExceeded")
    other = await call(url, "x", "cobol")
    assert other["status"] == "SandboxError" and "cobol" in other["message"]
    wrong = await call(url, "x", files={"a": "no base64!"})
    assert wrong["status"] == "SandboxError" and "base64" in wrong["message"]
    shell = await call(url, "cat given; exit 0", "bash", files={"given": base64.b64encode(b"data").decode()})
    assert shell["run_result"]["stdout"] == "data"


async def test_a_request_that_cannot_be_read_is_refused(url: str) -> None:
    async with ClientSession() as session, session.post(url, data=b"{") as answer:
        assert answer.status == 422
