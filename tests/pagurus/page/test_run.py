"""`pagurus view RUN`: a run without a daemon, in a real Chromium."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer

from pagurus.page.runs import RunRoutes
from pagurus.page.viewer import Viewer
from rollout.messages import Trajectory, TurnRecord
from rollout.store.samples import SampleStore
from tests.pagurus.page.conftest import ARGUMENTS, CHROMIUM, absent

pytestmark = pytest.mark.skipif(bool(absent()), reason=absent())
HTML = "<img src=x onerror=window.broken=1>"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two groups of two, and three steps."""
    (tmp_path / "run" / "rollout").mkdir(parents=True)
    lines = [{"step": number, "reward": number / 4, "loss": -0.1 * number} for number in range(3)]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "rew'
    (tmp_path / "run" / "metrics.jsonl").write_text(text)
    with closing(SampleStore(tmp_path / "run" / "rollout")) as store:
        fence = store.acquire("rollout")
        store.issue([7, 8], fence)
        for lease in store.lease(2, fence):
            for member in range(2):
                turn = TurnRecord(index=0, action=f"cat {HTML}", observation="three\n", verdict="files", tokens=2)
                lists = {"tokens": [5, 6, 7], "mask": [0, 1, 1], "logprobs": [0.0, -0.5, -9.0], "versions": [-1, 3, 4]}
                made = Trajectory(prompt=lease.prompt, index=member, reward=float(member), turns=[turn], **lists)
                assert store.put(made, fence)
    return tmp_path / "run"


@pytest.fixture
def address(run: Path) -> Iterator[str]:
    """Where the run is shown, with its code. The server has a loop of its own, as Playwright has one."""
    loop, viewer = asyncio.new_event_loop(), Viewer(None, RunRoutes(run))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> TestServer:
        server = TestServer(viewer.application())
        await server.start_server()
        return server

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
    try:
        yield f"{server.make_url('/')}#code={viewer.code}"
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_a_run_is_read_without_a_daemon(address: str) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_page()
        broken: list[str] = []
        page.on("pageerror", lambda error: broken.append(str(error)))
        page.on("console", lambda said: broken.append(said.text) if said.type == "error" else None)
        page.goto(address)
        page.get_by_role("heading", name="run", exact=True).wait_for()
        page.locator(".chart canvas").first.wait_for()
        assert "code" not in page.url and page.locator(".cell").count() == 4
        assert page.get_by_role("link", name="Sandboxes").count() == 0
        page.get_by_role("link", name="p000001/1: completed, reward 1").click()
        page.get_by_text(f"cat {HTML}").wait_for()
        assert page.get_by_test_id("tokens").locator("i").count() == 3
        assert page.locator(".tokens .newer").count() == 1 and page.evaluate("window.broken") is None
        browser.close()
    assert broken == []
