"""What the API tells of itself: its description, metrics, the log."""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
from typing import Any

import aiohttp
import pytest
from openapi_spec_validator import validate
from prometheus_client.parser import text_string_to_metric_families

from daemon import logs
from daemon.api import routes
from sandbox import Client, NotFound
from tests.support.daemon_host import IMAGE, Daemon, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


async def test_the_description_is_valid_and_complete(raw: aiohttp.ClientSession) -> None:
    async with raw.get("/v1/openapi.json") as answer:
        described = await answer.json()
    validate(described)
    for route in routes():
        assert route.method.lower() in described["paths"][route.path]


def test_every_route_is_declared_in_full() -> None:
    from daemon.api import AREAS

    for area in AREAS:
        assert area.AREA.routes
        for route in area.AREA.routes:
            assert route.summary, f"{route.name} has no summary"
    names = [route.name for route in routes()]
    assert len(names) == len(set(names))


async def reported(raw: aiohttp.ClientSession) -> dict[str, float]:
    """What stands without labels at /metrics."""
    async with raw.get("/metrics") as answer:
        families = text_string_to_metric_families(await answer.text())
        return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}


async def test_metrics_have_bounded_labels(host: Client, raw: aiohttp.ClientSession) -> None:
    before = await reported(raw)
    async with host.create(IMAGE) as sandbox:
        await sandbox.durable(await sandbox.exec("echo x > /x"))
        for _ in range(6):
            await sandbox.exec("true")
        await sandbox.processes.start("true")
        await sandbox.restore()
        async with raw.get("/metrics") as answer:
            text = await answer.text()
        assert sandbox.id not in text
    after = await reported(raw)
    for name, grown in (("exec", 7), ("checkpoint_exposed", 8), ("restore", 1)):
        count = f"pagurus_{name}_seconds_count"
        assert after[count] - before[count] == grown, name
    assert after["pagurus_exec_seconds_sum"] > before["pagurus_exec_seconds_sum"]
    result = {family.name: family for family in text_string_to_metric_families(text)}
    for name in (
        "pagurus_sandboxes",
        "pagurus_turns",
        "pagurus_checkpoint_frozen_seconds",
        "pagurus_checkpoint_captured_seconds",
        "pagurus_checkpoint_durable_seconds",
        "pagurus_checkpoint_exposed_seconds",
        "pagurus_queue_length",
        "pagurus_restores",
        "pagurus_restore_seconds",
        "pagurus_exec_seconds",
        "pagurus_api_requests",
        "pagurus_stored_bytes",
        "pagurus_inspector_lost_events",
        "process_open_fds",
    ):
        assert result[name].samples, name
    running = {sample.labels["state"]: sample.value for sample in result["pagurus_sandboxes"].samples}
    assert running["running"] >= 1


async def test_the_log_tells_each_turn_and_what_a_request_is_about(tmp_path_factory: pytest.TempPathFactory) -> None:
    daemon = Daemon(tmp_path_factory.mktemp("debug"))
    try:
        daemon.start("--log-level", "debug")
        async with daemon.client() as host, host.create(IMAGE, name="named") as sandbox:
            await host.health()
            made = await sandbox.exec("echo x > /x")
            await sandbox.exec("true")
            with pytest.raises(NotFound):
                await sandbox.files.read("/none")
        lines = [json.loads(line) for line in daemon.log.read_text().splitlines() if line.startswith("{")]
    finally:
        daemon.clean()
    ended = [line for line in lines if line["message"].startswith("turn ended")]
    assert [(line["sandbox"], line["turn"]) for line in ended] == [(sandbox.id, 1), (sandbox.id, 2)]
    assert [line["checkpoint"] for line in ended] == [made.checkpoint] * 2
    assert all(line["request"] for line in ended)
    served = [line for line in lines if f"/v1/sandboxes/{sandbox.id}" in line["message"]]
    assert {(line["sandbox"], line["turn"]) for line in served} == {(sandbox.id, 1), (sandbox.id, 2)}
    assert "turn" not in next(line for line in lines if "/health" in line["message"])


def test_a_traceback_tells_the_sandbox_that_the_request_is_about() -> None:
    def line(**extra: object) -> dict[str, Any]:
        record = logging.makeLogRecord({"msg": "a bug", "exc_info": (ValueError, ValueError("x"), None), **extra})
        return json.loads(logs.JsonLines().format(record))

    class Row:
        id, turn = "s-1", 7

    def within() -> None:
        logs.SUBJECT.set(Row())
        reported = line()
        assert (reported["sandbox"], reported["turn"], "ValueError" in reported["traceback"]) == ("s-1", 7, True)
        assert line(sandbox="s-1", turn=6)["turn"] == 6
        other = line(sandbox="s-2")
        assert other["sandbox"] == "s-2" and "turn" not in other

    contextvars.copy_context().run(within)
    assert "sandbox" not in line()


async def test_the_log_knows_request_and_sandbox(daemon: Daemon, raw: aiohttp.ClientSession) -> None:
    async with raw.post("/v1/sandboxes", json={"image": IMAGE}, headers={"X-Request-Id": "mine-7"}) as answer:
        made = await answer.json()
        assert answer.headers["X-Request-Id"] == "mine-7"
    async with raw.delete(f"/v1/sandboxes/{made['id']}") as answer:
        assert answer.status == 200
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines() if line.startswith("{")]
    assert any(line.get("request") == "mine-7" and line.get("sandbox") == made["id"] for line in lines)


async def test_a_request_that_no_route_takes_has_an_id(raw: aiohttp.ClientSession) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("PATCH", "/v1/sandboxes", 405)):
        async with raw.request(method, path, headers={"X-Request-Id": f"mine-{status}"}) as answer:
            assert (answer.status, answer.headers["X-Request-Id"]) == (status, f"mine-{status}")
        async with raw.request(method, path) as answer:
            assert answer.headers["X-Request-Id"] not in ("", f"mine-{status}")


async def test_what_is_not_http_is_one_line_of_the_log(daemon: Daemon) -> None:
    reader, writer = await asyncio.open_unix_connection(str(daemon.socket))
    writer.write(b"GET / HTTP/1.1\r\nno header\r\n\r\n")
    answer = await reader.read()
    writer.close()
    assert b" 400 " in answer.split(b"\r\n")[0]
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines() if line.startswith("{")]
    reported = [line for line in lines if "is not HTTP" in line["message"]]
    assert len(reported) == 1 and reported[0]["level"] == "INFO" and "traceback" not in reported[0]
