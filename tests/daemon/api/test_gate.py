"""The API's gate before a real daemon: TLS, tokens, owners, quotas, bounds."""

from __future__ import annotations

import asyncio
import contextlib
import io
import stat
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from daemon.auth import tls
from sandbox import Client, Forbidden, Limits, NotFound, TooMany, Unauthorized
from sandbox.errors import Invalid, PagurusError
from sandbox.messages import Statistics
from sandbox.messages.gateway import Upstream
from sandbox.messages.tokens import ApiToken, NewToken, TokenQuota, TokenRequest
from tests.support.daemon_host import IMAGE, Daemon, free_port, missing, until

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
CONNECTIONS = 40
TOTALS = ("/metrics", "/v1/gateway", "/v1/network")


@pytest.fixture(scope="module")
def address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, address: str) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path_factory.mktemp("host"))
    try:
        yield daemon.start("--listen", address, "--tls-self-signed", "--connections", str(CONNECTIONS))
    finally:
        daemon.clean()


async def token(host: Client, scope: str = "exec", **fields: Any) -> NewToken:
    request = TokenRequest(name="test", scope=scope, **fields)  # type: ignore[arg-type]
    return await host.call("POST", "/v1/tokens", NewToken, request)


def outside(daemon: Daemon, address: str, text: str | None) -> Client:
    """A client over TCP that trusts the daemon's own certificate."""
    return Client(f"https://{address}", token=text, ca=daemon.state / "tls/cert.pem", timeout=0)


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
    async with Client(f"http://{address}", timeout=0) as client:
        with pytest.raises(PagurusError):
            await client.health()
    async with Client(f"https://{address}", timeout=0) as client:
        with pytest.raises(PagurusError, match="not the daemon"):
            await client.health()


async def test_a_fingerprint_stands_for_an_authority(daemon: Daemon, host: Client, address: str) -> None:
    made, existing = await token(host), tls.fingerprint(daemon.state / "tls/cert.pem")
    assert existing in daemon.log.read_text()
    async with Client(f"https://{address}", token=made.text, ca=existing, timeout=0) as client:
        assert await client.sandboxes() == []
    other = "sha256:" + "0" * 64
    async with Client(f"https://{address}", token=made.text, ca=other, timeout=0) as client:
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
        with pytest.raises(NotFound):  # an administrator's words find the host's own alone
            await host.get("same")
        assert (await host.get(theirs.id)).id == theirs.id
        (child,) = await sandbox.fork()
        async with child.sandbox as forked:
            assert forked.id in {info.id for info in await two.sandboxes()}


async def test_quotas_hold_also_for_what_is_being_made(daemon: Daemon, host: Client, address: str) -> None:
    made = await token(host, quota=TokenQuota(sandboxes=2, memory=1 << 30))
    small = Limits(memory="256MiB")
    async with outside(daemon, address, made.text) as client:
        result = await asyncio.gather(
            *(client.create(IMAGE, limits=small)._make() for _ in range(5)), return_exceptions=True
        )
        retained = [item for item in result if not isinstance(item, BaseException)]
        assert [type(item) for item in result if isinstance(item, BaseException)] == [TooMany] * 3
        forks = await retained[0].fork()
        assert forks[0].error is not None and "quota" in str(forks[0].error)
        await retained.pop().remove()
        with pytest.raises(TooMany, match="memory"):
            await client.create(IMAGE, limits=Limits(memory="1GiB"))
        with pytest.raises(TooMany, match="no limit"):
            await client.create(IMAGE, limits=Limits(memory=None))
        for sandbox in retained:
            await sandbox.remove()


async def test_rate_and_calls_at_once(daemon: Daemon, host: Client, address: str) -> None:
    slow = await token(host, quota=TokenQuota(requests_per_s=0.05))  # one at once, then one in 20 s
    async with outside(daemon, address, slow.text) as client:
        result = await asyncio.gather(*(client.sandboxes() for _ in range(12)), return_exceptions=True)
        assert 0 < sum(isinstance(item, TooMany) for item in result) < 12
        assert {type(item) for item in result} == {list, TooMany}
    few = await token(host, quota=TokenQuota(execs=1))
    async with outside(daemon, address, few.text) as client, client.create(IMAGE) as sandbox:
        running = asyncio.ensure_future(sandbox.exec("echo x > /begun; until test -e /enough; do sleep 0.05; done"))
        alongside = await host.get(sandbox.id)  # by somebody without a limit
        await until(lambda: alongside.files.exists("/begun"), "the command runs")
        with pytest.raises(TooMany):
            await sandbox.exec("true")
        await alongside.files.write("/enough", b"")
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
    for _, item in [*held, (reader, writer)]:
        item.close()
        with contextlib.suppress(ConnectionError):
            await item.wait_closed()

    async def accepts() -> bool:
        with contextlib.suppress(PagurusError):
            return (await host.health())["status"] == "ok"
        return False

    await until(accepts, "the daemon accepts again")


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
                (reported,) = await client.gateway.upstreams()
                assert (reported.name, reported.url, reported.headers) == ("model", "", [])
                said = ""
                for path in ("/v1/images", "/v1/statistics", "/v1/sandboxes"):
                    said += str(await client.call("GET", path, Any))
                for path in TOTALS:
                    with pytest.raises(Forbidden):
                        await client.raw("GET", path, None, "")
                assert await client.statistics() == Statistics(), "nothing of what others have and do"
                assert not any(secret in said for secret in ("10.1.2.3", "password", sandbox.id, made.id))
        async with outside(daemon, address, (await token(host, "monitor")).text) as client:
            for path in TOTALS:
                assert sandbox.id.encode() not in await client.raw("GET", path, None, "")
            for path in ("/v1/sandboxes", "/v1/statistics", "/v1/images", f"/v1/sandboxes/{sandbox.id}", "/v1/tokens"):
                with pytest.raises(Forbidden):
                    await client.call("GET", path, Any)
        (existing,) = await host.gateway.upstreams()
        assert existing.url == "http://10.1.2.3:8000/secret-path"
        await host.images.prune()
    await host.gateway.drop("model")
