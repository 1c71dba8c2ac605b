"""All views, with a sandbox that has lived and a run: on a narrow screen, light and dark, and by keys alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sandbox.sync import Sandbox
from tests.pagurus.page import looks
from tests.pagurus.page.conftest import WEB, absent
from tests.pagurus.page.test_run import fail, make_run, opened, shown

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from tests.pagurus.page.conftest import Site

pytestmark = pytest.mark.skipif(bool(absent()), reason=absent())
NARROW = {"width": 390, "height": 844}

# Of each view: its address, and what is there once it is complete.
VIEWS: dict[str, tuple[str, Callable[[Page], None]]] = {
    "sandboxes": ("", lambda page: page.locator(".row.sandbox .memory .bar").first.wait_for()),
    "tree": ("s/{id}/tree", lambda page: _compared(page)),
    "terminal": ("s/{id}/terminal", lambda page: page.get_by_role("button", name="New terminal").wait_for()),
    "processes": ("s/{id}/processes", lambda page: page.locator("td button").first.click()),
    "files": ("s/{id}/files", lambda page: page.get_by_role("button", name="srv").wait_for()),
    "network": ("s/{id}/network", lambda page: page.get_by_test_id("port").first.wait_for()),
    "conversation": ("s/{id}/conversation", lambda page: page.get_by_text("Nothing was").wait_for()),
    "limits": ("s/{id}/limits", lambda page: page.get_by_text("of 1.0 GiB").wait_for()),
    "images": ("images", lambda page: page.get_by_role("cell", name="debian", exact=True).wait_for()),
    "host": ("host", lambda page: page.get_by_text("pool of file trees").wait_for()),
    "tokens": ("tokens", lambda page: page.get_by_role("cell", name="visitor").first.wait_for()),
    "connect": ("connect", lambda page: page.get_by_text("claude mcp add").wait_for()),
    "run": ("run", lambda page: _charted(page)),
    "time": ("run/time", lambda page: page.get_by_role("cell", name="command").first.wait_for()),
    "waits": ("run/waits", lambda page: page.get_by_role("cell", name="p000009/0").wait_for()),
    "trajectory": ("run/p000001/1", lambda page: page.get_by_test_id("tokens").locator("i").first.click()),
    "two": ("run/p000001/0/p000001/1", lambda page: page.get_by_test_id("together").wait_for()),
}


def _compared(page: Page) -> None:
    page.locator(".row.turn", has_text="echo two").first.click()
    page.get_by_role("button", name="Diff to its parent").click()
    page.get_by_test_id("changes").get_by_role("button", name="/srv/file").click()
    page.get_by_test_id("patch").wait_for()


def _charted(page: Page) -> None:
    page.locator(".chart canvas").first.wait_for()
    page.get_by_role("group", name="p000002").wait_for()


@pytest.fixture(scope="module")
def grown(site: Site) -> Iterator[Sandbox]:
    site.token("read", name="visitor " + "w" * 80)
    labels = {"team": "crabs", "long": "l" * 60}
    with site.host.create("debian", name="n" * 60, labels=labels) as sandbox:
        sandbox.exec("echo one > /srv/file")
        sandbox.exec("echo two > /srv/file; : " + "x" * 300)
        sandbox.processes.start("echo " + "y" * 200 + "; exec sleep 1000")
        sandbox.processes.start(WEB)
        yield sandbox


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_run(tmp_path_factory.mktemp("run"))
    fail(made)
    return made


class Tour:
    """A page that goes through all views."""

    def __init__(self, page: Page) -> None:
        self.page, self.url = page, page.url.partition("#")[0]

    def views(self, sandbox: Sandbox) -> Iterator[str]:
        """The name of each view, once it is complete."""
        for name, (path, complete) in VIEWS.items():
            self.page.goto(f"{self.url}#/{path.format(id=sandbox.id)}")
            complete(self.page)
            yield name


@contextmanager
def touring(site: Site, run: Path, browser: Browser, **options: object) -> Iterator[Tour]:
    with shown(run, str(site.daemon.socket)) as address, opened(browser, address, **options) as page:
        page.get_by_role("heading", name="Sandboxes").wait_for()
        yield Tour(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_fits_a_narrow_screen_and_can_be_read(
    site: Site, run: Path, browser: Browser, grown: Sandbox, scheme: str
) -> None:
    found: dict[str, list[str]] = {}
    with touring(site, run, browser, viewport=NARROW, color_scheme=scheme) as tour:
        for name in tour.views(grown):
            found[name] = looks.wide(tour.page) + looks.pale(tour.page)
    assert not any(found.values()), "\n".join(f"{name}: {item}" for name, items in found.items() for item in items)


def test_keys_reach_every_action(site: Site, run: Path, browser: Browser, grown: Sandbox) -> None:
    found: dict[str, list[str]] = {}
    with touring(site, run, browser) as tour:
        for name in tour.views(grown):
            found[name] = looks.unreached(tour.page)
    assert not any(found.values()), "\n".join(f"{name}: {item}" for name, items in found.items() for item in items)


def test_keys_alone_restore_a_checkpoint_and_leave_a_terminal(
    site: Site, run: Path, browser: Browser, grown: Sandbox
) -> None:
    with touring(site, run, browser) as tour:
        page, url = tour.page, tour.url
        page.goto(f"{url}#/s/{grown.id}/tree")
        page.get_by_label("Timeline").focus()
        page.keyboard.press("Home")
        page.keyboard.press("ArrowDown")
        page.locator(".row.turn.chosen", has_text="echo one").wait_for()
        page.get_by_role("button", name="Restore").focus()
        page.keyboard.press("Enter")
        page.get_by_text("Restored in").wait_for()
        assert grown.exec("cat /srv/file", ends_turn=False).text == "one\n"
        page.goto(f"{url}#/s/{grown.id}/terminal")
        page.get_by_role("button", name="New terminal").focus()
        page.keyboard.press("Enter")
        page.get_by_text("connected", exact=True).wait_for()
        page.keyboard.type("echo typed-$((1+1))\n")
        page.locator(".xterm-rows").get_by_text("typed-2").wait_for()
        page.keyboard.press("Control+Shift+L")
        assert page.evaluate("document.activeElement.textContent") == "Terminal"
