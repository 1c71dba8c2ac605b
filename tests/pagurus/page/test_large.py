"""A thousand sandboxes and a tree of ten thousand checkpoints: all can be reached, few are in the document.

The answers are those of `pagurus bench page`, which has the timings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.page import listed, made_up, tree

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.pagurus.page.conftest import Site

FEW = 120  # rows in the document


def test_a_thousand_sandboxes(site: Site, page: Page) -> None:
    page.route("**/v1/sandboxes", made_up(listed(1000)))
    page.route("**/v1/usage", made_up([]))
    page.get_by_text("1000", exact=True).wait_for()
    assert page.locator(".row.sandbox").count() < FEW
    page.get_by_label("Filter").fill("group=g3 box-99")
    page.get_by_text("box-995").wait_for()
    page.unroute_all()


def test_ten_thousand_checkpoints(site: Site, page: Page) -> None:
    (info,) = listed(1)
    checkpoints = tree(info["id"], 10_000)
    page.route(f"**/v1/sandboxes/{info['id']}", made_up({**info, "head": checkpoints[-1]["id"]}))
    page.route(f"**/v1/sandboxes/{info['id']}/checkpoints", made_up(checkpoints))
    page.route(f"**/v1/sandboxes/{info['id']}/turns", made_up([]))
    page.goto(f"{site.url}#/s/{info['id']}/tree")
    page.get_by_text("10000 checkpoints").wait_for()
    page.locator(".row.turn").first.click()
    page.keyboard.press("End")
    last = page.locator(f"[data-checkpoint='{checkpoints[-1]['id']}']")
    last.wait_for()
    assert "head" in last.inner_text() and page.locator(".row.turn").count() < FEW
    page.unroute_all()
