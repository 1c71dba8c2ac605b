"""A coordinator serves the page on its own port: hosts, jobs, and the sandboxes of all hosts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from coordinator.jobs.store import JobStore
from sandbox.errors import Invalid
from sandbox.messages.cluster import JobRequest, JobShape, PhaseAnswer, PhaseRequest
from sandbox.sync import Client
from tests.pagurus.page.conftest import WEB, Site, absent, launched
from tests.support.cluster import Cluster, apart
from tests.support.daemon_host import Daemon, free_port

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HTML = "<img src=x onerror=window.broken=1>"


@pytest.fixture(scope="module")
def cluster_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two hosts, a job that was cancelled, and machines that jobs take turns on."""
    if reason := absent():
        pytest.skip(reason)
    root, address = tmp_path_factory.mktemp("cluster"), f"127.0.0.1:{free_port()}"
    (root / "state").mkdir(mode=0o700)
    for owner in ("", "crabs"):
        _cancelled_job(root / "state", root / f"run-{owner}", owner)
    options = ("--listen", address, "--plain", "--share", "rollout=1,train=1")
    cluster, daemons = Cluster(root, *options), [Daemon(tmp_path_factory.mktemp(name)) for name in ("one", "two")]
    try:
        cluster.start()
        for name, daemon in zip(("one", "two"), daemons, strict=True):
            cluster.add(name, apart(daemon).start())
        with Client(cluster.socket, timeout=120.0) as host:
            yield Site(daemons[0], f"http://{address}/", host)
    finally:
        cluster.clean()
        for daemon in daemons:
            daemon.clean()


def _cancelled_job(state: Path, run: Path, owner: str) -> None:
    run.mkdir()
    (run / "run.log").write_text(f"step 1 {HTML}\n")
    store = JobStore(state)
    store.cancel(store.submit(JobRequest(run=str(run), needs={"CPU": 2.0}), owner).id)
    store.close()


@pytest.fixture(scope="module")
def chromium(cluster_site: Site) -> Iterator[Browser]:
    with launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def cluster_page(cluster_site: Site, chromium: Browser) -> Page:
    return cluster_site.open(chromium, cluster_site.token("admin").text)


@pytest.fixture
def page(cluster_site: Site, cluster_page: Page) -> Iterator[Page]:
    cluster_page.goto(f"{cluster_site.url}#/")
    yield cluster_page
    assert cluster_page.evaluate("window.broken") is None
    broken, cluster_site.broken[:] = cluster_site.broken[:], []
    assert broken == []


def test_sandboxes_of_all_hosts_with_their_host(cluster_site: Site, page: Page) -> None:
    with cluster_site.host.create("debian", name="first"), cluster_site.host.create("debian", name="second") as second:
        for name in ("first", "second"):
            page.locator(".row.sandbox", has_text=name).locator(".chip.host").wait_for()
        hosts = page.locator(".row.sandbox .chip.host").all_inner_texts()
        assert sorted(hosts) == ["one", "two"]
        page.locator(".row.sandbox .memory .bar").first.wait_for()
        page.get_by_label("Filter").fill(
            f"host={page.locator('.row.sandbox', has_text='second').locator('.host').inner_text()}"
        )
        page.get_by_text("1 of 2").wait_for()
        page.get_by_role("link", name="second").click()
        page.get_by_label("Host", exact=True).wait_for()
        page.get_by_role("link", name="Terminal").click()
        page.get_by_role("button", name="New terminal").click()
        page.get_by_text("connected", exact=True).wait_for()
        page.keyboard.type("echo over-$((40+2))\n")
        page.locator(".xterm-rows").get_by_text("over-42").wait_for()
        assert second.exec("true", ends_turn=False).exit_code == 0


def test_a_choice_moves_a_sandbox(cluster_site: Site, page: Page) -> None:
    with cluster_site.host.create("debian", name="wanderer") as sandbox:
        sandbox.exec("echo carried > /srv/file")
        page.goto(f"{cluster_site.url}#/s/{sandbox.id}")
        choice = page.get_by_label("Host", exact=True)
        choice.wait_for()
        there = "two" if choice.input_value() == "one" else "one"
        choice.select_option(there)
        page.get_by_text(f"It runs on {there}").wait_for()
        assert sandbox.exec("cat /srv/file", ends_turn=False).text == "carried\n"


def test_the_cookie_alone_reaches_nothing(page: Page) -> None:
    assert page.evaluate("fetch('/v1/cluster/hosts').then(answer => answer.status)") == 401
    assert page.evaluate("fetch('/').then(answer => answer.status)") == 404  # no page for programs


def test_hosts_their_leases_and_room(page: Page) -> None:
    page.get_by_role("link", name="Hosts").click()
    row = page.get_by_role("row", name="two")
    row.get_by_text("alive").wait_for()
    row.get_by_role("button", name="Drain").click()
    row.get_by_text("draining").wait_for()
    row.get_by_role("button", name="Resume").click()
    row.get_by_text("alive").wait_for()
    assert page.get_by_role("row", name="one").get_by_text("free").count() == 1


def test_jobs_their_logs_and_turns(cluster_site: Site, page: Page) -> None:
    shape = JobShape(rollout=10.0, train=10.0)
    for job in ("red", "blue"):
        request = PhaseRequest(job=job, kind="rollout", number=1, shape=shape)
        cluster_site.host.call("POST", "/v1/phases", PhaseAnswer, request)
    page.get_by_role("link", name="Jobs").click()
    row = page.get_by_role("row", name="crabs")
    row.get_by_text("cancelled", exact=True).first.wait_for()
    row.get_by_role("link").click()
    page.get_by_test_id("log").get_by_text(f"step 1 {HTML}").wait_for()
    turns = page.get_by_test_id("turns")
    turns.get_by_role("row", name="red").get_by_text("begun").wait_for()
    waiting = turns.get_by_role("row", name="blue")
    waiting.get_by_text("waiting").wait_for()
    assert len(waiting.locator("td").nth(2).inner_text()) > 5  # why
    page.get_by_label("Group 0: rollout machines").locator("canvas").wait_for()


def test_a_token_of_one_owner_sees_its_own(cluster_site: Site, chromium: Browser) -> None:
    """Of its owner: sandboxes, jobs and their logs. Of hosts, what says nothing of other owners."""
    shape = JobShape(rollout=10.0, train=10.0)
    acting = cluster_site.token("exec", owner="crabs").text
    with Client(cluster_site.url, token=acting) as crab, cluster_site.host.create("debian", name="theirs"):
        crab.call("POST", "/v1/phases", PhaseAnswer, PhaseRequest(job="own", kind="rollout", number=1, shape=shape))
        with crab.create("debian", name="ours"):
            page = cluster_site.open(chromium, cluster_site.token("read", owner="crabs").text)
            page.get_by_text("read-only").wait_for()
            page.locator(".row.sandbox", has_text="ours").locator(".chip.host").wait_for()
            assert page.locator(".row.sandbox").count() == 1
            page.get_by_role("link", name="Hosts").click()
            page.get_by_role("row", name="two").get_by_text("alive").wait_for()
            cells = page.locator("tbody td:nth-child(3)").all_inner_texts()
            assert sorted(cells) == ["0", "1"]
            assert page.get_by_text("free").count() == page.get_by_role("button", name="Drain").count() == 0
            page.get_by_role("link", name="Jobs").click()
            page.get_by_role("row", name="j-").get_by_role("link").click()
            page.get_by_test_id("log").get_by_text(f"step 1 {HTML}").wait_for()
            assert page.get_by_role("row", name="j-").count() == 1
            turns = page.get_by_test_id("turns").locator("tr")
            turns.get_by_text("crabs:own").wait_for()
            assert turns.count() == 1
            for name in ("Tokens", "Host"):
                assert page.get_by_role("link", name=name, exact=True).count() == 0
            page.context.close()
    assert cluster_site.broken == []


def test_a_token_for_totals_sees_hosts_alone(cluster_site: Site, chromium: Browser) -> None:
    page = cluster_site.open(chromium, cluster_site.token("monitor").text, heading="Hosts")
    page.get_by_role("row", name="one").get_by_text("free").wait_for()
    assert page.locator("nav a").all_inner_texts() == ["Hosts", "Connect"]
    page.context.close()
    assert cluster_site.broken == []


def test_a_port_is_a_link_through_the_coordinator(cluster_site: Site, page: Page) -> None:
    with cluster_site.host.create("debian", name="web") as sandbox:
        sandbox.processes.start(WEB)
        page.goto(f"{cluster_site.url}#/s/{sandbox.id}/network")
        with page.context.expect_page() as opened:
            page.get_by_test_id("port").get_by_role("link", name="8123").click()
        other = opened.value
        other.wait_for_function("document.title == 'inside runs'")
        assert other.url.startswith(f"http://8123-{sandbox.id.replace('-', '')}.localhost:")
        other.close()


def test_builds_of_all_hosts_and_their_doctors(cluster_site: Site, page: Page, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM debian\nRUN echo '{HTML}'; exit 3\n")
    with pytest.raises(Invalid):
        cluster_site.host.images.build("followed", tmp_path, output=lambda line: None)
    page.get_by_role("link", name="Images").click()
    row = page.get_by_test_id("builds").get_by_role("row", name="followed")
    row.get_by_text("failed", exact=True).wait_for()
    row.get_by_role("button").click()
    page.get_by_test_id("log").get_by_text(HTML).first.wait_for()
    page.get_by_role("link", name="Hosts").click()
    page.get_by_role("button", name="Examine two").click()
    finding = page.get_by_test_id("findings").get_by_role("row", name="criu").first
    finding.wait_for(timeout=600_000)  # the doctor tries everything, in turn
