"""A browser's login: the cookie and the key count together, and reach what the token reaches."""

from __future__ import annotations

import asyncio
import http.cookies
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer
from yarl import URL

from pagurus.page.viewer import Viewer
from sandbox import Client, Sandbox, paths
from sandbox.errors import Unsupported
from sandbox.messages.network import PortLink
from sandbox.messages.tokens import ApiToken, NewToken, TokenRequest
from sandbox.page import KEY_HEADER, POLICY, PROTOCOL
from tests.support.daemon_host import IMAGE, Daemon, free_port, missing, until
from tests.support.programs import Program

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
HTML = {"Accept": "text/html,application/xhtml+xml"}


@pytest.fixture(scope="module")
def address() -> str:
    return f"http://127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, address: str) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path_factory.mktemp("host"))
    try:
        yield daemon.start("--listen", address.removeprefix("http://"), "--plain")
    finally:
        daemon.clean()


@pytest.fixture
async def outside(daemon: Daemon, address: str) -> AsyncIterator[aiohttp.ClientSession]:
    """A browser's side of TCP, which keeps no cookie by itself."""
    async with aiohttp.ClientSession(address, cookie_jar=aiohttp.DummyCookieJar()) as session:
        yield session


async def token(host: Client, scope: str = "exec") -> NewToken:
    return await host.call("POST", "/v1/tokens", NewToken, TokenRequest(name="page", scope=scope))  # type: ignore[arg-type]


async def log_in(outside: aiohttp.ClientSession, text: str) -> tuple[dict[str, str], str]:
    """(the cookie as a header, the key)"""
    async with outside.post("/v1/login", json={"token": text}) as answer:
        assert answer.status == 200, await answer.text()
        cookie: http.cookies.Morsel[str]
        (cookie,) = answer.cookies.values()
        assert cookie["httponly"] and cookie["samesite"] == "Strict" and cookie["path"] == "/" and not cookie["domain"]
        assert text not in str(cookie)
        body: dict[str, Any] = await answer.json()
        return {"Cookie": f"{cookie.key}={cookie.value}"}, body["key"]


async def status(outside: aiohttp.ClientSession, method: str, path: str | URL, **options: Any) -> int:
    async with outside.request(method, path, **options) as answer:
        await answer.read()
        return answer.status


async def test_cookie_and_key_count_together(host: Client, outside: aiohttp.ClientSession) -> None:
    cookie, key = await log_in(outside, (await token(host)).text)
    shown = {KEY_HEADER: key}
    assert await status(outside, "GET", "/v1/sandboxes", headers=cookie | shown) == 200
    for headers in ({}, cookie, shown, cookie | {KEY_HEADER: key[:-1] + "x"}, shown | {"Cookie": "pagurus=x"}):
        assert await status(outside, "GET", "/v1/sandboxes", headers=headers) == 401
    forged = re.sub(r"\.\d+\.", ".99999999999.", cookie["Cookie"])
    assert await status(outside, "GET", "/v1/sandboxes", headers=shown | {"Cookie": forged}) == 401
    async with outside.get("/v1/login", headers=cookie | shown) as answer:
        assert (await answer.json())["scope"] == "exec"


async def test_a_login_reaches_what_its_token_reaches(host: Client, outside: aiohttp.ClientSession) -> None:
    made = await token(host, "read")
    cookie, key = await log_in(outside, made.text)
    headers = cookie | {KEY_HEADER: key}
    assert await status(outside, "GET", "/v1/images", headers=headers) == 200
    assert await status(outside, "POST", "/v1/sandboxes", headers=headers, json={"image": IMAGE}) == 403
    assert await status(outside, "GET", "/v1/tokens", headers=headers) == 403
    await host.call("DELETE", f"/v1/tokens/{made.token.id}", ApiToken)
    assert await status(outside, "GET", "/v1/images", headers=headers) == 401
    assert await status(outside, "POST", "/v1/login", json={"token": made.text}) == 401


async def test_a_login_outlasts_its_daemon(daemon: Daemon, host: Client, outside: aiohttp.ClientSession) -> None:
    cookie, key = await log_in(outside, (await token(host)).text)
    address = str(outside._base_url).removeprefix("http://").rstrip("/")
    daemon.stop()
    daemon.start("--listen", address, "--plain")
    assert await status(outside, "GET", "/v1/images", headers=cookie | {KEY_HEADER: key}) == 200


async def test_a_terminal_takes_the_key_as_a_protocol(host: Client, outside: aiohttp.ClientSession) -> None:
    made = await token(host, "admin")
    cookie, key = await log_in(outside, made.text)
    async with host.create(IMAGE) as sandbox:
        terminal = await sandbox.terminals.open("cat")
        path = f"/v1/sandboxes/{sandbox.id}/terminals/{terminal.id}/attach"
        for protocols in ((), (PROTOCOL,), (PROTOCOL, "0" * 64)):
            with pytest.raises(aiohttp.WSServerHandshakeError, match="401"):
                await outside.ws_connect(path, headers=cookie, protocols=protocols)
        async with outside.ws_connect(path, headers=cookie, protocols=(PROTOCOL, key)) as socket:
            assert socket.protocol == PROTOCOL and "start" in (await socket.receive_json())
            await host.call("DELETE", f"/v1/tokens/{made.token.id}", ApiToken)
            await until(lambda: _closed(socket))


async def _closed(socket: aiohttp.ClientWebSocketResponse) -> bool:
    message = await socket.receive(timeout=30)
    return message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)


async def test_the_root_is_a_page_for_browsers_alone(outside: aiohttp.ClientSession) -> None:
    async with outside.get("/", headers=HTML) as answer:
        assert answer.status == 200 and answer.content_type == "text/html"
        assert answer.headers["Content-Security-Policy"] == POLICY and "unsafe" not in POLICY
        assert answer.headers["X-Content-Type-Options"] == "nosniff" and answer.headers["X-Frame-Options"] == "DENY"
        assert "http" not in (await answer.text()).replace("http-equiv", "")
    async with outside.get("/") as answer:
        assert answer.status == 404 and answer.content_type == "application/json"
    async with outside.get("/v1/health", headers=HTML) as answer:
        assert answer.content_type == "application/json" and answer.headers["X-Content-Type-Options"] == "nosniff"
    for path in ("/page/assets/nothing.js", "/page/assets/..%2findex.html", "/page/index.html"):
        assert await status(outside, "GET", path, headers=HTML) == 404


async def test_all_that_run_are_read_at_once(host: Client, outside: aiohttp.ClientSession) -> None:
    cookie, key = await log_in(outside, (await token(host)).text)
    async with host.create(IMAGE) as sandbox:
        used = await until(lambda: _usage(host))
        assert [item["sandbox"] for item in used] == [sandbox.id] and used[0]["memory_bytes"] > 0
        async with outside.get("/v1/usage", headers=cookie | {KEY_HEADER: key}) as answer:
            assert await answer.json() == []  # another owner's
        async with outside.get("/v1/usage/host", headers=cookie | {KEY_HEADER: key}) as answer:
            assert answer.status == 403
    free = await host.call("GET", "/v1/usage/host", dict)
    assert 0 < free["pool_free"] <= free["pool_bytes"] and free["cpus"] > 0


async def _usage(host: Client) -> list[dict[str, Any]]:
    return await host.call("GET", "/v1/usage", list)


# --------------------------------------------------------------------------- pagurus view


@pytest.fixture
async def viewer(host: Client) -> AsyncIterator[tuple[Viewer, aiohttp.ClientSession]]:
    made = Viewer(host)
    server = TestServer(made.application())
    await server.start_server()
    async with aiohttp.ClientSession(server.make_url("/"), cookie_jar=aiohttp.DummyCookieJar()) as session:
        yield made, session
    await server.close()


async def test_the_program_prints_an_address(daemon: Daemon, host: Client) -> None:
    existing = {name: value for name, value in os.environ.items() if not name.startswith("PAGURUS_")}
    command = [sys.executable, "-m", "pagurus", "view"]
    environment = {**existing, "PAGURUS_RUN": str(daemon.run)}
    with Program(command, env=environment, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        address = (await asyncio.to_thread(program.stdout.readline)).strip()
        url, _, code = address.partition("/#code=")
        async with aiohttp.ClientSession(url, cookie_jar=aiohttp.DummyCookieJar()) as browser:
            cookie, key = await log_in(browser, code)
            async with browser.get("/v1/login", headers=cookie | {KEY_HEADER: key}) as answer:
                assert (await answer.json())["scope"] == "admin"
            if (paths.page() / "index.html").is_file():  # else what it is connected to answers
                async with browser.get("/", headers=HTML) as answer:
                    assert answer.headers["Content-Security-Policy"] == POLICY
    assert program.returncode == 0


async def test_a_code_is_good_once(host: Client, viewer: tuple[Viewer, aiohttp.ClientSession]) -> None:
    made, browser = viewer
    assert await status(browser, "GET", "/v1/sandboxes") == 401
    assert await status(browser, "POST", "/v1/login", json={"token": "x" * 32}) == 401
    code = made.code
    assert code is not None
    cookie, key = await log_in(browser, code)
    assert await status(browser, "POST", "/v1/login", json={"token": code}) == 401
    headers = cookie | {KEY_HEADER: key}
    assert await status(browser, "GET", "/v1/sandboxes", headers=cookie) == 401
    assert await status(browser, "GET", "/v1/sandboxes", headers=headers) == 200
    assert await status(browser, "GET", "/v1/sandboxes", headers=headers | {"Host": "evil.example:80"}) == 403
    assert await status(browser, "GET", "/v1/sandboxes/none", headers=headers) == 404
    async with host.create(IMAGE) as sandbox:
        path = f"/v1/sandboxes/{sandbox.id}"
        data = bytes(range(256)) * 4096
        assert await status(browser, "PUT", f"{path}/files?path=/srv/%2Bx", headers=headers, data=data) == 200
        assert bytes(await sandbox.files.read("/srv/+x")) == data
        terminal = await sandbox.terminals.open("cat")
        attach = f"{path}/terminals/{terminal.id}/attach"
        with pytest.raises(aiohttp.WSServerHandshakeError, match="401"):
            await browser.ws_connect(attach, headers=cookie)
        async with browser.ws_connect(attach, headers=cookie, protocols=(PROTOCOL, key)) as socket:
            assert "start" in await socket.receive_json()
            await socket.send_bytes(b"typed\n")
            assert (await socket.receive_bytes()).startswith(b"typed")


# --------------------------------------------------------------------------- ports of sandboxes

SERVER = """exec python3 -c 'import http.server as h
class S(h.BaseHTTPRequestHandler):
    def do_GET(self):
        text = (self.path + "|" + (self.headers["Cookie"] or "") + "|" + self.command).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(text)))
        self.end_headers(); self.wfile.write(text)
    do_POST = do_GET
h.ThreadingHTTPServer(("127.0.0.1", 8000), S).serve_forever()'"""


@pytest.fixture
async def server(host: Client) -> AsyncIterator[Sandbox]:
    """A sandbox in which something listens on port 8000."""
    async with host.create(IMAGE) as sandbox:
        await sandbox.processes.start(["/bin/sh", "-c", SERVER])
        await until(lambda: _listens(sandbox))
        yield sandbox


async def _listens(sandbox: Sandbox) -> bool:
    return 8000 in await sandbox.ports.list()


async def link(host: Client, sandbox: Sandbox) -> PortLink:
    return await host.call("GET", f"/v1/sandboxes/{sandbox.id}/ports/8000/link", PortLink)


async def test_a_browser_is_let_in_to_a_port(host: Client, server: Sandbox, outside: aiohttp.ClientSession) -> None:
    made = await link(host, server)
    there = {"Host": f"{made.name}.localhost:1"}
    assert await status(outside, "GET", "/", headers=there) == 401
    async with outside.get(made.path, headers=there, allow_redirects=False) as answer:
        assert answer.status == 303 and answer.headers["Location"] == "/"
        ((name, cookie),) = answer.cookies.items()
        assert cookie["httponly"] and cookie["samesite"] == "Lax" and not cookie["domain"]
    inside = {**there, "Cookie": f"other=1; {name}={cookie.value}; third=3"}
    async with outside.get(URL("/v1/tokens?x=%2F", encoded=True), headers=inside) as answer:
        assert await answer.text() == "/v1/tokens?x=%2F|other=1; third=3|GET"  # to the port, and without the cookie
    by_a_site = {**inside, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    assert await status(outside, "POST", "/", headers=by_a_site) == 401
    assert await status(outside, "GET", "/", headers=by_a_site) == 401
    assert await status(outside, "GET", "/", headers={**by_a_site, "Sec-Fetch-Mode": "navigate"}) == 200
    assert await status(outside, "POST", "/", headers={**inside, "Sec-Fetch-Site": "same-origin"}) == 200


async def test_a_ticket_is_for_one_port_and_one_minute(
    host: Client, server: Sandbox, outside: aiohttp.ClientSession
) -> None:
    made = await link(host, server)
    ends, _, rest = made.path.partition("=")[2].partition(".")
    other = {"Host": f"8001-{made.name.partition('-')[2]}.localhost:1"}
    there = {"Host": f"{made.name}.localhost:1"}
    assert await status(outside, "GET", made.path, headers=other, allow_redirects=False) == 401
    for forged in (f"{int(ends) + 1}.{rest}", made.path[-80:], "", "x"):
        path = f"/.pagurus/open?ticket={forged}"
        assert await status(outside, "GET", path, headers=there, allow_redirects=False) == 401
    reader = await token(host, "read")
    cookie, key = await log_in(outside, reader.text)
    path = f"/v1/sandboxes/{server.id}/ports/8000/link"
    assert await status(outside, "GET", path, headers=cookie | {KEY_HEADER: key}) == 403
    assert await status(outside, "GET", path.replace("8000", "70000"), headers=cookie | {KEY_HEADER: key}) == 403


async def test_the_viewer_passes_ports_on_and_nothing_else(
    host: Client, server: Sandbox, viewer: tuple[Viewer, aiohttp.ClientSession]
) -> None:
    made, browser = await link(host, server), viewer[1]
    there = {"Host": f"{made.name}.localhost:1"}
    async with browser.get(made.path, headers=there, allow_redirects=False) as answer:
        assert answer.status == 303
        ((name, cookie),) = answer.cookies.items()
    async with browser.get(
        URL("/page?x=%2F", encoded=True), headers={**there, "Cookie": f"{name}={cookie.value}"}
    ) as answer:
        assert await answer.text() == "/page?x=%2F||GET"
    for path in ("/v1/tokens", "/v1/sandboxes", "/../v1/tokens", "/%2e%2e/%2e%2e/v1/tokens", "/"):
        assert (path, await status(browser, "GET", URL(path, encoded=True), headers=there)) in (
            (path, 401),
            (path, 404),
        )
    envd = {"Host": f"49983-{made.name.partition('-')[2]}.localhost:1"}
    assert await status(browser, "GET", "/v1/tokens", headers=envd) == 404


async def test_a_server_that_knows_no_ports_gives_a_viewer_nothing(daemon: Daemon, address: str) -> None:
    """A daemon without E2B's names takes the path for no call of its own."""
    daemon.stop()
    daemon.start("--listen", address.removeprefix("http://"), "--plain", "--no-e2b")
    try:
        async with Client(daemon.socket) as host:
            server = TestServer(Viewer(host).application())
            await server.start_server()
            async with aiohttp.ClientSession(server.make_url("/")) as browser, host.create(IMAGE) as sandbox:
                there = {"Host": f"8000-{sandbox.id.replace('-', '')}.localhost:1"}
                for path in ("/v1/tokens", "/v1/sandboxes", "/../v1/tokens"):
                    assert await status(browser, "GET", URL(path, encoded=True), headers=there) == 404
                with pytest.raises(Unsupported, match="shows no ports"):
                    await link(host, sandbox)
            await server.close()
    finally:
        daemon.stop()
        daemon.start("--listen", address.removeprefix("http://"), "--plain")
