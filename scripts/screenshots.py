"""The pictures of the page in README and docs: ``python scripts/screenshots.py [--again] [--run RUN]``.

Nothing is drawn by hand: Chromium opens the page of a daemon of its own, over sandboxes that this script has lived
through, and over a run of a few steps that `pagurus train` has recorded there.

Where the page, Chromium, Playwright or root is missing, it says so, and the committed pictures stay; without torch,
those of a run do.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bench.harness.own_daemon import BenchHost, image
from sandbox import paths
from sandbox.sync import Client, Sandbox

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
MADE_FROM = PICTURES / ".made-from"
FRONT = ROOT / "pagurus" / "page" / "front"
MAX_BYTES = 200_000  # of a picture
RECORDED = ["--steps=3", "--groups=3", "--size=4", "--held-out=1", "--faults=2", "--seed=0", "--fresh"]
WIDE, PHONE = {"width": 1280, "height": 760}, {"width": 390, "height": 760}

PARSER = """def parse(line):
    name, value = line.split("=")
    return name, value
"""
TEST = """from parse import parse
assert parse("port = 8080") == ("port", "8080"), parse("port = 8080")
print("1 passed")
"""
FIXED = """def parse(line):
    name, _, value = line.partition("=")
    return name.strip(), value.strip()
"""


def fingerprint() -> str:
    """Of the page's sources and of this file."""
    total = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted((FRONT / "src").rglob("*")):
        if path.is_file() and path.name != "schema.ts":
            total.update(path.relative_to(FRONT).as_posix().encode() + b"\0" + path.read_bytes())
    return total.hexdigest()


def missing() -> str:
    """What keeps pictures from being made here; "" when nothing does."""
    if os.geteuid() != 0:
        return "a daemon needs root"
    if not (paths.page() / "index.html").exists():
        return "the page is not built (`make setup` with node)"
    if shutil.which("chromium") is None or importlib.util.find_spec("playwright") is None:
        return "there is no Chromium or no Playwright (`make setup-browser`)"
    return ""


# --------------------------------------------------------------------------- what they show


def live_through(host: Client) -> Sandbox:
    """A sandbox whose agent took a wrong way, went back, and found another one."""
    sandbox = host.create("debian", name="fix-the-parser", labels={"task": "parser", "agent": "demo"})
    sandbox.exec("mkdir /srv/app", ends_turn=False)
    sandbox.files.write("/srv/app/parse.py", PARSER)
    sandbox.files.write("/srv/app/test.py", TEST)
    for command in ("ls -l /srv/app", "cat /srv/app/parse.py", "cd /srv/app && python3 test.py"):
        sandbox.exec(command)
    sandbox.exec("cd /srv && (setsid python3 -m http.server -b 127.0.0.1 8000 >/srv/log 2>&1 &) && sleep 1")
    before = sandbox.checkpoint("before the fix")
    sandbox.exec("sed -i 's/split(\"=\")/split()/' /srv/app/parse.py && rm -r /srv/app/test.py")
    sandbox.exec("cd /srv/app && python3 -c 'import parse; print(parse.parse(\"a = b\"))'")
    sandbox.restore(before)
    sandbox.files.write("/srv/app/parse.py", FIXED)
    sandbox.exec("cd /srv/app && python3 test.py | tee result")
    sandbox.exec("curl -s 127.0.0.1:8000/app/result || cat /srv/app/result")
    sandbox.checkpoint("the test passes")
    for number, child in enumerate(sandbox.fork(2)):
        child.sandbox.exec(f"echo {number} > /srv/app/try")
    return sandbox


# --------------------------------------------------------------------------- pictures


def take(page: Page, name: str) -> None:
    page.wait_for_timeout(500)  # curves are drawn, notices have moved in
    file = PICTURES / f"{name}.png"
    page.screenshot(path=file)
    if (size := file.stat().st_size) > MAX_BYTES:
        raise SystemExit(f"screenshots: {file} has {size} bytes, at most {MAX_BYTES} are wanted: show less")
    print(f"{file.relative_to(ROOT)} {file.stat().st_size >> 10} KiB")


def record(bench: BenchHost, directory: Path) -> Path | None:
    """A run of a few steps in sandboxes of this host; None where training is not installed."""
    if importlib.util.find_spec("torch") is None:
        print("screenshots: no torch here (`make setup-train`); pictures of a run stay as they are")
        return None
    print("screenshots: record a run of a few steps", flush=True)
    command = [sys.executable, "-m", "pagurus", "train", str(ROOT / "examples" / "fix_the_service"), *RECORDED]
    done = subprocess.run(command, cwd=directory, env=environment(bench), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"screenshots: the run failed: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    return directory / "runs" / "latest"


def environment(bench: BenchHost) -> dict[str, str]:
    return {**os.environ, "PAGURUS_RUN": str(bench.run), "PYTHONPATH": str(ROOT)}


@contextlib.contextmanager
def viewing(bench: BenchHost, *run: str) -> Iterator[str]:
    """The address that `pagurus view` prints."""
    command = [sys.executable, "-m", "pagurus", "view", *run]
    with subprocess.Popen(command, cwd=ROOT, env=environment(bench), stdout=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(600, process.terminate)
        timer.start()
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            timer.cancel()
            process.terminate()


def of_sandboxes(browser: Browser, bench: BenchHost, sandbox: Sandbox) -> None:
    with viewing(bench) as address:
        page = browser.new_page(viewport=WIDE, color_scheme="light")
        page.goto(address)
        page.locator(".row.sandbox").nth(2).wait_for()
        url = page.url.partition("#")[0]
        page.goto(f"{url}#/s/{sandbox.id}/tree")
        page.locator(".row.turn", has_text="sed -i").click()
        page.get_by_role("button", name="Diff to its parent").click()
        page.get_by_test_id("changes").get_by_role("button", name="/srv/app/parse.py").click()
        page.get_by_test_id("patch").scroll_into_view_if_needed()
        take(page, "tree")
        state = page.context.storage_state()
        page.goto(f"{url}#/s/{sandbox.id}/terminal")
        page.get_by_role("button", name="New terminal").click()
        page.get_by_text("connected", exact=True).wait_for()
        page.keyboard.type("cd /srv/app && ls && python3 test.py\n")
        page.locator(".xterm-rows").get_by_text("1 passed").wait_for()
        dark = browser.new_context(viewport=PHONE, color_scheme="dark", storage_state=state).new_page()
        dark.goto(f"{url}#/s/{sandbox.id}/tree")
        dark.locator(".row.turn").nth(3).wait_for()
        take(dark, "phone")
        dark.context.close()
        page.close()


def of_run(browser: Browser, bench: BenchHost, run: Path) -> None:
    with viewing(bench, str(run)) as address:
        page = browser.new_page(viewport=WIDE, color_scheme="dark")
        page.goto(address)
        page.get_by_role("link", name="Run", exact=True).click()
        page.locator(".chart canvas").first.wait_for()
        page.locator("a.cell").first.wait_for()
        take(page, "run")
        page.locator("a.cell.pass, a.cell").first.click()
        page.locator(".tokens i.trained").first.wait_for()
        take(page, "trajectory")
        page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--again", action="store_true", help="also where the page is as it was")
    parser.add_argument("--run", type=Path, help="a run directory to show, such as runs/latest, instead of a new one")
    options = parser.parse_args()
    if MADE_FROM.exists() and MADE_FROM.read_text().strip() == fingerprint() and not options.again:
        print("screenshots: made from this page already")
        return
    if reason := missing():
        print(f"screenshots: {reason}; those of docs/pictures stay as they are")
        return
    PICTURES.mkdir(exist_ok=True)
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory(prefix="pagurus-pictures-", dir="/var/tmp") as directory:
        bench = BenchHost(Path(directory) / "host", None)
        (bench.state / "images").mkdir(parents=True)
        (bench.state / "images" / "debian").symlink_to(image("debian").resolve())
        try:
            bench.start()
            with sync_playwright() as started, Client(bench.socket, timeout=120.0) as host:
                browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
                of_sandboxes(browser, bench, live_through(host))
                if (run := options.run or record(bench, Path(directory))) is not None:
                    of_run(browser, bench, run)
                browser.close()
        finally:
            bench.clean()
    MADE_FROM.write_text(fingerprint() + "\n")


if __name__ == "__main__":
    main()
