"""`pagurus view RUN` in a real Chromium: without a daemon, and with one in which sandboxes go on from turns."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp.test_utils import TestServer

from pagurus.page.runs import RunRoutes
from pagurus.page.viewer import Viewer
from rollout.decide.blame import Cause, EpisodePhase, TrajectoryFailure
from rollout.decide.keeping import RetainedRow
from rollout.decide.view import WaitReason
from rollout.messages import Ancestor, Trajectory, TurnRecord
from rollout.store.retained import RetainedLedger, Visit
from rollout.store.samples import SampleStore
from rollout.store.status import Status, TrajectoryStatus, write_status
from sandbox import Client
from tests.pagurus.page.conftest import absent, complained

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from tests.pagurus.page.conftest import Site

pytestmark = pytest.mark.skipif(bool(absent()), reason=absent())
HTML = "<img src=x onerror=window.broken=1>"
BEGAN = time.time() - 100.0
PIECES = {5: "read ", 6: HTML, 7: "\u202eturned"}


def turn(number: int, action: str) -> TurnRecord:
    at = BEGAN + 10 * number
    return TurnRecord(
        index=number, action=action, observation="three\n", verdict="files", tokens=2,
        gen_start=at, gen_end=at + 4, exec_start=at + 4, exec_end=at + 9,
    )  # fmt: skip


def tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    directory.mkdir()
    made = Tokenizer(models.WordLevel({text: number for number, text in PIECES.items()}, unk_token=PIECES[5]))
    made.decoder = decoders.Fuse()
    made.save(str(directory / "tokenizer.json"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path)


def make_run(tmp_path: Path) -> Path:
    """Two groups of two, and three steps. Of each group the second trajectory left the first one before turn 1."""
    (tmp_path / "run" / "rollout").mkdir(parents=True)
    lines = [{"step": number, "reward": number / 4, "loss": -0.1 * number} for number in range(3)]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "rew'
    (tmp_path / "run" / "metrics.jsonl").write_text(text)
    tokenizer(tmp_path / "run" / "policy")
    with closing(SampleStore(tmp_path / "run" / "rollout")) as store:
        fence = store.acquire("rollout")
        store.issue([7, 8], fence)
        for lease in store.lease(2, fence):
            for member in range(2):
                turns = [turn(0, f"cat {HTML}"), turn(1, f"echo {member}")]
                lineage = [Ancestor(0, 0, 1)] if member else []
                lists: dict[str, Any] = {
                    "tokens": [5, 6, 7],
                    "mask": [0, 1, 1],
                    "logprobs": [0.0, -0.5, -9.0],
                    "versions": [-1, 3, 4],
                }
                made = Trajectory(
                    prompt=lease.prompt, index=member, reward=float(member), turns=turns, lineage=lineage,
                    started_at=BEGAN - 1, finished_at=BEGAN + 20, scored_at=BEGAN + 21, **lists,
                )  # fmt: skip
                assert store.put(made, fence)
        waits = [WaitReason(who=f"engine {HTML}", reason="no prompt is left", since=BEGAN)]
        doing = TrajectoryStatus(
            name="p000009/0", turn=3, tokens=9, oldest=None, started_at=BEGAN, doing="step", since=BEGAN
        )
        status = Status(
            at=time.time(), version=4, step=3, trainer="waiting", requested_at=BEGAN, waits=waits, running=[doing],
            account=store.account(), seconds={},
        )  # fmt: skip
        write_status(tmp_path / "run" / "rollout", status)
    return tmp_path / "run"


@contextlib.contextmanager
def shown(run: Path, daemon: str | None = None) -> Iterator[str]:
    """Where a run is shown, with its code. The server has a loop of its own, as Playwright has one."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[TestServer, Viewer, Client | None]:
        client = None if daemon is None else await Client(daemon).__aenter__()
        viewer = Viewer(client, RunRoutes(run))
        server = TestServer(viewer.application())
        await server.start_server()
        return server, viewer, client

    async def stop(server: TestServer, client: Client | None) -> None:
        await server.close()
        if client is not None:
            await client.__aexit__(None, None, None)

    server, viewer, client = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
    try:
        yield f"{server.make_url('/')}#code={viewer.code}"
    finally:
        asyncio.run_coroutine_threadsafe(stop(server, client), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def page(run: Path, browser: Browser) -> Iterator[Page]:
    """The run without a daemon. Nothing on the page may go wrong."""
    with shown(run) as address, opened(browser, address) as page:
        yield page


@contextlib.contextmanager
def opened(browser: Browser, address: str, **options: Any) -> Iterator[Page]:
    page, broken = browser.new_page(**options), list[str]()
    page.set_default_timeout(60_000)
    page.on("pageerror", lambda error: broken.append(str(error)))
    page.on("console", lambda said: broken.append(said.text) if complained(said) else None)
    page.goto(address)
    yield page
    assert page.evaluate("window.broken") is None and page.locator("main img").count() == 0
    page.close()
    assert broken == []


def test_a_run_is_read_without_a_daemon(page: Page, run: Path) -> None:
    page.locator(".chart canvas").first.wait_for()
    assert "code" not in page.url and page.locator("a.cell").count() == 4
    assert page.get_by_role("link", name="Sandboxes").count() == 0
    page.get_by_role("link", name="p000001/1: completed, reward 1").click()
    page.get_by_text(f"cat {HTML}").wait_for()
    assert page.get_by_role("button", name="Go on").count() == 0
    page.get_by_text("are not kept").wait_for()
    assert {path.name for path in (run / "rollout").glob("*.sqlite")} == {"samples.sqlite"}  # nothing was made here


FAILURES = {
    "policy": TrajectoryFailure(phase=EpisodePhase.STEP, cause=Cause.QUOTA),
    "environment": TrajectoryFailure(phase=EpisodePhase.RESET, cause=Cause.RAISED, message=HTML),
    "platform": TrajectoryFailure(phase=EpisodePhase.CREATE, cause=Cause.REFUSED),
}


def fail(run: Path) -> None:
    """One more prompt, of which no trajectory ended by itself, and one that was given up."""
    with closing(SampleStore(run / "rollout")) as store:
        fence = store.acquire("rollout")
        store.issue([9, 10], fence)
        failed, given_up = store.lease(2, fence)
        for number, failure in enumerate(FAILURES.values()):
            assert store.put(Trajectory(prompt=failed.prompt, index=number, status="failed", failure=failure), fence)
        store.give_up(given_up.prompt, f"its environment failed {HTML}", fence)


def test_the_grid_says_what_passed_and_whose_fault_the_rest_is(page: Page, run: Path) -> None:
    fail(run)
    grid = page.get_by_test_id("grid")
    row = grid.get_by_role("group", name="p000002")
    row.wait_for()
    assert row.locator("a").all_inner_texts() == ["P", "E", "H"]
    assert "environment (reset/raised)" in (row.locator("a").nth(1).get_attribute("title") or "")
    assert grid.get_by_role("group", name="p000001").locator("a").all_inner_texts() == ["✗", "✓"]
    grid.get_by_text(f"given up: its environment failed {HTML}").wait_for()
    for told in ("2 passed", "2 failed", "1 lost by the platform"):
        grid.get_by_text(told).wait_for()
    grid.get_by_label("passed with a reward of").fill("0")
    grid.get_by_text("4 passed").wait_for()


def test_tokens_have_their_text_and_what_is_known_of_them(page: Page) -> None:
    page.get_by_role("link", name="p000001/1: completed, reward 1").click()
    tokens = page.get_by_test_id("tokens")
    tokens.locator("i", has_text="read").wait_for()
    assert tokens.locator("i").all_inner_texts() == ["read ", HTML, "\\u{202e}turned"]
    assert tokens.locator(".trained").count() == 2 and tokens.locator(".newer").count() == 1
    likely, unlikely = (
        tokens.locator("i").nth(at).evaluate("at => getComputedStyle(at).backgroundColor") for at in (1, 2)
    )
    assert likely != unlikely
    tokens.locator("i", has_text="turned").click()
    assert "-9.000, version 4" in page.get_by_test_id("token").inner_text()
    page.keyboard.press("ArrowLeft")
    assert "-0.500, version 3" in page.get_by_test_id("token").inner_text()
    page.get_by_label("as cells").check()
    assert tokens.inner_text().strip() == ""


def test_a_group_is_a_tree_and_two_of_it_stand_side_by_side(page: Page) -> None:
    page.get_by_role("link", name="p000001/1: completed, reward 1").click()
    tree = page.get_by_test_id("branches")
    tree.get_by_text("left 0 before turn 1").wait_for()
    assert tree.locator("path").count() == 2 and tree.locator("path.here").count() == 1
    page.get_by_label("Another trajectory").fill("p1/0")
    page.get_by_role("button", name="Side by side").click()
    page.get_by_test_id("together").get_by_text("the first 1 turns are equal").wait_for()
    pair = page.locator(".pair")
    assert pair.get_by_text("echo 0").count() == pair.get_by_text("echo 1").count() == 1
    assert pair.get_by_text("cat <img").count() == 0


def test_waits_and_where_the_time_went(page: Page) -> None:
    page.get_by_role("link", name="Waits").click()
    page.get_by_test_id("waits").get_by_text(f"engine {HTML}").wait_for()
    page.get_by_role("cell", name="p000009/0").wait_for()
    page.get_by_role("link", name="Where the time went").click()
    part = page.get_by_label("Trajectories", exact=True)
    part.get_by_role("row", name="command").wait_for()
    assert part.locator("canvas").evaluate("at => at.height > 0 && at.width > 0")
    cells = part.get_by_role("row", name="samples").locator("td").all_inner_texts()
    assert cells[1] == "24.0 s"  # four trajectories, of which two have their first turn from others


def test_a_click_goes_on_from_a_turn(site: Site, run: Path, browser: Browser) -> None:
    with site.host.create("debian", name="played") as sandbox:
        sandbox.exec("echo before > /srv/file")
        saved = sandbox.checkpoint()
        sandbox.exec("echo after > /srv/file")
        sandbox.kill()
        with closing(RetainedLedger(run / "rollout")) as ledger:
            row = RetainedRow("p000001", 0, 0, sandbox.id, time.time(), 0)
            ledger.add(row, [Visit(turn=1, at=2, checkpoint=saved.id, state=b"")])
        with shown(run, str(site.daemon.socket)) as address, opened(browser, address) as page:
            page.get_by_role("link", name="Run", exact=True).click()
            page.get_by_role("link", name="p000001/0: completed, reward 0").click()
            page.get_by_label("Turn 1").get_by_role("button", name="Go on from here").click()
            page.wait_for_url(lambda url: "/terminal" in url)
            child = site.host.get(page.url.partition("#/s/")[2].partition("/")[0])
            assert child.id != sandbox.id and child.exec("cat /srv/file", ends_turn=False).text == "before\n"
            assert child.info.labels == {"run": "run+visit"}
            child.remove()
