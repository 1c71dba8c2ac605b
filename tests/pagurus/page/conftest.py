"""A real Chromium before a real daemon."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sandbox import paths
from sandbox.messages.tokens import NewToken, TokenRequest
from sandbox.sync import Client
from tests.support.daemon_host import Daemon, free_port, missing

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

CHROMIUM = shutil.which("chromium")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]  # as root, without a screen, in a container

# Serves a page on port 8123, which says by its title that its script runs. It asks no resolver, as http.server does.
WEB = """exec python3 -c 'import socket
server = socket.create_server(("127.0.0.1", 8123))
while True:
    client, _ = server.accept()
    client.recv(65536)
    head = b"HTTP/1.1 200 OK\\r\\nContent-Type: text/html\\r\\nConnection: close\\r\\n\\r\\n"
    client.sendall(head + b"<title>inside</title><script>document.title += \\" runs\\"</script>")
    client.close()'"""


def absent() -> str:
    """What keeps a browser from the page here; "" when nothing does."""
    if reason := missing():
        return reason
    if not (paths.page() / "index.html").exists():
        return "the page is not built; install node and run `make setup`"
    try:
        import playwright  # noqa: F401
    except ModuleNotFoundError:
        return "no playwright here; run `make setup-browser`"
    return "" if CHROMIUM else "no chromium here; run `make setup-browser`"


@contextlib.contextmanager
def launched() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield opened
        opened.close()


def complained(message: Any) -> bool:
    """Whether what the browser says is of a fault. That something is gone is none."""
    gone = ("responded with a status of 4", "Unexpected response code: 4")
    return message.type == "error" and not any(text in message.text for text in gone)


@dataclass
class Site:
    """A daemon that serves the page, and a client of it."""

    daemon: Daemon
    url: str
    host: Client
    broken: list[str] = field(default_factory=list)  # what pages complained of

    def token(self, scope: str, name: str = "page", owner: str | None = None) -> NewToken:
        wish = TokenRequest(name=name, scope=scope, owner=owner)  # type: ignore[arg-type]
        made: NewToken = self.host.call("POST", "/v1/tokens", NewToken, wish)
        return made

    def open(self, browser: Browser, token: str | None, heading: str = "Sandboxes", **options: Any) -> Page:
        """A page of a browser of its own, logged in with this token, which is led to this heading."""
        context: BrowserContext = browser.new_context(**options)
        context.set_default_timeout(60_000)
        page = context.new_page()
        page.on("pageerror", lambda error: self.broken.append(str(error)))
        page.on("console", self._said)
        page.on("dialog", lambda dialog: self.broken.append(f"dialog {dialog.message}"))
        page.on("request", self._outside)
        page.goto(self.url)
        if token is not None:
            page.get_by_label("Token").fill(token)
            page.get_by_role("button", name="Log in").click()
            page.get_by_role("heading", name=heading).wait_for()
        return page

    def _said(self, message: Any) -> None:
        if complained(message):
            self.broken.append(message.text)

    def _outside(self, request: Any) -> None:
        if not request.url.startswith((self.url, "blob:", "data:")):
            self.broken.append(f"asked {request.url}")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if reason := absent():
        pytest.skip(reason)
    daemon, address = Daemon(Path(tmp_path_factory.mktemp("host"))), f"127.0.0.1:{free_port()}"
    try:
        daemon.start("--listen", address, "--plain")
        with Client(daemon.socket, timeout=120.0) as host:
            yield Site(daemon, f"http://{address}/", host)
    finally:
        daemon.clean()


@pytest.fixture(scope="module")
def browser(site: Site) -> Iterator[Browser]:
    with launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def opened(site: Site, browser: Browser) -> Iterator[Page]:
    made = site.open(browser, site.token("admin").text)
    yield made
    made.context.close()


@pytest.fixture
def page(site: Site, opened: Page) -> Iterator[Page]:
    """A page for an administrator. Nothing on it may go wrong."""
    opened.goto(f"{site.url}#/")
    yield opened
    broken, site.broken[:] = site.broken[:], []
    assert broken == []
