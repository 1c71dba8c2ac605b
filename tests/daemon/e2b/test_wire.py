"""E2B's API as its clients' requests look on the wire, against a real daemon; and what strangers may not do by it."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openapi_spec_validator
import pytest
import pytest_asyncio
from yarl import URL

from daemon.auth.access import e2b_spelling, split
from sandbox.messages import Verdict
from sandbox.messages.tokens import ApiToken
from tests.daemon.e2b.conftest import Served
from tests.support.daemon_host import until


class Client:
    """What the SDKs send, by hand."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str) -> None:
        self.session, self.url, self.key = session, url, key

    async def control(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
        async with self.session.request(
            method, self.url + path, json=body, headers={"X-API-KEY": self.key, **headers}
        ) as answer:
            raw = await answer.read()
            return answer.status, json.loads(raw) if raw else None

    async def create(self, **body: object) -> dict[str, str]:
        target = {"templateID": "base", "timeout": 600, "allow_internet_access": False, **body}
        status, made = await self.control("POST", "/sandboxes", target)
        assert status == 201, made
        return made

    def headers(self, made: dict[str, str], user: str | None = None) -> dict[str, str]:
        own = {"X-Access-Token": made["envdAccessToken"]}
        if user is not None:
            own["Authorization"] = "Basic " + base64.b64encode(f"{user}:".encode()).decode()
        return {**own, "E2b-Sandbox-Id": made["sandboxID"], "E2b-Sandbox-Port": "49983"}

    async def call(self, made: dict[str, str], path: str, body: object, **more: str) -> tuple[int, Any]:
        headers = {**self.headers(made), "Connect-Protocol-Version": "1", **more}
        async with self.session.post(f"{self.url}/{path}", json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def stream(self, made: dict[str, str], path: str, body: object, **more: str) -> AsyncIterator[dict[str, Any]]:
        """The messages of an answer; the last one has the key "ended"."""
        headers = {**self.headers(made), "Content-Type": "application/connect+json", **more}
        async with self.session.post(f"{self.url}/{path}", data=framed(body), headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            while True:
                head = await answer.content.readexactly(5)
                value = json.loads(await answer.content.readexactly(int.from_bytes(head[1:], "big")))
                if head[0] & 2:
                    yield {"ended": value}
                    return
                yield value

    async def run(self, made: dict[str, str], command: str, **more: str) -> tuple[str, dict[str, Any]]:
        """Its stdout and its last event."""
        out, end = b"", {}
        async for item in self.stream(made, "process.Process/Start", start(command), **more):
            event = item.get("event", {})
            out += base64.b64decode(event.get("data", {}).get("stdout", ""))
            end = event.get("end", end)
        return out.decode(), end


def framed(body: object, flags: int = 0) -> bytes:
    data = json.dumps(body).encode()
    return bytes([flags]) + len(data).to_bytes(4, "big") + data


def start(command: str, **more: object) -> dict[str, object]:
    return {"process": {"cmd": "/bin/bash", "args": ["-l", "-c", command]}, "stdin": False, **more}


@pytest_asyncio.fixture
async def client(served: Served, key: str) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession() as session:
        yield Client(session, served.url, key)


@pytest_asyncio.fixture
async def made(client: Client) -> AsyncIterator[dict[str, str]]:
    sandbox = await client.create()
    yield sandbox
    await client.control("DELETE", f"/sandboxes/{sandbox['sandboxID']}")


def test_both_spellings_are_one_token(served: Served) -> None:
    token = served.token()
    assert e2b_spelling(token).startswith("e2b_") and split(e2b_spelling(token)) == split(token)


async def test_a_command_ends_a_turn(client: Client, made: dict[str, str], served: Served) -> None:
    """With a verdict and a checkpoint, and nothing of the command is left to be captured."""
    assert (await client.run(made, "true"))[1] == {"exitCode": 0, "exited": True, "status": "exit status 0"}
    await client.run(made, "true")
    await client.run(made, "echo new > /home/user/file")
    async with served.daemon.client() as host:
        sandbox = await host.get(made["sandboxID"])
        turns = await sandbox.turns()
        assert [turn.verdict for turn in turns[-2:]] == [Verdict.NONE, Verdict.FILES]
        assert "echo new" in turns[-1].command
        assert [process for process in await sandbox.processes.list()] == []


async def test_a_new_sandbox_has_its_user_in_its_first_state(
    client: Client, made: dict[str, str], served: Served
) -> None:
    """So nothing is to be captured, and a return to that state has him again."""
    look = "id -un; cd; stat -c %U . .profile; touch there"
    seen = "user\nuser\nuser\n"
    async with served.daemon.client() as host:
        sandbox = await host.get(made["sandboxID"])
        assert (await sandbox.refresh()).turn == 0
        [first] = await sandbox.tree()
        assert (await client.run(made, look))[0] == seen
        await sandbox.restore(first.id)
        assert (await client.run(made, f"test ! -e there; echo $?; {look}"))[0] == f"0\n{seen}"


async def test_a_lost_stream_ends_the_turn_and_not_the_command(
    client: Client, made: dict[str, str], served: Served
) -> None:
    events = client.stream(made, "process.Process/Start", start("echo begun > /home/user/a; sleep 1000"))
    pid = (await anext(events))["event"]["start"]["pid"]
    async with served.daemon.client() as host:
        sandbox = await host.get(made["sandboxID"])
        before = (await sandbox.refresh()).turn

        async def ended() -> bool:
            return (await sandbox.refresh()).turn > before

        await events.aclose()  # type: ignore[attr-defined]
        await until(ended)
    status, listed = await client.call(made, "process.Process/List", {})
    assert status == 200 and pid in [item["pid"] for item in listed["processes"]]
    body = {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"}
    assert await client.call(made, "process.Process/SendSignal", body) == (200, {})


async def test_how_commands_end(client: Client, made: dict[str, str]) -> None:
    _, end = await client.run(made, "kill -9 $$")
    assert end == {"exitCode": -1, "exited": False, "status": "signal: killed", "error": "signal: killed"}
    pieces = client.stream(made, "process.Process/Start", start("sleep 1000"), **{"Connect-Timeout-Ms": "200"})
    assert [item async for item in pieces][-1]["ended"]["error"]["code"] == "deadline_exceeded"


async def test_the_end_is_told_to_who_asks_late(client: Client, made: dict[str, str]) -> None:
    [begin, *_] = [item async for item in client.stream(made, "process.Process/Start", start("exit 5", tag="named"))]
    for selector in ({"pid": begin["event"]["start"]["pid"]}, {"tag": "named"}):
        late = [item async for item in client.stream(made, "process.Process/Connect", {"process": selector})]
        assert late[-2]["event"]["end"]["exitCode"] == 5
    unknown = [item async for item in client.stream(made, "process.Process/Connect", {"process": {"pid": 4_000_000}})]
    assert unknown == [{"ended": {"error": {"code": "not_found", "message": unknown[0]["ended"]["error"]["message"]}}}]


async def test_a_slow_client_loses_nothing(client: Client, made: dict[str, str]) -> None:
    """The command waits: far more than any buffer holds arrives whole."""
    events = client.stream(made, "process.Process/Start", start("head -c 60000000 /dev/zero"))
    await anext(events)
    await client.call(made, "process.Process/List", {})
    size = 0
    async for item in events:
        size += len(base64.b64decode(item.get("event", {}).get("data", {}).get("stdout", "")))
    assert size == 60_000_000


async def test_many_commands_at_once(client: Client, made: dict[str, str]) -> None:
    """Each has its own output, though more of them have ended than the sandbox remembers."""
    ran = await asyncio.gather(*(client.run(made, f"echo {number}") for number in range(40)))
    assert [out for out, _ in ran] == [f"{number}\n" for number in range(40)]
    assert all(end["exitCode"] == 0 for _, end in ran)


async def test_stdin_by_a_stream(client: Client, made: dict[str, str]) -> None:
    events = client.stream(made, "process.Process/Start", start("cat", stdin=True))
    pid = (await anext(events))["event"]["start"]["pid"]
    given = [
        {"start": {"process": {"pid": pid}}},
        *({"data": {"input": {"stdin": base64.b64encode(b"x" * 3000).decode()}}} for _ in range(20)),
        {"keepalive": {}},
    ]
    headers = {**client.headers(made), "Content-Type": "application/connect+json"}
    data = b"".join(framed(item) for item in given) + framed({}, 2)
    async with client.session.post(f"{client.url}/process.Process/StreamInput", data=data, headers=headers) as answer:
        assert answer.status == 200 and await answer.read() == framed({}).replace(b" ", b"") + framed({}, 2)
    assert (await client.call(made, "process.Process/CloseStdin", {"process": {"pid": pid}}))[0] == 200
    out = b""
    async for item in events:
        out += base64.b64decode(item.get("event", {}).get("data", {}).get("stdout", ""))
    assert out == b"x" * 60_000


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("filesystem.Filesystem/Stat", {"path": "/none"}, 404, "not_found"),
        ("filesystem.Filesystem/MakeDir", {"path": "/tmp"}, 409, "already_exists"),
        ("filesystem.Filesystem/MakeDir", {"path": "/etc/passwd"}, 400, "invalid_argument"),
        ("filesystem.Filesystem/ListDir", {"path": "/etc/passwd"}, 400, "invalid_argument"),
        ("filesystem.Filesystem/Move", {"source": "/none", "destination": "/tmp/x"}, 404, "not_found"),
        ("filesystem.Filesystem/CreateWatcher", {"path": "/none"}, 404, "not_found"),
        ("filesystem.Filesystem/CreateWatcher", {"path": "/etc/passwd"}, 400, "invalid_argument"),
        ("filesystem.Filesystem/GetWatcherEvents", {"watcherId": "none"}, 404, "not_found"),
        ("process.Process/SendSignal", {"process": {"pid": 1}, "signal": "SIGNAL_SIGKILL"}, 404, "not_found"),
        ("process.Process/SendInput", {"process": {"pid": 1}, "input": {"stdin": "eA=="}}, 404, "not_found"),
        ("process.Process/Update", {"process": 7}, 400, "invalid_argument"),
    ],
)
async def test_errors_of_single_calls(
    client: Client, made: dict[str, str], path: str, body: object, status: int, code: str
) -> None:
    got, answer = await client.call(made, path, body)
    assert (got, answer["code"]) == (status, code), answer


async def test_removing_nothing_is_no_error(client: Client, made: dict[str, str]) -> None:
    assert await client.call(made, "filesystem.Filesystem/Remove", {"path": "/none"}) == (200, {})


async def test_streams_that_are_no_streams(client: Client, made: dict[str, str]) -> None:
    kind = {**client.headers(made), "Content-Type": "application/connect+json"}
    for data in (b"", b"\0\0\0", framed({})[:-1], b"\0\xff\xff\xff\xff", framed(7), framed({}, 1)):
        async with client.session.post(f"{client.url}/process.Process/Start", data=data, headers=kind) as answer:
            raw = await answer.read()
            assert answer.status == 200 and raw[0] == 2, (data, raw)
            assert json.loads(raw[5:])["error"]["code"] in ("invalid_argument", "resource_exhausted", "unimplemented")


async def test_files_go_up_in_both_forms(client: Client, made: dict[str, str]) -> None:
    address, headers = f"{client.url}/files", client.headers(made)
    form = aiohttp.FormData(quote_fields=False)
    form.add_field("file", b"one", filename="/tmp/one")
    form.add_field("file", b"two", filename="two")
    async with client.session.post(address, data=form, headers=headers) as answer:
        assert [item["path"] for item in await answer.json()] == ["/tmp/one", "/home/user/two"]
    raw = {**headers, "Content-Type": "application/octet-stream"}
    async with client.session.post(address, params={"path": "~/deep/x"}, data=b"raw", headers=raw) as answer:
        assert await answer.json() == [{"name": "x", "type": "file", "path": "/home/user/deep/x"}]
    assert (await client.run(made, "stat -c %U deep deep/x two; cat /tmp/one two deep/x"))[
        0
    ] == "user\n" * 3 + "onetworaw"
    for params, status in (
        ({"path": "/none"}, 404),
        ({"path": "/tmp"}, 400),
        ({"path": "a", "username": "nobody-x"}, 401),
    ):
        async with client.session.get(address, params=params, headers=headers) as answer:
            assert (answer.status, (await answer.json())["code"]) == (status, status)


# --------------------------------------------------------------------------- who may


async def test_nobody_gets_in_without_a_key(client: Client, made: dict[str, str]) -> None:
    for headers in ({}, {"X-API-KEY": "e2b_" + "0" * 76}, {"X-API-KEY": "x"}):
        async with client.session.get(f"{client.url}/v2/sandboxes", headers=headers) as answer:
            assert (answer.status, (await answer.json())["code"]) == (401, 401)
    for token in (None, "", "x", made["envdAccessToken"][:-1] + "0", client.key):
        headers = client.headers(made)
        headers.pop("X-Access-Token") if token is None else headers.update({"X-Access-Token": token})
        if token == made["envdAccessToken"]:
            continue
        async with client.session.post(f"{client.url}/process.Process/List", json={}, headers=headers) as answer:
            assert (answer.status, (await answer.json())["code"]) == (401, "unauthenticated")


async def test_owners_do_not_see_each_other(client: Client, made: dict[str, str], served: Served) -> None:
    other = Client(client.session, client.url, await asyncio.to_thread(served.key))
    assert await other.control("GET", "/v2/sandboxes") == (200, [])
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/pause"), ("POST", "/connect"), ("POST", "/fork")):
        body = {} if method == "POST" else None
        assert (await other.control(method, f"/sandboxes/{made['sandboxID']}{path}", body))[0] == 404
    mine = await other.create()
    crossed = {**mine, "sandboxID": made["sandboxID"]}
    assert (await other.call(crossed, "process.Process/List", {}))[0] == 403
    await other.control("DELETE", f"/sandboxes/{mine['sandboxID']}")


async def test_the_token_of_a_sandbox_ends_with_its_key(client: Client, served: Served) -> None:
    token = await asyncio.to_thread(served.token)
    other = Client(client.session, client.url, e2b_spelling(token))
    mine = await other.create()
    assert (await other.call(mine, "process.Process/List", {}))[0] == 200
    async with served.daemon.client() as host:
        await host.call("DELETE", f"/v1/tokens/{split(token)[0]}", ApiToken)  # type: ignore[index]
        assert (await other.call(mine, "process.Process/List", {}))[0] == 401
        await (await host.get(mine["sandboxID"])).remove()


async def test_a_key_that_reads_runs_nothing(client: Client, served: Served) -> None:
    owner = {"owner": "shared"}
    maker = Client(client.session, client.url, await asyncio.to_thread(lambda: served.key(**owner)))
    reader = Client(client.session, client.url, await asyncio.to_thread(lambda: served.key(scope="read", **owner)))
    mine = await maker.create()
    _, [observed] = await reader.control("GET", "/v2/sandboxes")
    assert observed["sandboxID"] == mine["sandboxID"]
    assert (await reader.control("POST", f"/sandboxes/{mine['sandboxID']}/timeout", {"timeout": 5}))[0] == 403
    _, info = await reader.control("GET", f"/sandboxes/{mine['sandboxID']}")
    own = {**mine, "envdAccessToken": info["envdAccessToken"]}
    assert (await reader.call(own, "filesystem.Filesystem/Stat", {"path": "/tmp"}))[0] == 200
    assert (await reader.call(own, "process.Process/List", {}))[0] == 403
    await maker.control("DELETE", f"/sandboxes/{mine['sandboxID']}")


# --------------------------------------------------------------------------- the control plane


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"templateID": "no-such-image"}, 404, "template 'no-such-image' not found"),
        ({"mcp": {"x": {}}}, 501, "mcp"),
        ({"volumeMounts": [{"name": "a"}]}, 501, "volumeMounts"),
        ({"autoResume": {"enabled": True}}, 501, "autoResume"),
        ({"network": {"denyOut": ["10.0.0.0/8"]}}, 501, "denyOut"),
        ({"network": {"dnsServers": ["1.1.1.1"]}}, 501, "dnsServers"),
        ({"metadata": {"e2b.public": "yes"}}, 400, "e2b."),
        ({"timeout": -1}, 400, "timeout"),
        ({"envVars": {"A=B": "c"}}, 400, "A=B"),
    ],
)
async def test_what_cannot_be_made_is_refused_by_name(
    client: Client, body: dict[str, object], status: int, said: str
) -> None:
    got, answer = await client.control("POST", "/v2/sandboxes", {"templateID": "base", **body})
    assert (got, answer["code"]) == (status, status) and said in answer["message"]


async def test_paths_that_are_not_served_say_so(client: Client) -> None:
    for method, path in (("POST", "/volumes"), ("GET", "/volumes/x"), ("GET", "/secrets"), ("PATCH", "/templates/x")):
        status, answer = await client.control(method, path, {} if method == "POST" else None)
        assert (status, answer["code"]) == (501, 501) and "not served" in answer["message"]
    assert "snapshot" in (await client.control("POST", "/volumes", {}))[1]["message"]


async def test_templates_are_built_by_administrators_each_for_its_owner(client: Client, served: Served) -> None:
    name = "template-of-a-test"
    assert (await client.control("POST", "/v3/templates", {"name": name}))[0] == 403  # a key of scope exec
    assert (await client.control("GET", f"/templates/aliases/{name}"))[0] == 404
    key = await asyncio.to_thread(lambda: served.key(scope="admin"))
    admin = Client(client.session, client.url, key)
    status, answer = await admin.control("POST", "/v3/templates", {"name": "debian"})
    assert (status, "no template" in answer["message"]) == (409, True)  # it would replace an image
    for wrong in ("", "A b", "../x"):
        assert (await admin.control("POST", "/v3/templates", {"name": wrong}))[0] == 400
    status, asked = await admin.control("POST", "/v3/templates", {"name": f"{name}:v1", "tags": ["v2"]})
    assert (status, asked["names"], asked["tags"]) == (202, [f"{name}:v1", f"{name}:v2"], ["v1", "v2"])
    number = "ab" * 32
    status, place = await admin.control("GET", f"/templates/{name}/files/{number}")
    assert (status, place["present"]) == (201, False)
    forged = place["url"][:-1] + ("1" if place["url"].endswith("0") else "0")
    for address, code in ((forged, 403), (place["url"], 200)):
        async with client.session.put(address, data=b"archive") as answered:
            assert answered.status == code
    assert (await admin.control("GET", f"/templates/{name}/files/{number}"))[1]["present"] is True
    build = f"/v2/templates/{name}/builds/{asked['buildID']}"
    step = {"type": "RUN", "args": ["true\nUSER root", "root\nRUN x"]}
    assert (await admin.control("POST", build, {"fromImage": "debian", "steps": [step]}))[0] == 400
    assert (await client.control("GET", f"/templates/{name}/builds/{asked['buildID']}/status"))[0] in (403, 404)
    assert (await admin.control("DELETE", f"/templates/{name}"))[0] == 404


async def test_a_call_sent_again_makes_one_sandbox(client: Client) -> None:
    body = {"templateID": "base", "allow_internet_access": False}
    answers = [await client.control("POST", "/v2/sandboxes", body, **{"Idempotency-Key": "same-1"}) for _ in range(2)]
    assert answers[0] == answers[1]
    assert (await client.control("DELETE", f"/sandboxes/{answers[0][1]['sandboxID']}"))[0] == 204


async def test_pages_of_the_list(client: Client, served: Served) -> None:
    other = Client(client.session, client.url, await asyncio.to_thread(served.key))
    made = [await other.create(metadata={"n": str(number), "k": "a b"}) for number in range(3)]
    observed: list[str] = []
    token = ""
    while True:
        query = f"/v2/sandboxes?limit=2&metadata=k%3Da%252520b{token}"
        async with other.session.get(other.url + query, headers={"X-API-KEY": other.key}) as answer:
            observed += [item["metadata"]["n"] for item in await answer.json()]
            if (following := answer.headers.get("x-next-token")) is None:
                break
            token = f"&nextToken={following}"
    assert observed == ["2", "1", "0"]
    for item in made:
        await other.control("DELETE", f"/sandboxes/{item['sandboxID']}")


async def test_the_end_of_a_sandbox_can_be_moved(client: Client) -> None:
    made = await client.create(timeout=100_000)
    path = f"/sandboxes/{made['sandboxID']}"
    assert (await client.control("POST", f"{path}/connect", {"timeout": 10}))[0] == 200  # never shorter
    _, info = await client.control("GET", path)
    assert info["endAt"] > info["startedAt"][:8] + "99" or info["endAt"][:10] != info["startedAt"][:10]
    assert (await client.control("POST", f"{path}/timeout", {"timeout": 0}))[0] == 204

    async def gone() -> bool:
        return (await client.control("GET", path))[0] == 404

    await until(gone)
    assert await client.control("POST", f"{path}/timeout", {"timeout": 9}) != (204, None)
    async with client.session.get(f"{client.url}/health", headers=client.headers(made)) as answer:
        assert (answer.status, (await answer.json())["message"]) == (502, "The sandbox was not found")


async def test_a_paused_one_is_forked_and_resumed(client: Client, made: dict[str, str]) -> None:
    path = f"/sandboxes/{made['sandboxID']}"
    await client.run(made, "echo kept > /home/user/f; (sleep 3600 >/dev/null 2>&1 &)")
    assert (await client.control("POST", f"{path}/pause", {}))[0] == 204
    assert (await client.control("POST", f"{path}/pause", {}))[0] == 409
    status, [child] = await client.control("POST", f"{path}/fork", {"timeout": 600})
    assert status == 201
    assert (await client.run(child["sandbox"], "cat f; pgrep -c sleep"))[0] == "kept\n1\n"
    await client.control("DELETE", f"/sandboxes/{child['sandbox']['sandboxID']}")
    assert (await client.control("POST", f"{path}/connect", {"timeout": 600}))[0] == 201
    assert (await client.run(made, "cat f"))[0] == "kept\n"


# --------------------------------------------------------------------------- ports

SERVER = """
import asyncio
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Echo(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer = (self.path + "|" + "|".join(f"{k}: {v}" for k, v in self.headers.items()) + "|").encode() + body
        self.send_response(201); self.send_header("Set-Cookie", "a=1"); self.send_header("Set-Cookie", "b=2")
        self.send_header("Content-Length", str(len(answer))); self.end_headers(); self.wfile.write(answer)
    def do_GET(self):
        if self.path == "/switch":
            self.send_response(101); self.send_header("Upgrade", "odd"); self.end_headers()
            return
        self.send_response(200); self.send_header("Content-Type", "text/event-stream"); self.end_headers()
        self.wfile.write(b"data: first\\n\\n"); self.wfile.flush()
        import os, time
        while not os.path.exists("/tmp/go"): time.sleep(0.02)
        self.wfile.write(b"data: second\\n\\n")
ThreadingHTTPServer(("127.0.0.1", 8000), Echo).serve_forever()
"""


async def test_http_to_a_port(client: Client, made: dict[str, str]) -> None:
    await put(client, made, "/tmp/server.py", SERVER)
    events = client.stream(made, "process.Process/Start", start("exec python3 /tmp/server.py"))
    await anext(events)
    token = {"E2b-Traffic-Access-Token": made["trafficAccessToken"]}
    there = {**token, "Host": f"8000-{made['sandboxID']}.localhost"}

    address = URL(f"{client.url}/v1/sandboxes?a=%2F", encoded=True)

    async def listens() -> bool:
        async with client.session.post(address, data=b"body", headers=there) as answer:
            if answer.status == 502:
                assert (await answer.json())["message"] == "The sandbox is running but port is not open"
                return False
            text = await answer.text()
            assert re.fullmatch("[0-9a-f]{16}", answer.headers["X-Request-Id"])
            assert answer.status == 201 and answer.headers.getall("Set-Cookie") == ["a=1", "b=2"]
            assert text.startswith("/v1/sandboxes?a=%2F|Host: 8000-") and text.endswith("|body")
            assert "token" not in text.lower() and made["trafficAccessToken"] not in text
            return True

    await until(listens)
    await desynchronises_nothing(client, {**token, "E2b-Sandbox-Id": made["sandboxID"], "E2b-Sandbox-Port": "8000"})
    visitor = client.headers({**made, "envdAccessToken": made["trafficAccessToken"]})  # of a port: reads no files
    async with client.session.get(f"{client.url}/files", params={"path": "/etc/hosts"}, headers=visitor) as answer:
        assert answer.status == 401
    by_header = {**token, "E2b-Sandbox-Id": made["sandboxID"], "E2b-Sandbox-Port": "8000"}
    async with client.session.get(f"{client.url}/events", headers=by_header) as answer:
        assert await answer.content.readuntil(b"\n\n") == b"data: first\n\n"  # before the second one is there
        await client.run(made, "touch /tmp/go")
        assert await answer.content.read() == b"data: second\n\n"
    await events.aclose()  # type: ignore[attr-defined]


async def desynchronises_nothing(client: Client, there: dict[str, str]) -> None:
    """A proxy in front of this one, and the server in the sandbox, see one request as one, and none of our tokens."""
    key = {**there, "Authorization": f"Bearer {client.key}"}
    async with client.session.post(f"{client.url}/x", data=b"", headers=key) as answer:
        assert "authorization" not in (await answer.text()).lower()
    own = {**there, "Authorization": "Bearer of-an-application"}
    async with client.session.post(f"{client.url}/x", data=b"", headers=own) as answer:
        assert "of-an-application" in await answer.text()
    async with client.session.get(f"{client.url}/switch", headers=there) as answer:
        assert answer.status == 502
    absolute = "POST http://evil.example/abs?x=1 HTTP/1.1"
    for line, status, body in ((absolute, b" 201 ", b"/abs?x=1|"), ("CONNECT 127.0.0.1:22 HTTP/1.1", b" 400 ", b"")):
        reader, writer = await asyncio.open_connection(URL(client.url).host, URL(client.url).port)
        head = [
            line,
            "Host: localhost",
            *(f"{name}: {value}" for name, value in there.items()),
            "Content-Length: 0",
            "Connection: close",
        ]
        writer.write("\r\n".join([*head, "", ""]).encode())
        answered = await reader.read()
        writer.close()
        assert status in answered.split(b"\r\n")[0] and body in answered and b"127.0.0.1127" not in answered


SOCKET_SERVER = """
import base64, hashlib, socket
server = socket.create_server(("127.0.0.1", 8001))
while True:
    peer, _ = server.accept()
    head = b""
    while not head.endswith(b"\\r\\n\\r\\n"):
        more = peer.recv(1)
        if not more: break
        head += more
    lines = dict(line.split(": ", 1) for line in head.decode().split("\\r\\n")[1:] if ": " in line)
    named = {name.lower(): value for name, value in lines.items()}
    if "sec-websocket-key" not in named:
        peer.close(); continue
    key = named["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
    accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
    peer.sendall(("HTTP/1.1 101 Switching Protocols\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\n"
                  f"Sec-WebSocket-Protocol: {named['sec-websocket-protocol'].split(',')[0]}\\r\\n"
                  f"Sec-WebSocket-Accept: {accept}\\r\\n\\r\\n").encode())
    while True:
        first = peer.recv(2)
        if len(first) < 2 or first[0] & 15 == 8: break
        size = first[1] & 127
        mask, data = peer.recv(4), peer.recv(size) if size else b""
        data = bytes(byte ^ mask[i % 4] for i, byte in enumerate(data))
        if first[0] & 15 in (1, 2):
            peer.sendall(bytes([first[0], size]) + data[::-1])
    peer.close()
"""


async def test_web_sockets_to_a_port(client: Client, made: dict[str, str]) -> None:
    await put(client, made, "/tmp/socket_server.py", SOCKET_SERVER)
    events = client.stream(made, "process.Process/Start", start("exec python3 /tmp/socket_server.py"))
    await anext(events)
    headers = {
        "E2b-Traffic-Access-Token": made["trafficAccessToken"],
        "Host": f"8001-{made['sandboxID']}.localhost",
    }

    async def connected() -> aiohttp.ClientWebSocketResponse | None:
        try:
            return await client.session.ws_connect(client.url, headers=headers, protocols=["first", "second"])
        except aiohttp.WSServerHandshakeError as error:
            assert error.status == 502
            return None

    socket = await until(connected)
    assert socket is not None and socket.protocol == "first"
    await socket.send_str("text")
    assert await socket.receive_str() == "txet"
    await socket.send_bytes(b"\0\1\2")
    assert await socket.receive_bytes() == b"\2\1\0"
    await socket.close()
    await events.aclose()  # type: ignore[attr-defined]


async def put(client: Client, made: dict[str, str], path: str, text: str) -> None:
    """Write a file of a sandbox."""
    headers = {**client.headers(made), "Content-Type": "application/octet-stream"}
    async with client.session.post(
        f"{client.url}/files", params={"path": path}, data=text.encode(), headers=headers
    ) as answer:
        assert answer.status == 200


async def test_ports_are_their_owners_unless_opened(client: Client) -> None:
    closed = await client.create()
    opened = await client.create(network={"allowPublicTraffic": True})
    for made, status in ((closed, 401), (opened, 502)):
        headers = {"Host": f"8000-{made['sandboxID']}.localhost"}
        async with client.session.get(client.url, headers=headers) as answer:
            assert answer.status == status
        envd = {"Host": f"49983-{made['sandboxID']}.localhost"}
        async with client.session.get(f"{client.url}/files?path=/etc/passwd", headers=envd) as answer:
            assert answer.status == 401
        await client.control("DELETE", f"/sandboxes/{made['sandboxID']}")
    async with client.session.get(client.url, headers={"E2b-Sandbox-Id": closed["sandboxID"]}) as answer:
        assert answer.status == 400


async def test_the_next_daemon_goes_on(client: Client, made: dict[str, str], served: Served) -> None:
    """Tokens, addresses and commands are good for it, too; a command whose output nobody takes does not wait."""
    command = "head -c 20000000 /dev/zero; touch /tmp/wrote; until [ -e /tmp/end ]; do sleep 0.05; done; exit 6"
    events = client.stream(made, "process.Process/Start", start(command, tag="lasting"))
    await anext(events)
    await asyncio.to_thread(served.restart)
    status, listed = await client.call(made, "process.Process/List", {})
    assert status == 200 and [item["tag"] for item in listed["processes"]] == ["lasting"]
    late = client.stream(made, "process.Process/Connect", {"process": {"tag": "lasting"}})
    await anext(late)

    async def wrote() -> bool:
        return (await client.call(made, "filesystem.Filesystem/Stat", {"path": "/tmp/wrote"}))[0] == 200

    reading = asyncio.ensure_future(_rest(late))
    await until(wrote)
    await put(client, made, "/tmp/end", "")
    assert (await reading)[-2]["event"]["end"]["exitCode"] == 6


async def _rest(events: AsyncIterator[dict[str, Any]]) -> list[dict[str, Any]]:
    return [item async for item in events]


async def test_the_description_holds_every_path(client: Client) -> None:
    async with client.session.get(f"{client.url}/e2b/openapi.json") as answer:
        made = await answer.json(content_type="application/json")
    openapi_spec_validator.validate(made)
    for path in ("/v2/sandboxes", "/sandboxes/{id}/fork", "/v3/templates", "/process.Process/Start", "/files"):
        assert path in made["paths"], path
    assert made["paths"]["/files"]["post"]["security"] == [{"sandbox": []}]
