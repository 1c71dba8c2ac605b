"""The API's gate before a real daemon: TLS, tokens, owners, quotas, bounds, keys that outlive a kill -9, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import io
import json
import logging
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openapi_spec_validator import validate
from prometheus_client.parser import text_string_to_metric_families

from daemon import logs
from daemon.api import idempotency, routes
from daemon.api.idempotency import Answers
from daemon.auth import tls
from sandbox import Client, Forbidden, Limits, NotFound, TooMany, Unauthorized, errors
from sandbox.errors import Interrupted, Invalid, PagurusError
from sandbox.messages.gateway import Upstream
from sandbox.messages.tokens import ApiToken, NewToken, TokenQuota, TokenRequest
from tests.support.daemon_host import IMAGE, Daemon, free_port, missing, until

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
CONNECTIONS = 40


@pytest.fixture(scope="module")
def address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, address: str) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path_factory.mktemp("host"))
    try:
        yield start(daemon, address)
    finally:
        daemon.clean()


def start(daemon: Daemon, address: str) -> Daemon:
    return daemon.start("--listen", address, "--tls-self-signed", "--connections", str(CONNECTIONS))


@pytest.fixture
async def raw(daemon: Daemon) -> AsyncIterator[aiohttp.ClientSession]:
    """Plain HTTP over the daemon's socket."""
    connector = aiohttp.UnixConnector(str(daemon.socket))
    async with aiohttp.ClientSession("http://daemon", connector=connector) as session:
        yield session


async def token(host: Client, scope: str = "exec", **fields: Any) -> NewToken:
    request = TokenRequest(name="test", scope=scope, **fields)  # type: ignore[arg-type]
    return await host.call("POST", "/v1/tokens", NewToken, request)


def outside(daemon: Daemon, address: str, text: str | None) -> Client:
    """A client over TCP that trusts the daemon's own certificate."""
    return Client(f"https://{address}", token=text, ca=daemon.state / "tls/cert.pem", patience=0)


# --------------------------------------------------------------------------- TLS and tokens


async def test_tcp_needs_tls_and_a_valid_token(daemon: Daemon, host: Client, address: str) -> None:
    made = await token(host)
    async with outside(daemon, address, made.text) as client:
        assert await client.sandboxes() == []
    for text in (None, made.text[:-1] + ("A" if made.text[-1] != "A" else "B"), "pgr_nonsense"):
        async with outside(daemon, address, text) as client:
            assert (await client.health())["status"] == "ok"
            with pytest.raises(Unauthorized):
                await client.sandboxes()
    async with Client(f"http://{address}", patience=0) as client:
        with pytest.raises(PagurusError):
            await client.health()
    async with Client(f"https://{address}", patience=0) as client:
        with pytest.raises(PagurusError, match="not the daemon"):
            await client.health()


async def test_a_fingerprint_stands_for_an_authority(daemon: Daemon, host: Client, address: str) -> None:
    made, known = await token(host), tls.fingerprint(daemon.state / "tls/cert.pem")
    assert known in daemon.log.read_text()
    async with Client(f"https://{address}", token=made.text, ca=known, patience=0) as client:
        assert await client.sandboxes() == []
    other = "sha256:" + "0" * 64
    async with Client(f"https://{address}", token=made.text, ca=other, patience=0) as client:
        with pytest.raises(PagurusError, match="not the daemon"):
            await client.sandboxes()


async def test_a_token_does_not_travel_in_the_clear() -> None:
    with pytest.raises(Invalid, match="clear"):
        Client("http://host.example:8700", token="pgr_x")


async def test_scopes_revocation_and_expiry(daemon: Daemon, host: Client, address: str) -> None:
    reading, short = await token(host, "read"), await token(host, lifetime=0.001)
    async with outside(daemon, address, reading.text) as client:
        assert await client.call("GET", "/v1/images", list)
        with pytest.raises(Forbidden):
            await client.create(IMAGE)
        with pytest.raises(Forbidden):
            await token(client)
        gone = await host.call("DELETE", f"/v1/tokens/{reading.token.id}", ApiToken)
        assert gone.revoked_at is not None
        with pytest.raises(Unauthorized):
            await client.call("GET", "/v1/images", list)
    async with outside(daemon, address, short.text) as client:
        with pytest.raises(Unauthorized):
            await client.call("GET", "/v1/images", list)


def test_no_secret_lies_on_the_disk(daemon: Daemon) -> None:
    file = daemon.state / "tokens.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE((daemon.state / "tls/key.pem").stat().st_mode) == 0o600
    assert "pgr_" not in file.read_text()
    assert "pgr_" not in daemon.log.read_text()


# --------------------------------------------------------------------------- owners and quotas


async def test_a_sandbox_is_its_makers_alone(daemon: Daemon, host: Client, address: str) -> None:
    mine, friends, others = await token(host, owner="a"), await token(host, owner="a"), await token(host, owner="b")
    async with (
        outside(daemon, address, mine.text) as one,
        outside(daemon, address, friends.text) as two,
        outside(daemon, address, others.text) as three,
        one.create(IMAGE, name="same") as sandbox,
        three.create(IMAGE, name="same") as theirs,
    ):
        checkpoint = await sandbox.checkpoint()
        assert [info.id for info in await two.sandboxes()] == [sandbox.id]
        assert (await (await two.get("same")).exec("true")).exit_code == 0
        assert {info.id for info in await host.sandboxes()} >= {sandbox.id, theirs.id}
        for act in (
            lambda: three.get(sandbox.id),
            lambda: three.checkpoint(checkpoint.id),
            lambda: three.fork(checkpoint.id),
            lambda: theirs.restore(checkpoint.id),
            lambda: theirs.diff(checkpoint.id),
            lambda: three.call("DELETE", f"/v1/sandboxes/{sandbox.id}", dict),
            lambda: three.call("GET", f"/v1/sandboxes/{sandbox.id}/turns", list),
        ):
            with pytest.raises(NotFound):
                await act()
        with pytest.raises(errors.Conflict):
            await host.get("same")
        (child,) = await sandbox.fork()
        async with child.sandbox as forked:
            assert forked.id in {info.id for info in await two.sandboxes()}


async def test_quotas_hold_also_for_what_is_being_made(daemon: Daemon, host: Client, address: str) -> None:
    made = await token(host, quota=TokenQuota(sandboxes=2, memory=1 << 30))
    small = Limits(memory="256MiB")
    async with outside(daemon, address, made.text) as client:
        found = await asyncio.gather(
            *(client.create(IMAGE, limits=small)._make() for _ in range(5)), return_exceptions=True
        )
        kept = [each for each in found if not isinstance(each, BaseException)]
        assert [type(each) for each in found if isinstance(each, BaseException)] == [TooMany] * 3
        forks = await kept[0].fork()
        assert forks[0].error is not None and "quota" in str(forks[0].error)
        await kept.pop().remove()
        with pytest.raises(TooMany, match="memory"):
            await client.create(IMAGE, limits=Limits(memory="1GiB"))
        with pytest.raises(TooMany, match="no limit"):
            await client.create(IMAGE, limits=Limits(memory=None))
        for sandbox in kept:
            await sandbox.remove()


async def test_rate_and_calls_at_once(daemon: Daemon, host: Client, address: str) -> None:
    slow = await token(host, quota=TokenQuota(requests_per_s=0.05))  # one at once, then one in 20 s
    async with outside(daemon, address, slow.text) as client:
        found = await asyncio.gather(*(client.sandboxes() for _ in range(12)), return_exceptions=True)
        assert 0 < sum(isinstance(each, TooMany) for each in found) < 12
        assert {type(each) for each in found} == {list, TooMany}
    few = await token(host, quota=TokenQuota(execs=1))
    async with outside(daemon, address, few.text) as client, client.create(IMAGE) as sandbox:
        running = asyncio.ensure_future(sandbox.exec("echo x > /begun; until test -e /enough; do sleep 0.05; done"))
        beside = await host.get(sandbox.id)  # by somebody without a limit
        await until(lambda: beside.files.exists("/begun"), "the command runs")
        with pytest.raises(TooMany):
            await sandbox.exec("true")
        await beside.files.write("/enough", b"")
        assert (await running).exit_code == 0


# --------------------------------------------------------------------------- bounds


async def test_bodies_are_bounded_by_their_route(host: Client, raw: aiohttp.ClientSession) -> None:
    async with host.create(IMAGE) as sandbox:
        large = b'{"label": "' + b"x" * (5 << 20) + b'"}'
        async with raw.post(f"/v1/sandboxes/{sandbox.id}/checkpoints", data=io.BytesIO(large)) as answer:
            assert (answer.status, (await answer.json())["code"]) == (413, "invalid")

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield b" " * (1 << 20)

        with contextlib.suppress(aiohttp.ClientError):  # the daemon may close while we still send
            async with raw.post(f"/v1/sandboxes/{sandbox.id}/checkpoints", data=endless()) as answer:
                assert answer.status == 413
        assert (await sandbox.exec("cat | wc -c", stdin=b"x" * 900_000)).text.strip() == "900000"


@pytest.mark.parametrize(
    ("data", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"\xc1", "application/msgpack", 400),
        (b"{}", "text/html", 415),
        (b'{"image": 3}', "application/json", 400),
        (b'{"image": "debian", "nonsense": 1}', "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b'{"image": "\xff"}', "application/json", 400),
    ],
)
async def test_a_bad_body_is_refused_in_the_table_of_errors(
    raw: aiohttp.ClientSession, data: bytes, kind: str, status: int
) -> None:
    async with raw.post("/v1/sandboxes", data=data, headers={"Content-Type": kind}) as answer:
        assert (answer.status, (await answer.json())["code"]) == (status, "invalid")


async def test_headers_are_bounded_and_nonsense_is_no_crash(daemon: Daemon, host: Client) -> None:
    for request in (
        b"GET /" + b"x" * 200_000,
        b"GET / HTTP/1.1\r\nA: " + b"x" * 40_000,
        b"\x16\x03\x01" * 100,
        b"\0\r\n",
    ):
        reader, writer = await asyncio.open_unix_connection(str(daemon.socket))
        writer.write(request + b"\r\n\r\n")
        assert b" 400 " in await reader.read(100)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    assert (await host.health())["status"] == "ok"


async def test_connections_are_bounded(daemon: Daemon, host: Client) -> None:
    held = []
    for _ in range(CONNECTIONS):
        reader, writer = await asyncio.open_unix_connection(str(daemon.socket))
        held.append((reader, writer))
        writer.write(b"GET /v1/health HTTP/1.1\r\nHost: here\r\n\r\n")
        if b" 200 " not in await reader.read(100):  # other clients have some
            break
    reader, writer = await asyncio.open_unix_connection(str(daemon.socket))
    assert b" 503 " in await reader.read(200)
    for _, each in [*held, (reader, writer)]:
        each.close()
        with contextlib.suppress(ConnectionError):
            await each.wait_closed()

    async def accepts() -> bool:
        with contextlib.suppress(PagurusError):
            return (await host.health())["status"] == "ok"
        return False

    await until(accepts, "the daemon accepts again")


# --------------------------------------------------------------------------- keys


async def keyed(raw: aiohttp.ClientSession, path: str, key: str, **asked: Any) -> tuple[int, Any, bool]:
    """(status, body, whether it was a kept answer)"""
    async with raw.post(path, json=asked, headers={"Idempotency-Key": key}) as answer:
        return answer.status, await answer.json(), "Idempotency-Replayed" in answer.headers


async def test_a_key_is_carried_out_once_also_by_the_next_daemon(
    daemon: Daemon, address: str, host: Client, raw: aiohttp.ClientSession
) -> None:
    status, made, _ = await keyed(raw, "/v1/sandboxes", "make", image=IMAGE)
    assert status == 201
    path = f"/v1/sandboxes/{made['id']}/exec"
    count = "echo x >> /count; wc -l < /count"
    first, together = (
        await keyed(raw, path, "one", command=count),
        await asyncio.gather(*(keyed(raw, path, "two", command=f"sleep 0.2; {count}") for _ in range(4))),
    )
    assert len({json.dumps(body) for _, body, _ in together}) == 1
    assert sorted(replayed for _, _, replayed in together) == [False, True, True, True]
    status, body, _ = await keyed(raw, path, "one", command="true")
    assert (status, body["code"]) == (409, "conflict")
    assert (await keyed(raw, path, "wrong", command=["/nonsense"]))[0] == 422

    begun = asyncio.ensure_future(keyed(raw, path, "three", command=f"touch /begun; sleep 0.5; {count}"))
    sandbox = await host.get(made["id"])
    await sandbox.exec("until test -e /begun; do sleep 0.01; done", ends_turn=False)
    daemon.kill()
    with pytest.raises(aiohttp.ClientError):
        await begun
    start(daemon, address)

    assert await keyed(raw, path, "one", command=count) == (first[0], first[1], True)
    assert (await keyed(raw, "/v1/sandboxes", "make", image=IMAGE))[1]["id"] == made["id"]
    status, body, _ = await keyed(raw, path, "three", command=f"touch /begun; sleep 0.5; {count}")
    assert (status, body["code"]) == (409, "interrupted")
    # The command of the killed daemon ended by itself, once: the first, the second, and this one.
    await sandbox.exec("until test $(wc -l < /count) -ge 3; do sleep 0.05; done")
    assert (await sandbox.exec("wc -l < /count")).text.strip() == "3"
    await sandbox.remove()


async def test_a_keyed_call_gives_its_stdin_once(daemon: Daemon, host: Client, raw: aiohttp.ClientSession) -> None:
    async with host.create(IMAGE) as sandbox:
        process = await sandbox.processes.start("cat > /got", stdin="pipe")
        path = f"/v1/sandboxes/{sandbox.id}/processes/{process.id}/stdin"
        headers = {"Idempotency-Key": "give", "Content-Type": "application/octet-stream"}
        for _ in range(2):
            async with raw.post(path, data=b"a line\n", headers=headers) as answer:
                assert (answer.status, await answer.json()) == (200, {"written": 7})
        async with raw.post(path, params={"offset": "7"}, data=b"a line\n", headers=headers) as answer:
            assert (answer.status, (await answer.json())["code"]) == (409, "conflict")
        for headers in ({}, {"Idempotency-Key": "large"}):
            async with raw.post(path, data=io.BytesIO(bytes((8 << 20) + 1)), headers=headers) as answer:
                assert (answer.status, (await answer.json())["code"]) == (413, "invalid")
        async with raw.post(path, params={"close": "true"}) as answer:
            assert answer.status == 200
        assert await process.wait() == 0
        assert await sandbox.files.read("/got") == b"a line\n"


async def test_the_sdk_sends_again_what_can_do_no_harm(daemon: Daemon, address: str, host: Client) -> None:
    async with host.create(IMAGE) as sandbox:
        daemon.kill()
        again = asyncio.ensure_future(sandbox.exec("echo x >> /count; cat /count"))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(start, daemon, address)
        assert (await again).text == "x\n"


async def test_what_a_killed_daemon_had_begun(tmp_path: Path) -> None:
    clock = 1000.0
    answers = Answers(tmp_path / "answers", clock=lambda: clock)
    assert await answers.claim("a", b"asked", "anew") == (None, False)
    assert await answers.claim("b", b"asked", "again") == (None, False)
    answers.settle("b", 200, "k", b"done")
    assert await answers.claim("c", b"asked", "once") == (None, False)
    answers.release("c")
    assert stat.S_IMODE((tmp_path / "answers").stat().st_mode) == 0o600
    answers.close()

    after = Answers(tmp_path / "answers", clock=lambda: clock)
    assert await after.claim("a", b"asked", "anew") == (None, True)
    kept, _ = await after.claim("b", b"asked", "again")
    assert kept is not None and (kept.status, kept.answer) == (200, b"done")
    assert await after.claim("c", b"asked", "once") == (None, False)
    for number in range(300):  # a sweep comes by now and then
        clock += 1000
        await after.claim(f"n{number}", b"asked", "once")
        after.settle(f"n{number}", 200, "k", b"")
    assert await after.claim("b", b"other", "again") == (None, False)
    after.close()


async def test_what_is_too_much_is_forgotten_but_never_what_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "BYTES_MOST", 2000)
    answers = Answers(tmp_path / "answers")
    await answers.claim("first", b"asked", "once")
    for number in range(600):
        await answers.claim(f"n{number}", b"asked", "once")
        answers.settle(f"n{number}", 200, "k", bytes(10))
    kept, _ = await answers.claim("n599", b"asked", "once")
    assert kept is not None and kept.answer == bytes(10)
    assert await answers.claim("n0", b"other", "once") == (None, False)
    answers.settle("first", 200, "k", b"done")
    answers.close()

    after = Answers(tmp_path / "answers")
    kept, _ = await after.claim("first", b"asked", "once")
    assert kept is not None and kept.answer == b"done"
    with pytest.raises(Interrupted):
        await after.claim("n0", b"other", "once")
    after.close()


# --------------------------------------------------------------------------- what it tells of itself


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


async def told(raw: aiohttp.ClientSession) -> dict[str, float]:
    """What stands without labels at /metrics."""
    async with raw.get("/metrics") as answer:
        families = text_string_to_metric_families(await answer.text())
        return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}


async def test_metrics_have_bounded_labels(host: Client, raw: aiohttp.ClientSession) -> None:
    before = await told(raw)
    async with host.create(IMAGE) as sandbox:
        await sandbox.durable(await sandbox.exec("echo x > /x"))
        for _ in range(6):
            await sandbox.exec("true")
        await sandbox.processes.start("true")
        await sandbox.restore()
        async with raw.get("/metrics") as answer:
            text = await answer.text()
        assert sandbox.id not in text
    after = await told(raw)
    for name, grown in (("exec", 7), ("checkpoint_exposed", 8), ("restore", 1)):
        count = f"pagurus_{name}_seconds_count"
        assert after[count] - before[count] == grown, name
    assert after["pagurus_exec_seconds_sum"] > before["pagurus_exec_seconds_sum"]
    found = {family.name: family for family in text_string_to_metric_families(text)}
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
        "pagurus_inspector_tier",
        "process_open_fds",
    ):
        assert found[name].samples, name
    running = {sample.labels["state"]: sample.value for sample in found["pagurus_sandboxes"].samples}
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
        told = line()
        assert (told["sandbox"], told["turn"], "ValueError" in told["traceback"]) == ("s-1", 7, True)
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


# --------------------------------------------------------------------------- what is nobody else's business


async def test_a_token_is_told_of_no_builds_and_no_upstreams_of_others(
    daemon: Daemon, host: Client, address: str
) -> None:
    await host.gateway.put("model", Upstream(url="http://10.1.2.3:8000/secret-path", headers={"X-Team": "blue"}))
    async with host.create(IMAGE) as sandbox:
        made = await sandbox.durable(await sandbox.exec("echo built > /built"))
        await host.images.keep_step("ab" * 32, made.id, "RUN curl https://user:password@intern/")
        assert [step.title for step in await host.images.steps()] == ["RUN curl https://user:password@intern/"]
        for scope in ("read", "exec"):
            async with outside(daemon, address, (await token(host, scope)).text) as client:
                assert list(await client.images.steps()) == []
                (told,) = await client.gateway.upstreams()
                assert (told.name, told.url, told.headers) == ("model", "", [])
                said = ""
                for path in ("/v1/images", "/v1/statistics", "/v1/gateway", "/v1/network", "/v1/sandboxes"):
                    said += str(await client.call("GET", path, Any))
                assert not any(secret in said for secret in ("10.1.2.3", "password", sandbox.id, made.id))
        (known,) = await host.gateway.upstreams()
        assert known.url == "http://10.1.2.3:8000/secret-path"
        await host.images.prune()
    await host.gateway.drop("model")
