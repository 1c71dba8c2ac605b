"""Sandboxes that move while something inside works: a process with memory, a service with a database and its client."""

from __future__ import annotations

import asyncio
import time

from bench.harness.own_daemon import IMAGE
from sandbox import Client, Sandbox
from sandbox.messages.cluster import HostInfo, MoveRequest, MoveResult, PlaceInfo

RETRY_DELAY = 1.0  # seconds between two moves
TIMEOUT = 20.0  # seconds in which what runs inside must show that it goes on
READY = "while [ ! -e /ready ]; do sleep 0.05; done"
MEMORY = """cat > /holder.py <<'E'
import os, time
held, number = os.urandom({bytes}), 0
while True:
    number += 1
    open("/count.new", "w").write(str(number))
    os.rename("/count.new", "/count")
    open("/ready", "w").close()
    time.sleep(0.1)
E
setsid python3 /holder.py > /dev/null 2> /wrong < /dev/null & """
# The client has one connection for all its questions, which must come through each move with the rest.
SERVICE = """cat > /server.py <<'E'
import http.server, sqlite3
table = sqlite3.connect("/db")
table.execute("create table t(a, b)")
table.executemany("insert into t values (?, ?)", ((i, "x" * 50) for i in range(2000)))
table.commit()
class Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        table.execute("insert into t values (?, ?)", (self.path, "y" * 50))
        table.commit()
        text = str(table.execute("select count(*) from t").fetchone()[0] - 2000).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
server = http.server.HTTPServer(("127.0.0.1", 8000), Answers)
open("/listens", "w").close()
server.serve_forever()
E
cat > /client.py <<'E'
import http.client, os, time
connection, number = http.client.HTTPConnection("127.0.0.1", 8000), 0
while True:
    number += 1
    connection.auto_open = number == 1
    connection.request("POST", "/" + str(number))
    told = int(connection.getresponse().read())
    assert told == number, (told, number)
    open("/count.new", "w").write(str(number))
    os.rename("/count.new", "/count")
    open("/ready", "w").close()
    time.sleep(0.1)
E
setsid python3 /server.py > /dev/null 2> /wrong.server < /dev/null & while [ ! -e /listens ]; do sleep 0.05; done
setsid python3 /client.py > /dev/null 2> /wrong < /dev/null & """


async def move(client: Client, what: str, count: int, megabytes: int) -> tuple[list[MoveResult], list[str]]:
    """Let a sandbox with that at work inside go on elsewhere, `count` times; and what was wrong inside afterwards."""
    sandbox = await client.create(IMAGE)
    script = SERVICE if what == "http" else MEMORY.format(bytes=megabytes << 20)
    await sandbox.exec(script + READY, timeout=120)
    moves, wrong = [], []
    for number in range(count):
        here = await _where(client, sandbox)
        infos = await client.call("GET", "/v1/cluster/hosts", list[HostInfo])
        target = next(info.name for info in infos if info.name != here and info.state == "alive")
        before = await _count(sandbox)
        required = MoveRequest(sandbox=sandbox.id, host=target)
        moves.append(await client.call("POST", "/v1/cluster/moves", MoveResult, required))
        if trouble := await _stopped(sandbox, before):
            wrong.append(f"move {number}: {trouble}")
        await asyncio.sleep(RETRY_DELAY)
    await sandbox.remove()
    return moves, wrong


async def _where(client: Client, sandbox: Sandbox) -> str:
    places = await client.call("GET", "/v1/cluster/places", list[PlaceInfo])
    return next(place.host for place in places if place.sandbox == sandbox.id)


async def _count(sandbox: Sandbox) -> int:
    return int((await sandbox.exec("cat /count")).text)


async def _stopped(sandbox: Sandbox, before: int) -> str:
    """Why it does not count on from where it was; nothing if it does, without a complaint."""
    deadline, first = time.monotonic() + TIMEOUT, await _count(sandbox)
    if first < before:
        return f"counted {before} before and {first} afterwards"
    while await _count(sandbox) < first + 3:
        if time.monotonic() > deadline:
            return f"stands at {first}; {(await sandbox.exec('cat /wrong /wrong.server')).text[-300:]}"
        await asyncio.sleep(0.1)
    return (await sandbox.exec("cat /wrong")).text[-300:]
