"""Do real services go on after kills, verified restores and forks, with what their clients had under way?

::

    pagurus bench services [--json] [--only WORD,...] [--rounds N] [--tree FOLDER]

Each service (postgres and mariadb with open transactions, redis, rabbitmq with a consumer, celery, nginx with idle
clients, node, a JVM, Chromium with a page, jupyter with a kernel, tmux with vim, sshd, cron, gunicorn) is started in a
sandbox and used. Then, --rounds times: it is checkpointed, all of its processes are killed, it is restored with verify
twice, and used after each; at last it is forked with verify, and used in the fork. `make test-parity` makes the tree.

Of each service: `ok`, or `error` and at which `step`; `seconds`, `frozen_ms` of each checkpoint (0: the turn before had
one already).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness import aftermath, command
from bench.harness.own_daemon import IMAGE, BenchHost, tasks
from sandbox import Client, Limits, Sandbox
from sandbox.errors import PagurusError

TREE = Path("/var/lib/pagurus/parity/tree")
LIMITS = Limits(memory="2GiB", processes=1000)
TIMEOUT = 120.0


@dataclass(frozen=True)
class Service:
    """How one is started, how it is used, and what the use prints each time."""

    start: str
    use: str
    says: str


_GET = r"""get() {
    bash -c 'exec 3<>/dev/tcp/127.0.0.1/'$1'; printf "GET / HTTP/1.0\r\n\r\n" >&3; timeout 20 cat <&3'
}
"""
_IDLE = "bash -c 'exec 3<>/dev/tcp/127.0.0.1/%d; exec sleep 100000' >/dev/null 2>&1 &\n"
_UNTIL = "until %s; do sleep 0.1; done\n"

_PSQL = """
sed -i 's/scram-sha-256/trust/; s/peer/trust/' /etc/postgresql/15/main/pg_hba.conf
pg_ctlcluster 15 main start
until psql -U postgres -c 'create table t(v int)' >/dev/null 2>&1; do sleep 0.2; done
for way in /var/run/postgresql 127.0.0.1; do
    name=$(basename $way); mkfifo /tmp/$name; sleep 100000 > /tmp/$name &
    psql -U postgres -h $way -At < /tmp/$name > /tmp/$name.out 2>&1 &
    echo 'begin; insert into t values (1); select 7;' > /tmp/$name
    until grep -q 7 /tmp/$name.out; do sleep 0.1; done
done >/dev/null 2>&1
"""
_PSQL_USE = """
for name in postgresql 127.0.0.1; do
    : > /tmp/$name.out; echo 'select count(*) from t;' > /tmp/$name
    until [ -s /tmp/$name.out ]; do sleep 0.1; done; tr -d '\\0' < /tmp/$name.out
done
psql -U postgres -Atc 'select count(*) from t'
"""
_NODE = """mkdir -p /tmp/w; cat > /tmp/s.js <<'S'
let ticks = 0, seen = 0
require("fs").watch("/tmp/w", () => { seen++ })
setInterval(() => { ticks++ }, 50)
require("http").createServer((_, answer) => {
    answer.end(ticks > 0 && seen > 0 ? "watched and ticking" : "ticks " + ticks + ", seen " + seen) }).listen(3000)
S
node /tmp/s.js >/tmp/s.log 2>&1 &
"""
_JAVA = """cat > /tmp/S.java <<'S'
import com.sun.net.httpserver.*; import java.net.*; import java.util.concurrent.*; import java.util.concurrent.atomic.*;
class S { public static void main(String[] a) throws Exception {
    var ticks = new AtomicInteger();
    Executors.newScheduledThreadPool(2).scheduleAtFixedRate(ticks::incrementAndGet, 50, 50, TimeUnit.MILLISECONDS);
    var server = HttpServer.create(new InetSocketAddress("127.0.0.1", 8080), 0);
    server.createContext("/", e -> { int seen = ticks.get(); try { Thread.sleep(300); } catch (Exception x) { }
        byte[] said = (ticks.get() > seen ? "ticking" : "stuck").getBytes();
        e.sendResponseHeaders(200, said.length); e.getResponseBody().write(said); e.close(); });
    server.start(); } }
S
cd /tmp && java S.java >/tmp/s.log 2>&1 &
"""

_MARIADB = """
mkdir -p /run/mysqld; chown mysql /run/mysqld; mariadbd-safe --user=mysql >/dev/null 2>&1 &
until mysqladmin ping >/dev/null 2>&1; do sleep 0.2; done
mysql -e 'create database d; create table d.t(v int) engine=innodb;
    create user u@"127.0.0.1"; grant all on d.* to u@"127.0.0.1"'
for way in '--protocol=socket' '-u u -h 127.0.0.1'; do
    name=${way##* }; mkfifo /tmp/$name; sleep 100000 > /tmp/$name &
    mysql $way -nNB d < /tmp/$name > /tmp/$name.out 2>&1 &
    echo 'begin; insert into t values (1); select 7;' > /tmp/$name
    until grep -q 7 /tmp/$name.out; do sleep 0.1; done
done >/dev/null 2>&1
"""
_MARIADB_USE = """
for name in --protocol=socket 127.0.0.1; do
    : > /tmp/$name.out; echo 'select count(*) from t;' > /tmp/$name
    until [ -s /tmp/$name.out ]; do sleep 0.1; done; tr -d '\\0' < /tmp/$name.out
done
mysql -NBe 'select count(*) from t' d
"""
_RABBIT = """
export HOME=/root LC_ALL=C.UTF-8; rabbitmq-server >/tmp/rabbit.log 2>&1 &
until rabbitmqctl await_startup >/dev/null 2>&1; do sleep 1; done
cat > /tmp/consumer.py <<'P'
from kombu import Connection, Queue
with Connection("amqp://") as broker, broker.channel() as channel:
    queue = Queue("q", channel=channel); queue.declare()
    with broker.Consumer(queue, callbacks=[lambda body, message: (open("/tmp/heard", "w").write(body), message.ack())]):
        open("/tmp/consumes", "w").close()
        while True:
            broker.drain_events()
P
python3 /tmp/consumer.py >/tmp/consumer.log 2>&1 &
"""
_RABBIT_USE = """rm -f /tmp/heard; python3 - <<'P'
from kombu import Connection
with Connection("amqp://") as broker:
    broker.Producer(serializer="json").publish("hop", routing_key="q")
P
until [ -s /tmp/heard ]; do sleep 0.1; done; cat /tmp/heard
"""
_CELERY = """
redis-server --daemonize yes >/dev/null; mkdir -p /tmp/c; cd /tmp/c
cat > t.py <<'P'
from celery import Celery
app = Celery("t", broker="redis://", backend="redis://")
@app.task
def double(x): return 2 * x
P
celery -A t worker -c 2 >/tmp/s.log 2>&1 &
"""
_CELERY_USE = "cd /tmp/c; python3 -c 'from t import double; print(double.delay(21).get(timeout=60))'"
_JUPYTER = """
python3 -m ipykernel_launcher -f /tmp/kernel.json >/tmp/kernel.log 2>&1 &
jupyter-notebook --allow-root --no-browser --NotebookApp.token= --port 8888 >/tmp/s.log 2>&1 &
cat > /tmp/asks.py <<'P'
import sys
from jupyter_client import BlockingKernelClient
client = BlockingKernelClient(connection_file="/tmp/kernel.json")
client.load_connection_file(); client.start_channels(); client.wait_for_ready(timeout=60)
client.execute_interactive(sys.argv[1], timeout=60)
P
until [ -s /tmp/kernel.json ] && python3 /tmp/asks.py 'x = 6 * 7' >/dev/null 2>&1; do sleep 0.5; done
"""
_JUPYTER_USE = "python3 /tmp/asks.py 'print(x)'; get 8888 | head -n 1 | tr -d '\\r'"
_CHROMIUM = """
echo '<title>t</title><script>n = 0; setInterval(() => n++, 20)</script>' > /tmp/page.html
chromium --headless --no-sandbox --disable-gpu --user-data-dir=/tmp/profile --remote-debugging-port=9222 \\
    file:///tmp/page.html >/tmp/s.log 2>&1 &
cat > /tmp/asks.py <<'P'
import asyncio, json, urllib.request
from tornado.websocket import websocket_connect
async def main():
    pages = json.load(urllib.request.urlopen("http://127.0.0.1:9222/json"))
    page = await websocket_connect(next(p["webSocketDebuggerUrl"] for p in pages if p["title"] == "t"))
    seen = []
    for number in range(2):
        page.write_message(json.dumps({"id": number, "method": "Runtime.evaluate", "params": {"expression": "n"}}))
        seen.append(json.loads(await page.read_message())["result"]["result"]["value"])
        await asyncio.sleep(0.5)
    print("ticking" if seen[1] > seen[0] > 0 else seen)
asyncio.run(main())
P
until python3 /tmp/asks.py 2>/dev/null | grep -q ticking; do sleep 0.5; done
"""

SERVICES = {
    "postgres": Service(_PSQL, _PSQL_USE, "1\n1\n0\n"),
    "redis": Service(
        "redis-server --daemonize yes --unixsocket /tmp/redis.sock >/dev/null\n"
        + _UNTIL % "redis-cli -s /tmp/redis.sock ping >/dev/null 2>&1"
        + "redis-cli blpop never 0 >/dev/null 2>&1 &\nredis-cli subscribe c >/tmp/heard 2>&1 &\n"
        + _UNTIL % "grep -q subscribe /tmp/heard",
        "redis-cli set a 1; redis-cli -s /tmp/redis.sock get a; redis-cli publish c hello",
        "OK\n1\n1\n",
    ),
    "nginx": Service(
        "nginx\n" + _UNTIL % "bash -c 'exec 3<>/dev/tcp/127.0.0.1/80' 2>/dev/null" + (_IDLE % 80) * 3,
        _GET + "get 80 | head -n 1 | tr -d '\\r'",
        "HTTP/1.1 200 OK\n",
    ),
    "node": Service(
        _NODE + _UNTIL % "bash -c 'exec 3<>/dev/tcp/127.0.0.1/3000' 2>/dev/null" + _IDLE % 3000,
        _GET + "touch /tmp/w/$$; sleep 0.3; get 3000 | tail -n 1",
        "watched and ticking",
    ),
    "java": Service(
        _JAVA + _UNTIL % "bash -c 'exec 3<>/dev/tcp/127.0.0.1/8080' 2>/dev/null",
        _GET + "get 8080 | tail -n 1",
        "ticking",
    ),
    "tmux": Service(
        "export TERM=xterm; tmux new-session -d -s s 'vim.tiny /tmp/f'\n" + _UNTIL % "pgrep vim >/dev/null",
        "rm -f /tmp/f; tmux send-keys -t s Escape ':%d' Enter 'ihello' Escape ':w!' Enter\n"
        + _UNTIL % "[ -s /tmp/f ]"
        + "cat /tmp/f",
        "hello\n",
    ),
    "sshd": Service(
        "ssh-keygen -A >/dev/null; mkdir -p /run/sshd; /usr/sbin/sshd\n" + _IDLE % 22,
        "bash -c 'exec 3<>/dev/tcp/127.0.0.1/22; read -r a <&3; echo ${a%%-Open*}'",
        "SSH-2.0\n",
    ),
    "mariadb": Service(_MARIADB, _MARIADB_USE, "1\n1\n0\n"),
    "rabbitmq": Service(_RABBIT + _UNTIL % "[ -e /tmp/consumes ]", _RABBIT_USE, "hop"),
    "celery": Service(_CELERY, _CELERY_USE, "42\n"),
    "jupyter": Service(_JUPYTER, _GET + _JUPYTER_USE, "42\nHTTP/1.1 302 Found\n"),
    "chromium": Service(_CHROMIUM, "python3 /tmp/asks.py", "ticking\n"),
    "cron": Service("cron", "pgrep -c cron", "1\n"),
    "gunicorn": Service(
        'mkdir -p /tmp/g; cd /tmp/g; printf \'def app(e, s):\\n s("200 OK", [])\\n return [b"wsgi"]\\n\' > m.py\n'
        "gunicorn -w 2 -b 127.0.0.1:8000 m:app >/tmp/s.log 2>&1 &\n"
        + _UNTIL % "bash -c 'exec 3<>/dev/tcp/127.0.0.1/8000' 2>/dev/null"
        + _IDLE % 8000,
        _GET + "get 8000 | tail -n 1",
        "wsgi",
    ),
}


class NotAsExpected(Exception):
    """A service did not do what it is there for."""


class Trial:
    """One service in a sandbox."""

    def __init__(self, client: Client, service: Service) -> None:
        self._client = client
        self._service = service
        self.step = "start"
        self.frozen_ms: list[float] = []

    async def use(self, sandbox: Sandbox, step: str) -> None:
        self.step = step
        done = await sandbox.exec(self._service.use, timeout=TIMEOUT)
        if done.text != self._service.says:
            raise NotAsExpected(f"{done.text!r}, {done.stderr.decode()[-200:]!r}, instead of {self._service.says!r}")

    async def run(self, rounds: int) -> None:
        async with self._client.create(IMAGE, limits=LIMITS) as sandbox:
            await sandbox.exec(self._service.start, timeout=TIMEOUT)
            await self.use(sandbox, "first use")
            for number in range(rounds):
                self.step = f"checkpoint {number}"
                saved = await sandbox.checkpoint(wait="durable")
                self.frozen_ms.append(round(saved.frozen_ms, 1))
                await self.use(sandbox, f"use after checkpoint {number}")
                for again in range(2):
                    self.step = f"restore {number}.{again}"
                    await _kill(sandbox)
                    await sandbox.restore(saved, verify=True)
                    await self.use(sandbox, f"use after restore {number}.{again}")
            self.step = "fork"
            (forked,) = await self._client.fork(await sandbox.checkpoint(), verify=True)
            async with forked.sandbox as child:
                await self.use(child, "use in the fork")
            await self.use(sandbox, "last use")


async def _kill(sandbox: Sandbox) -> None:
    for pid in await asyncio.to_thread(tasks, [sandbox.id]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def everything(options: argparse.Namespace) -> dict[str, Any]:
    words = options.only.split(",") if options.only else [""]
    result: dict[str, Any] = {}
    host = BenchHost(aftermath.directory("pagurus-services-", "/var/tmp"), options.tree)
    try:
        await asyncio.to_thread(host.start)
        async with host.client() as client:
            for name in (name for name in SERVICES if any(word in name for word in words)):
                trial, began = Trial(client, SERVICES[name]), time.monotonic()
                try:
                    await trial.run(options.rounds)
                    result[name] = {"ok": True}
                except (NotAsExpected, PagurusError) as error:
                    result[name] = {"ok": False, "step": trial.step, "error": f"{type(error).__name__}: {error}"[:600]}
                result[name] |= {"seconds": round(time.monotonic() - began, 1), "frozen_ms": trial.frozen_ms}
    finally:
        await asyncio.to_thread(host.clean)
    return {"services": result, "ok": sum(item["ok"] for item in result.values()), "of": len(result)}


def main(arguments: list[str]) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--only", default="", help="those whose name holds one of these words (commas between)")
    parser.add_argument("--rounds", type=int, default=2, help="checkpoints of each, each restored twice")
    parser.add_argument("--tree", type=Path, default=TREE, help="file tree with the services")
    options = parser.parse_args(arguments)
    result = asyncio.run(everything(options))
    command.show(result, options)
    return 0 if result["ok"] == result["of"] else 1
