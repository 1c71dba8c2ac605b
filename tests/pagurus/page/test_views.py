"""What people do on the page, in a real Chromium before a real daemon."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sandbox.errors import Invalid
from sandbox.sync import Client, Sandbox
from tests.pagurus.page.conftest import WEB

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

    from tests.pagurus.page.conftest import Site


@pytest.fixture(scope="module")
def grown(site: Site) -> Iterator[Sandbox]:
    """A sandbox with a small tree: a turn, a named checkpoint, a branch, and the head on another one."""
    with site.host.create("debian", name="grown", labels={"team": "crabs"}) as sandbox:
        sandbox.exec("echo one > /srv/file")
        before = sandbox.checkpoint("before")
        sandbox.exec("echo two > /srv/file; echo more > /srv/other")
        sandbox.restore(before)
        sandbox.exec("echo three > /srv/third")
        yield sandbox


def visit(page: Page, site: Site, sandbox: Sandbox, tab: str) -> None:
    page.goto(f"{site.url}#/s/{sandbox.id}/{tab}")


def row_of(page: Page, text: str) -> Locator:
    return page.locator(".row.turn", has_text=text).first


def test_sandboxes_are_listed_and_filtered(site: Site, page: Page, grown: Sandbox) -> None:
    with site.host.create("debian", name="other"):
        page.get_by_role("link", name="other").wait_for()
        page.get_by_label("Filter").fill("team=crabs")
        page.get_by_text("1 of 2").wait_for()
        row = page.locator(".row.sandbox")
        assert row.count() == 1 and grown.id in row.inner_text() and "running" in row.inner_text()
        page.get_by_label("Filter").fill("")
    page.get_by_role("link", name="other").wait_for(state="detached")  # live: it has been removed


def test_a_sandbox_is_made_and_removed(site: Site, page: Page) -> None:
    page.get_by_role("button", name="New sandbox").click()
    page.get_by_label("Name", exact=True).fill("fresh")
    page.get_by_role("button", name="Start").click()
    page.get_by_role("link", name="fresh").click()
    page.get_by_role("button", name="Remove…").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    page.get_by_role("heading", name="Sandboxes").wait_for()
    assert not [item for item in site.host.sandboxes() if item.name == "fresh"]


def test_a_click_restores_and_forks(site: Site, page: Page) -> None:
    with site.host.create("debian", name="turns") as sandbox:
        sandbox.exec("echo one > /srv/file")
        sandbox.exec("rm /srv/file")
        visit(page, site, sandbox, "tree")
        row_of(page, "echo one").click()
        panel = page.get_by_label("Checkpoint", exact=True)
        panel.get_by_role("button", name="Diff to now").click()
        page.get_by_test_id("changes").get_by_role("button", name="/srv/file").click()
        page.get_by_test_id("patch").get_by_text("-one").wait_for()
        panel.get_by_label("compare").check()
        panel.get_by_role("button", name="Restore").click()
        page.get_by_text("compared equal").first.wait_for()
        assert sandbox.exec("cat /srv/file", ends_turn=False).text == "one\n"
        panel.get_by_label("Name of the checkpoint").fill("good")
        panel.get_by_role("button", name="Name").click()
        row_of(page, "good").wait_for()
        panel.get_by_role("button", name="Fork").click()
        page.wait_for_url(lambda url: "#/s/" in url and sandbox.id not in url)
        fork = site.host.get(page.url.partition("#/s/")[2])
        assert fork.exec("cat /srv/file", ends_turn=False).text == "one\n"
        fork.remove()


def test_what_a_turn_changed_is_shown_line_by_line(site: Site, page: Page, grown: Sandbox) -> None:
    visit(page, site, grown, "tree")
    row_of(page, "echo two").click()
    panel = page.get_by_label("Checkpoint", exact=True)
    panel.get_by_role("button", name="Diff to its parent").click()
    changes = page.get_by_test_id("changes")
    changes.get_by_text("/srv/other").wait_for()  # what came after does not count
    assert changes.get_by_text("/srv/third").count() == 0
    changes.get_by_role("button", name="/srv/file").click()
    patch = page.get_by_test_id("patch")
    assert patch.locator(".minus").all_inner_texts() == ["-one"] and patch.locator(".plus").all_inner_texts() == [
        "+two"
    ]


def test_the_tree_is_walked_by_keys(site: Site, page: Page, grown: Sandbox) -> None:
    visit(page, site, grown, "tree")
    row_of(page, "echo one").click()
    page.keyboard.press("ArrowDown")
    assert "before" in page.locator(".row.turn.chosen").inner_text()
    page.keyboard.press("ArrowUp")
    assert "echo one" in page.locator(".row.turn.chosen").inner_text()
    assert "head" in row_of(page, "echo three").inner_text() and "files" in row_of(page, "echo two").inner_text()


def test_a_terminal_survives_a_restore(site: Site, page: Page) -> None:
    with site.host.create("debian", name="seat") as sandbox:
        visit(page, site, sandbox, "terminal")
        page.get_by_role("button", name="New terminal").click()
        page.get_by_text("connected", exact=True).wait_for()
        screen = page.locator(".xterm-rows")
        page.keyboard.type("cd /srv; name=before\n")
        page.keyboard.type("echo $name-$((40+2))\n")
        screen.get_by_text("before-42").wait_for()
        saved = sandbox.checkpoint("at the terminal")
        page.keyboard.type("name=after; echo $name-$((40+3))\n")
        screen.get_by_text("after-43").wait_for()
        sandbox.restore(saved)
        page.keyboard.type("echo again-$name-$PWD\n")
        screen.get_by_text("again-before-/srv").wait_for()


def test_files_are_edited_uploaded_and_saved(site: Site, page: Page, grown: Sandbox) -> None:
    visit(page, site, grown, "files")
    page.get_by_label("Path").fill("/srv")
    page.get_by_label("Path").press("Enter")
    page.get_by_role("button", name="third").click()
    page.get_by_label("Content").fill("edited\n")
    page.get_by_role("button", name="Save").click()
    page.get_by_text("Written.").wait_for()
    assert bytes(grown.files.read("/srv/third")) == b"edited\n"
    page.get_by_role("button", name="Back").click()
    upload = {"name": "new.bin", "mimeType": "text/html", "buffer": bytes(range(256))}
    page.locator("input[type=file]").set_input_files([upload])  # type: ignore[list-item]
    page.get_by_role("button", name="new.bin").wait_for()
    with page.expect_download() as saved:
        page.locator("tr", has_text="new.bin").get_by_role("button", name="Download").click()
    assert saved.value.path().read_bytes() == bytes(range(256))


def test_processes_and_their_logs(site: Site, page: Page, grown: Sandbox) -> None:
    visit(page, site, grown, "processes")
    page.get_by_label("Command").fill("echo a line; exec sleep 1000")
    page.get_by_role("button", name="Start").click()
    page.get_by_test_id("log").get_by_text("a line").wait_for()
    page.get_by_role("button", name="KILL", exact=True).click()
    page.get_by_role("cell", name="exited 137").wait_for()


def test_a_port_is_a_link(site: Site, page: Page) -> None:
    with site.host.create("debian", name="web") as sandbox:
        sandbox.processes.start(WEB)
        visit(page, site, sandbox, "network")
        with page.context.expect_page() as opened:
            page.get_by_test_id("port").get_by_role("link", name="8123").click()
        other = opened.value
        other.wait_for_function("document.title == 'inside runs'")
        name = f"8123-{sandbox.id.replace('-', '')}.localhost"
        assert other.url == f"http://{name}:{site.url.rpartition(':')[2]}"  # nothing of the ticket is left
        assert other.evaluate("document.cookie") == "" and other.evaluate("window.opener") is None
        other.close()


def test_ports_network_and_limits(site: Site, page: Page, grown: Sandbox) -> None:
    visit(page, site, grown, "network")
    page.get_by_label("Policy").select_option("open")
    page.get_by_role("button", name="Apply").click()
    page.get_by_text("The policy holds").wait_for()
    assert grown.network.status().network.mode == "open"
    visit(page, site, grown, "limits")
    page.get_by_text("of 1.0 GiB").wait_for()


def test_tokens_are_made_and_revoked(site: Site, page: Page, browser: Browser) -> None:
    page.get_by_role("link", name="Tokens").click()
    page.get_by_label("Name").fill("visitor")
    page.get_by_label("Scope").select_option("read")
    page.get_by_role("button", name="Create").click()
    text = page.locator(".notice pre").inner_text()
    visitor = site.open(browser, text)
    page.locator("tr", has_text="visitor").get_by_role("button", name="Revoke").click()
    visitor.get_by_label("Token").wait_for()  # its next question was refused: logged out
    visitor.context.close()


def test_who_may_only_read_acts_on_nothing(site: Site, browser: Browser, grown: Sandbox) -> None:
    page = site.open(browser, None)
    page.get_by_label("Token").fill("pgr_no_such")
    page.get_by_role("button", name="Log in").click()
    page.get_by_text("not valid").wait_for()
    page.get_by_label("Token").fill(site.token("read").text)
    page.get_by_role("button", name="Log in").click()
    page.get_by_text("read-only").wait_for()
    assert page.get_by_role("button", name="New sandbox").count() == 0
    assert page.get_by_role("link", name="Tokens").count() == 0
    page.context.close()
    assert site.broken == []


ACTS = (
    *("Restore", "Fork", "Name", "Remove", "Remove…", "Kill…", "Delete…", "Checkpoint now", "New terminal", "Start"),
    *("TERM", "KILL", "Save", "Apply", "End in so many minutes", "Do not end"),
)


POSTED = """path => fetch(path, {
  method: "POST", headers: { "X-Pagurus-Page": localStorage.getItem("pagurus.key") },
}).then(answer => answer.status)"""


def test_who_may_only_read_sees_all_of_its_owner_and_no_button_acts(site: Site, browser: Browser) -> None:
    acting, reading = (site.token(scope, owner="crew").text for scope in ("exec", "read"))
    with Client(site.url.rstrip("/"), token=acting) as crew, crew.create("debian", name="watched") as sandbox:
        sandbox.exec("echo one > /srv/file")
        sandbox.processes.start("exec sleep 1000")
        page = site.open(browser, reading)
        page.get_by_role("link", name="watched").wait_for()
        for tab in ("tree", "terminal", "processes", "files", "network", "limits"):
            visit(page, site, sandbox, tab)
            page.locator(".tabs [aria-current]").wait_for()
            if tab == "tree":
                row_of(page, "echo one").click()
                page.get_by_role("button", name="Diff to its parent").click()
                page.get_by_test_id("changes").get_by_text("/srv/file").wait_for()
            if tab == "files":
                page.get_by_label("Path").fill("/srv")
                page.get_by_label("Path").press("Enter")
                page.get_by_role("button", name="file", exact=True).click()
                page.get_by_test_id("content").get_by_text("one").wait_for()
            enabled = page.locator("main button:enabled").all_inner_texts()
            assert not set(enabled) & set(ACTS), (tab, enabled)
            assert page.locator("main input[type=file]").count() == 0
        path = f"/v1/sandboxes/{sandbox.id}/kill"  # a button that somebody turned on gets the API's answer
        assert page.evaluate(POSTED, path) == 403
        page.context.close()
    assert site.broken == []


def test_a_file_is_deleted_once_it_was_said_twice(site: Site, page: Page, grown: Sandbox) -> None:
    grown.files.write("/srv/doomed", b"")
    visit(page, site, grown, "files")
    page.get_by_label("Path").fill("/srv")
    page.get_by_label("Path").press("Enter")
    page.locator("tr", has_text="doomed").get_by_role("button", name="Delete…").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    assert bytes(grown.files.read("/srv/doomed")) == b""
    page.locator("tr", has_text="doomed").get_by_role("button", name="Delete…").click()
    page.get_by_role("dialog", name="Delete doomed?").get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="doomed").wait_for(state="detached")


def test_the_host_its_images_and_how_to_connect(site: Site, page: Page) -> None:
    page.get_by_role("link", name="Host").click()
    page.get_by_text("pool of file trees").wait_for()
    page.get_by_role("link", name="Images").click()
    page.get_by_role("cell", name="debian", exact=True).wait_for()
    page.get_by_role("link", name="Connect").click()
    page.get_by_text(f"E2B_API_URL={site.url.rstrip('/')}").wait_for()
    page.get_by_text("claude mcp add pagurus -- pagurus mcp").wait_for()


def test_a_build_is_followed_and_its_log_kept(site: Site, page: Page, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN echo '<b>first</b>'; sleep 4; echo second; exit 3\n")
    failed = threading.Thread(target=_built, args=(site, tmp_path))
    failed.start()
    page.get_by_role("link", name="Images").click()
    row = page.get_by_test_id("builds").get_by_role("row", name="followed")
    row.get_by_role("button").click()
    page.get_by_test_id("log").get_by_text("<b>first</b>").wait_for()
    failed.join()
    page.get_by_test_id("log").get_by_text("second").wait_for()
    row.get_by_text("failed", exact=True).wait_for()
    assert "line 2" in row.inner_text() and page.locator("main pre b").count() == 0


def _built(site: Site, context: Path) -> None:
    with Client(site.daemon.socket, timeout=120.0) as host, pytest.raises(Invalid):
        host.images.build("followed", context, output=lambda line: None)


def test_a_phone_in_the_dark(site: Site, browser: Browser, grown: Sandbox) -> None:
    admin = site.token("admin").text
    page = site.open(browser, admin, viewport={"width": 390, "height": 844}, color_scheme="dark")
    for tab in ("tree", "files", "network", "limits"):
        visit(page, site, grown, tab)
        page.locator(".tabs [aria-current]").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    back = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert back == "rgb(20, 23, 28)"
    page.context.close()
    assert site.broken == []
