"""What the page costs: the daemon of a busy host, and a browser that shows large lists.

::

    pagurus bench page [--json] [--sandboxes 200] [--pages 10] [--seconds 20] [--listed 1000] [--checkpoints 10000]

The daemon's part: a daemon of its own with sandboxes that each start a program every second. Its processor time is read
over some seconds without pages, and over as many with pages open, which ask what the list of sandboxes asks: for the
sandboxes every two seconds, for what they use every four.

`daemon_idle_core_percent`: of one core, without pages. `daemon_pages_core_percent`: what the pages add.

The browser's part, where Chromium and Playwright are (`make setup-browser`; absent otherwise): the answers are made up,
as a thousand sandboxes and a tree of ten thousand checkpoints take long to make. Milliseconds are the browser's own.

`list_paint_ms`, `tree_paint_ms`: from opening the address until the rows are there. `list_longest_task_ms`,
`tree_longest_task_ms`: the longest that the page did not answer for while it was scrolled from end to end; 0 is below
the 50 ms from which browsers count. `rows_in_document`: of the tree, while all of it can be scrolled to.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from bench.harness import aftermath, command
from bench.harness.own_daemon import IMAGE, BenchHost, image
from sandbox import Client
from sandbox.messages.tokens import NewToken, TokenRequest
from trainer.machine import processor

PORTS = 10_000  # one of those from here on, which the kernel gives to no caller
INTERVAL = 2.0  # seconds between two questions of a page
AT_ONCE = 8  # sandboxes being made
BUSY = "while :; do sleep 1; done"
VERDICTS = ("none", "files", "processes", "both")
_LONGEST = """() => { window.longest = 0; new PerformanceObserver(list => {
  for (const item of list.getEntries()) window.longest = Math.max(window.longest, item.duration);
}).observe({ type: "longtask" }); }"""
_SCROLL = """async () => { const at = document.querySelector(".rows");
  for (let step = 0; step <= 120; step += 1) {
    at.scrollTop = (at.scrollHeight - at.clientHeight) * step / 120;
    await new Promise(requestAnimationFrame);
  }
  await new Promise(done => setTimeout(done, 300));
  return Math.round(window.longest); }"""


def listed(count: int) -> list[dict[str, Any]]:
    """So many sandboxes, as the API tells of them."""
    now = time.time()
    return [
        {
            "id": f"s-{number:010x}",
            "image": IMAGE,
            "state": "running",
            "created_at": now - number,
            "name": f"box-{number}",
            "turn": number % 50,
            "labels": {"group": f"g{number % 16}"},
        }
        for number in range(count)
    ]


def tree(sandbox: str, count: int) -> list[dict[str, Any]]:
    """A tree of so many checkpoints: mostly one after another, now and then a branch."""
    drawn, now = random.Random(7), time.time()
    names: list[str] = []
    result = []
    for number in range(count):
        parent = None
        if names:
            parent = names[-1] if drawn.random() < 0.9 else names[-1 - drawn.randrange(min(len(names), 200))]
        names.append(f"c-{number:012x}")
        checkpoint: dict[str, Any] = {
            "id": names[-1],
            "sandbox": sandbox,
            "state": "durable",
            "verdict": VERDICTS[number % 4],
        }
        checkpoint |= {"created_at": now - count + number, "frozen_ms": 8.0, "total_ms": 16.0, "stored_bytes": 20_000}
        result.append(checkpoint | ({} if parent is None else {"parent": parent}))
    return result


# --------------------------------------------------------------------------- the daemon


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _open_page(session: aiohttp.ClientSession, token: str) -> None:
    """What an open list of sandboxes asks, until it is closed."""
    headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
    for number in itertools.count():
        for path in ("/v1/sandboxes", "/v1/usage") if number % 2 == 0 else ("/v1/sandboxes",):
            async with session.get(path, headers=headers) as answer:
                await answer.read()
        await asyncio.sleep(INTERVAL)


async def _share(pid: int, seconds: float) -> float:
    """Of a core, in percent, that a process takes over some seconds."""
    before, began = _processor_seconds(pid), time.monotonic()
    await asyncio.sleep(seconds)
    return 100 * (_processor_seconds(pid) - before) / (time.monotonic() - began)


async def _make(host: Client, count: int) -> None:
    slots = asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        async with slots:
            made = await host.create(IMAGE)
            await made.processes.start(BUSY, ends_turn=False)

    await asyncio.gather(*(one() for _ in range(count)))


async def daemon_part(bench: BenchHost, url: str, options: argparse.Namespace) -> dict[str, Any]:
    async with bench.client() as host:
        made = await host.call("POST", "/v1/tokens", NewToken, TokenRequest(name="bench", scope="admin"))
        await _make(host, options.sandboxes)
    assert bench.process is not None
    idle = await _share(bench.process.pid, options.seconds)
    async with aiohttp.ClientSession(url) as session:
        pages = [asyncio.ensure_future(_open_page(session, made.text)) for _ in range(options.pages)]
        await asyncio.sleep(INTERVAL)
        open_ = await _share(bench.process.pid, options.seconds)
        for page in pages:
            page.cancel()
        await asyncio.gather(*pages, return_exceptions=True)
    return {
        "daemon_idle_core_percent": round(idle, 2),
        "daemon_pages_core_percent": round(open_ - idle, 2),
        "token": made.text,
    }


# --------------------------------------------------------------------------- the browser


def browser_part(url: str, token: str, options: argparse.Namespace) -> dict[str, Any]:
    """What large lists cost a browser; nothing where there is none."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        return {}
    if (program := shutil.which("chromium")) is None:
        return {}
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        try:
            return _shown(browser, url, token, options)
        finally:
            browser.close()


def made_up(value: object) -> Callable[[Any], None]:
    """Answers a request of the browser with this value."""
    text = json.dumps(value)
    return lambda route: route.fulfill(body=text, content_type="application/json")


def _shown(browser: Any, url: str, token: str, options: argparse.Namespace) -> dict[str, Any]:
    page = browser.new_page(viewport={"width": 1300, "height": 850})
    page.goto(url)
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("heading", name="Sandboxes").wait_for()
    sandboxes = listed(options.listed)
    checkpoints = tree(sandboxes[0]["id"], options.checkpoints)
    info = {**sandboxes[0], "head": checkpoints[-1]["id"]}
    answers = {
        "**/v1/sandboxes": sandboxes,
        "**/v1/usage": [{"sandbox": item["id"], "cpu_seconds": 1.0, "memory_bytes": 1 << 20} for item in sandboxes],
        f"**/v1/sandboxes/{info['id']}": info,
        f"**/v1/sandboxes/{info['id']}/checkpoints": checkpoints,
        f"**/v1/sandboxes/{info['id']}/turns": [],
    }
    for pattern, value in answers.items():
        page.route(pattern, made_up(value))
    figures: dict[str, Any] = {}
    for name, place, row in (("list", "#/", ".row.sandbox"), ("tree", f"#/s/{info['id']}/tree", ".row.turn")):
        page.goto("about:blank")
        page.goto(url + place)
        page.locator(row).first.wait_for()
        figures[f"{name}_paint_ms"] = round(page.evaluate("performance.now()"))
        page.evaluate(_LONGEST)
        figures[f"{name}_longest_task_ms"] = page.evaluate(_SCROLL)
    figures["rows_in_document"] = page.locator(".row.turn").count()
    return figures


def main(argv: list[str] | None = None) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--sandboxes", type=int, default=200, help="of the daemon, each of them busy")
    parser.add_argument("--pages", type=int, default=10, help="open at the same time")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement of the daemon")
    parser.add_argument("--listed", type=int, default=1000, help="sandboxes that the browser shows")
    parser.add_argument("--checkpoints", type=int, default=10_000, help="of the tree that it shows")
    options = parser.parse_args(argv)
    figures: dict[str, Any] = {"cpu": processor(), "load": [round(os.getloadavg()[0], 1)]}
    figures |= {"sandboxes": options.sandboxes, "pages": options.pages}
    with aftermath.TemporaryDirectory("pagurus-page-", "/var/tmp") as directory:
        bench, port = BenchHost(Path(directory) / "host", image("debian")), PORTS + os.getpid() % PORTS
        try:
            bench.start("--listen", f"127.0.0.1:{port}", "--plain")
            url = f"http://127.0.0.1:{port}/"
            figures |= asyncio.run(daemon_part(bench, url, options))
            figures |= browser_part(url, figures.pop("token"), options)
        finally:
            bench.clean()
    figures["load"].append(round(os.getloadavg()[0], 1))
    command.show(figures, options)
    return 0
