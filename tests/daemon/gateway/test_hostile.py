"""What a hostile sandbox, a hostile upstream and a slow reader can do to the gateway: nothing to anybody else."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from pathlib import Path

import pytest

from daemon.gateway.listener import MAX_CONNECTIONS
from daemon.gateway.wire import MAX_ANSWER, MAX_BODY
from sandbox import Client, Sandbox
from sandbox.messages import Gateway
from tests.daemon.gateway.test_inside import _request
from tests.support.daemon_host import IMAGE, Daemon, init_of, until
from tests.support.gateway_upstream import Upstream, broken, endless

GATEWAY = Gateway(upstream="scripted")


SAY = r"""
import socket, sys
said = sys.stdin.buffer.read()
peer = socket.create_connection(("127.0.0.1", 7000))
peer.settimeout(60)
try:
    peer.sendall(said)
except OSError:
    pass
heard = bytearray()
try:
    while part := peer.recv(65536):
        heard += part
except OSError:
    pass
sys.stdout.buffer.write(heard)
"""


async def say(sandbox: Sandbox, said: bytes) -> bytes:
    """Bytes to the gateway as they are; what it answers until it closes."""
    result = await sandbox.exec(["python3", "-c", SAY], stdin=said, ends_turn=False, timeout=240)
    return result.stdout


def post(body: bytes, *headers: str, path: str = "/v1/chat/completions") -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: x", "Connection: close", *headers]
    if not any(header.lower().startswith(("content-length", "transfer-encoding")) for header in headers):
        head.append(f"Content-Length: {len(body)}")
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (post(b"{"), b"400"),
        (post(b"[]"), b"400"),
        (post(b'{"a":' * 50_000), b"400"),
        (post(b"", f"Content-Length: {MAX_BODY + 1}"), b"400"),
        (post(b"\x1f\x8b", "Content-Encoding: gzip"), b"400"),
        (post(b"{}", "Content-Encoding: zstd"), b"400"),
        (post(b"{}", "Content-Encoding: br"), b"400"),
        (post(gzip.compress(bytes(MAX_BODY + 1)), "Content-Encoding: gzip"), b"400"),
        (post(b"{}", "Expect: 200-ok"), b"400"),
        (post(b'{"messages": []}', "anthropic-beta: " + "x" * 8001, path="/v1/messages"), b"400"),
        (post(b"zz\r\n", "Transfer-Encoding: chunked"), b"400"),
        (post(b"{}", path="/v1/sandboxes"), b"404"),
        (post(b"{}", path="//v1/messages"), b"404"),
        (post(b"{}", path="/v1/messages/../sandboxes"), b"404"),
        (post(b"{}", path="http://169.254.169.254/latest"), b"404"),
        (post(b"{}", path="/v1/messages?" + "x" * 2000), b"400"),
        (b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"40"),
        (b"GET / HTTP/1.1\r\nHost: " + b"x" * 100_000 + b"\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"400"),
    ],
)  # fmt: skip
async def test_hostile_requests_are_refused_and_reach_nobody(
    inside: Sandbox, upstream: Upstream, said: bytes, status: bytes
) -> None:
    last_seen = await say(inside, said)
    assert last_seen.split(b" ")[1].startswith(status), last_seen[:200]
    assert upstream.requested == []
    assert await inside.turns() == []
    assert (await _request(inside, "/v1/models"))[0] == 200  # it still serves


async def test_what_fails_and_what_is_beside_the_main_loop_counts(
    host: Client, inside: Sandbox, upstream: Upstream
) -> None:
    async def recorded() -> int:
        return (await host.gateway.statistics()).journal_bytes

    upstream.status = 500
    before = await recorded()
    for fields, number in (({"max_tokens": 1}, 3), ({}, 2)):  # beside it, and of it
        for _ in range(number):
            text = os.urandom(50_000).hex()
            body = {
                "messages": [{"role": "user", "content": text[at : at + 10_000]} for at in range(0, 100_000, 10_000)]
            }
            assert b" 500 " in (await say(inside, post(json.dumps({**body, **fields}).encode())))[:20]
        assert await recorded() - before > number * 50_000
        before = await recorded()


async def test_a_body_without_end_is_cut_off(inside: Sandbox, upstream: Upstream) -> None:
    script = r"""
import socket
peer = socket.create_connection(("127.0.0.1", 7000))
peer.sendall(b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
sent, chunk = 0, b"10000\r\n" + b"x" * 65536 + b"\r\n"
try:
    while sent < 64 << 30:
        peer.sendall(chunk)
        sent += 65536
except OSError:
    pass
print(sent)
"""
    result = await inside.exec(["python3", "-c", script], ends_turn=False, timeout=240)
    assert MAX_BODY <= int(result.text) < 64 << 30
    assert upstream.requested == []


async def test_an_answer_without_end_is_cut_off(inside: Sandbox, upstream: Upstream) -> None:
    upstream.reply = lambda _: endless
    last_seen = await say(inside, post(b'{"messages": [], "stream": true}'))
    assert b"HTTP/1.1 200" in last_seen[:40]
    assert not last_seen.endswith(b"0\r\n\r\n")  # it never looks whole
    assert MAX_ANSWER - (2 << 20) < upstream.sent < MAX_ANSWER + (64 << 20)
    await until(lambda: _failed(inside), "it is recorded")


async def test_an_answer_that_breaks_off_never_looks_whole(inside: Sandbox, upstream: Upstream) -> None:
    upstream.reply = lambda _: broken
    last_seen = await say(inside, post(b'{"messages": [], "stream": true}'))
    assert not last_seen.endswith(b"0\r\n\r\n")
    await until(lambda: _failed(inside), "it is recorded")


SLOW = r"""
import os, socket, time
peer = socket.create_connection(("127.0.0.1", 7000))
body = b'{"messages": [], "stream": true}'
peer.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
peer.recv(1024)
open("/reading", "w")
while not os.path.exists("/go"):
    time.sleep(0.02)
total, last = 0, b""
while part := peer.recv(1 << 20):
    total += len(part)
    last = (last + part)[-64:]
    if b"[DONE]" in last:
        break
print(total)
"""


async def test_a_slow_reader_slows_the_upstream_down(inside: Sandbox, upstream: Upstream) -> None:
    total = 24 << 20

    async def much(upstream: Upstream, request: object) -> object:
        from aiohttp import web

        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)  # type: ignore[arg-type]
        chunk = b"data: " + b"x" * 65_000 + b"\n\n"
        while upstream.sent < total:
            await response.write(chunk)
            upstream.sent += len(chunk)
        await response.write(b"data: [DONE]\n\n")
        return response

    upstream.reply = lambda _: much
    running = asyncio.create_task(inside.exec(["python3", "-c", SLOW], ends_turn=False, timeout=240))
    sent = -1
    while sent != upstream.sent or not sent:  # until it moves no more
        sent = upstream.sent
        await asyncio.sleep(1.0)
    assert sent < total  # the window and what the kernel holds, not the whole
    await inside.files.write("/go", b"")
    assert int((await running).text) >= total - 4096
    assert (await inside.gateway.exchanges())[0].state == "answered"


FLOOD = r"""
import socket, sys, time
peers, refused = [], 0
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    try:
        peer = socket.create_connection(("127.0.0.1", 7000), timeout=0.2)
        peer.sendall(b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n{" * 20)
        peers.append(peer)
        if len(peers) > 500:
            peers.pop(0).close()
    except OSError:
        refused += 1
print(len(peers), refused)
"""


async def test_a_flood_slows_only_itself_down(
    host: Client, inside: Sandbox, upstream: Upstream, daemon: Daemon
) -> None:
    assert daemon.process is not None
    descriptors = Path(f"/proc/{daemon.process.pid}/fd")
    async with host.create(IMAGE, gateway=GATEWAY) as other:
        before = len(os.listdir(descriptors))
        flood = asyncio.create_task(inside.exec(["python3", "-c", FLOOD, "6"], ends_turn=False, timeout=240))
        worst = 0
        for number in range(5):
            status, answer = await _request(other, "/v1/chat/completions", {"messages": [number]})
            assert status == 200, answer
            await host.health()
            worst = max(worst, len(os.listdir(descriptors)))
        assert worst - before <= MAX_CONNECTIONS + 40
        await flood

    async def served() -> bool:  # what it had sent before is worked off first
        status, _ = await _request(inside, "/v1/models")
        assert status in (200, 429)
        return status == 200

    await until(served, "the flood is worked off")
    assert upstream.requested  # the neighbour's
    assert await inside.turns() == []


async def test_a_sandbox_cannot_speak_for_another(host: Client, inside: Sandbox, upstream: Upstream) -> None:
    """Its socket says who it is. Tokens, headers and addresses change nothing, and no other socket is in reach."""
    async with host.create(IMAGE, gateway=Gateway(upstream="scripted", agent="outside")) as victim:
        token = (await victim.gateway.token()).token
        forged = {
            "Authorization": f"Bearer {token}",
            "X-Api-Key": token,
            "X-Pagurus-Sandbox": victim.id,
            "X-Forwarded-For": "127.0.0.1",
            "Host": victim.id,
        }
        assert (await _request(inside, "/v1/chat/completions", {"messages": []}, forged))[0] == 200
        assert await victim.gateway.exchanges() == []
        assert len(await inside.gateway.exchanges()) == 1
        assert token not in json.dumps(upstream.headers)
    reach = "import socket; s = socket.socket(); s.settimeout(1); s.connect(('127.0.0.1', %d))"
    result = await inside.exec(["python3", "-c", reach % upstream.port], ends_turn=False)
    assert result.exit_code == 1  # the host's loopback is another one
    assert b"refused" in result.stderr


async def test_nobody_takes_the_port_while_no_daemon_lives(host: Client, upstream: Upstream, daemon: Daemon) -> None:
    """The sandbox's shim keeps the socket: a process that tries again and again is refused."""
    sandbox = await host.create(IMAGE, gateway=GATEWAY)
    take = "import socket,time; s=socket.create_server(('127.0.0.1', 7000)); open('/taken','w'); time.sleep(1000)"
    tries = f'n=0; until python3 -c "{take}"; do n=$((n+1)); echo $n > /tries.new; mv /tries.new /tries; done'
    await sandbox.files.write("/take.sh", tries)
    await sandbox.exec("setsid sh /take.sh >/dev/null 2>&1 &", ends_turn=False)
    await until(lambda: _tried(Path(f"/proc/{init_of(sandbox.id)}/root")) > 0, "it tries")
    daemon.kill()
    root = Path(f"/proc/{init_of(sandbox.id)}/root")
    before = _tried(root)
    await until(lambda: _tried(root) >= before + 2, "it has tried since")
    assert not (root / "taken").exists()
    await asyncio.to_thread(daemon.start)
    async with daemon.client() as again:
        sandbox = await again.get(sandbox.id)
        assert (await _request(sandbox, "/v1/models"))[0] == 200
        await sandbox.remove()


async def _failed(sandbox: Sandbox) -> bool:
    return [item.state for item in await sandbox.gateway.exchanges()] == ["failed"]


def _tried(root: Path) -> int:
    """How often, without asking a daemon."""
    try:
        return int((root / "tries").read_text())
    except FileNotFoundError:
        return 0
