"""A sandbox whose names, outputs, files and words are made to break out of the page. Nothing of it executes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from sandbox.messages.gateway import Gateway
from sandbox.messages.gateway import Upstream as Address
from sandbox.sync import Sandbox
from tests.support.gateway_upstream import Upstream, chat

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.pagurus.page.conftest import Site

HTML = "<img src=x onerror=\"window.broken='yes'\"><script>window.broken='yes'</script>"
TURNED = "safe\u202etxt.exe"
SHOWN = "safe\\u{202e}txt.exe"
LINK = "\x1b]8;;javascript:window.broken=1\x07link\x1b]8;;\x07"
CONTROLS = f"\x1b]52;c;aGFja2Vk\x07\x1b]0;title\x07{LINK}\x1b[31mred\x1b[0m"
ASK = """exec 3<>/dev/tcp/127.0.0.1/7000; body=$(cat /srv/body)
printf 'POST /v1/chat/completions HTTP/1.0\\r\\nContent-Type: application/json\\r\\nContent-Length: %d\\r\\n\\r\\n%s' \
    "${#body}" "$body" >&3; cat <&3 >/dev/null"""
BODY = '{"model":"m","messages":[{"role":"user","content":"<b>asked<\\/b><script>window.broken=1<\\/script>"}]}'


@contextlib.contextmanager
def answering(text: str) -> Iterator[str]:
    """The address of a model that always says this, in a thread of its own."""
    loop, upstream = asyncio.new_event_loop(), Upstream(lambda body: chat(text))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(upstream.__aenter__(), loop).result(60)
        yield upstream.url
        asyncio.run_coroutine_threadsafe(upstream.__aexit__(None, None, None), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(scope="module")
def hostile(site: Site) -> Iterator[Sandbox]:
    with answering(HTML + TURNED) as url:
        site.host.gateway.put("hostile", Address(url=url))
        labels = {HTML: TURNED, "b": '"><svg/onload=alert(1)>'}
        with site.host.create("debian", name="hostile", labels=labels, gateway=Gateway(upstream="hostile")) as sandbox:
            sandbox.files.write(f"/srv/{TURNED}", HTML)
            sandbox.files.write(f"/srv/{HTML.replace('/', '_')}", CONTROLS + TURNED)
            sandbox.files.write("/srv/body", BODY)
            sandbox.exec(f": '{HTML}' {TURNED}; echo x; cp /srv/*txt.exe /srv/made")
            sandbox.checkpoint(HTML + TURNED)
            sandbox.processes.start(["/bin/sh", "-c", 'printf "%s" "$0"; exec sleep 1000', HTML + TURNED])
            assert sandbox.exec(["/bin/bash", "-c", ASK], ends_turn=False).exit_code == 0
            yield sandbox


def calm(page: Page) -> None:
    """Nothing of it has run, or has become an element."""
    assert page.evaluate("window.broken") is None
    assert page.locator("main img, main script, main svg, main b b").count() == 0
    assert "\u202e" not in page.locator("body").inner_text()


def test_nothing_of_a_hostile_sandbox_executes(site: Site, page: Page, hostile: Sandbox) -> None:
    page.locator(".row.sandbox", has_text=SHOWN).wait_for()
    calm(page)
    page.goto(f"{site.url}#/s/{hostile.id}/tree")
    page.locator(".row.turn", has_text="echo x").click()
    page.get_by_role("button", name="Diff to now").click()
    page.locator(".row.turn", has_text=SHOWN).first.wait_for()
    calm(page)
    page.get_by_role("button", name="Diff to its parent").click()
    page.get_by_test_id("changes").get_by_role("button", name="/srv/made").click()
    page.get_by_test_id("patch").get_by_text(f"+{HTML}").wait_for()
    calm(page)
    page.goto(f"{site.url}#/s/{hostile.id}/processes")
    page.locator("td button", has_text="printf").click()
    page.get_by_test_id("log").get_by_text(SHOWN).wait_for()
    calm(page)
    page.goto(f"{site.url}#/s/{hostile.id}/conversation")
    page.get_by_test_id("exchange").get_by_text(SHOWN).wait_for()
    page.get_by_test_id("exchange").get_by_text("<b>asked</b>").wait_for()
    calm(page)


def test_a_hostile_name_of_a_token_is_text(site: Site, page: Page) -> None:
    site.token("read", name=HTML + TURNED)
    page.goto(f"{site.url}#/tokens")
    page.get_by_role("cell", name=SHOWN).wait_for()
    calm(page)


def test_hostile_files_are_text(site: Site, page: Page, hostile: Sandbox) -> None:
    page.goto(f"{site.url}#/s/{hostile.id}/files")
    page.get_by_label("Path").fill("/srv")
    page.get_by_label("Path").press("Enter")
    page.get_by_role("button", name=SHOWN).click()
    assert page.get_by_label("Content").input_value() == HTML
    calm(page)
    page.get_by_role("button", name="Back").click()
    page.locator("td button", has_text="<img").click()
    content = page.get_by_test_id("content")  # not to be edited: what is shown is not what is there
    content.get_by_text("\\u{1b}]52;c;").wait_for()
    assert SHOWN in content.inner_text()
    calm(page)


def test_a_hostile_terminal_reaches_nothing(site: Site, page: Page, hostile: Sandbox) -> None:
    page.goto(f"{site.url}#/s/{hostile.id}/terminal")
    page.get_by_role("button", name="New terminal").click()
    page.get_by_text("connected", exact=True).wait_for()
    title = page.title()
    page.keyboard.type("cat /srv/*img*; echo; echo done-$((1+1))\n")
    page.locator(".xterm-rows").get_by_text("done-2").wait_for()
    assert page.title() == title and page.evaluate("window.broken") is None
    assert page.locator(".xterm a").count() == 0 and page.locator(".xterm-rows").get_by_text("link").count() > 0
    red = page.locator(".xterm-rows span", has_text="red").first
    assert red.evaluate("item => getComputedStyle(item).color") != page.locator(".xterm-rows").evaluate(
        "item => getComputedStyle(item).color"
    )


def test_what_a_login_could_show_is_no_page(site: Site, page: Page, hostile: Sandbox) -> None:
    """A browser that is led to a file of the sandbox, cookie and all, gets neither the file nor a page."""
    with page.expect_response(lambda answer: "/files?" in answer.url) as told:
        page.evaluate("path => { window.open(path) }", f"/v1/sandboxes/{hostile.id}/files?path=/srv/{TURNED}")
        page.evaluate("path => fetch(path).then(() => 0)", f"/v1/sandboxes/{hostile.id}/files?path=/srv/{TURNED}")
    assert told.value.status == 401 and told.value.headers["x-content-type-options"] == "nosniff"
