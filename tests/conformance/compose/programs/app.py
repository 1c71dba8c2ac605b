"""Small servers and their clients, for compositions of the shapes that real projects have. Runs inside sandboxes.

::

    app.py store PORT [FILE]           a database: lines of words, transactions, blocking queues; in FILE
    app.py web PORT STORE...           HTTP: GET /KEY counts it in the stores, and answers the count of the first
    app.py proxy PORT UPSTREAM...      passes connections on, to each upstream in turn
    app.py worker STORE                squares what is in the queue `jobs`, into `done`
    app.py client KIND TARGET [FILE]   one round of traffic; with FILE rounds without end, their number in FILE
"""

import itertools
import os
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler


def connected(host: str, port: int) -> socket.socket:
    """A connection to what may be starting still."""
    for _ in range(600):
        try:
            return socket.create_connection((host, port), 30)
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise ConnectionRefusedError(f"nothing listens at {host}:{port}")


class Line:
    """A connection to a store."""

    def __init__(self, target: str) -> None:
        host, _, port = target.partition(":")
        self.socket = connected(host, int(port or 6379))
        self.socket.settimeout(None)
        self.file = self.socket.makefile("rw")

    def __call__(self, *words: object) -> str:
        print(*words, file=self.file, flush=True)
        answer = self.file.readline()
        if not answer:
            raise ConnectionError("the store closed the connection")
        return answer.strip()


def store(port: str, file: str = "") -> None:
    values: dict[str, str] = {}
    queues: dict[str, list[str]] = {}
    changed = threading.Condition(threading.RLock())
    if file and os.path.exists(file):
        with open(file) as before:
            values.update({key: value for key, value in map(str.split, before)})
    log = open(file, "a") if file else None  # noqa: SIM115 (to the end of the process)

    def put(key: str, value: object) -> str:
        values[key] = str(value)
        if log:
            print(key, value, file=log, flush=True)
        return str(value)

    def act(verb: str, *words: str) -> str:
        if verb == "get":
            return values.get(words[0], "-")
        if verb == "put":
            return put(*words)
        if verb == "add":
            return put(words[0], int(values.get(words[0], "0")) + int(words[1]))
        if verb == "push":
            queues.setdefault(words[0], []).append(words[1])
            changed.notify_all()
            return "ok"
        if verb == "pop":
            changed.wait_for(lambda: queues.get(words[0]))
            return queues[words[0]].pop(0)
        return "pong"

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            depth = 0  # of the transaction that this connection is in
            try:
                for line in self.rfile:
                    verb, *words = line.decode().split()
                    with changed:
                        if verb == "begin":
                            changed.acquire()
                            depth, answer = depth + 1, "ok"
                        elif verb == "commit":
                            changed.release()
                            depth, answer = depth - 1, "ok"
                        else:
                            answer = act(verb, *words)
                    self.wfile.write(f"{answer}\n".encode())
            finally:
                for _ in range(depth):
                    changed.release()

    serve(port, Handler)


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
    request_queue_size = 64


def serve(port: str, handler: type[socketserver.BaseRequestHandler]) -> None:
    server = Server(("", int(port)), handler)
    print(f"ready at {port}", flush=True)
    server.serve_forever()


def web(port: str, *stores: str) -> None:
    local = threading.local()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if not hasattr(local, "lines"):
                local.lines = [Line(target) for target in stores]
            counts = [line("add", self.path.strip("/") or "health", 1) for line in local.lines]
            body = counts[0].encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    serve(port, Handler)


def proxy(port: str, *upstreams: str) -> None:
    turn = itertools.cycle(upstreams)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            host, _, number = next(turn).partition(":")
            with socket.create_connection((host, int(number or 80))) as other:
                there = threading.Thread(target=carry, args=(self.request, other), daemon=True)
                there.start()
                carry(other, self.request)
                there.join()

    serve(port, Handler)


def carry(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def worker(target: str) -> None:
    line = Line(target)
    print("ready", flush=True)
    while True:
        number = int(line("pop", "jobs"))
        line("push", f"done-{number}", number * number)


# --------------------------------------------------------------------------- traffic


def need(reported: object, expected: object) -> None:
    if str(reported) != str(expected):
        raise SystemExit(f"{reported!r} instead of {expected!r}")


def rounds(kind: str, target: str) -> Iterator[None]:
    """One round of traffic after the other, over one connection; each checks what the servers answer."""
    own = f"{kind}-{os.getpid()}-{time.time_ns()}"
    if kind == "store":
        line = Line(target)
        for number in itertools.count(1):
            need(line("add", own, 1), number)
            yield
    if kind == "transaction":
        line = Line(target)
        for number in itertools.count(1):
            need(line("begin"), "ok")
            need(line("add", f"{own}-a", 1), number)
            need(line("add", f"{own}-b", -1), -number)
            time.sleep(0.005)
            need(int(line("get", f"{own}-a")) + int(line("get", f"{own}-b")), 0)
            need(line("commit"), "ok")
            yield
    if kind == "web":
        host, _, port = target.partition(":")
        connected(host, int(port or 80)).close()
        connection = HTTPConnection(host, int(port or 80), timeout=None)
        for number in itertools.count(1):
            connection.request("GET", f"/{own}")
            need(connection.getresponse().read().decode(), number)
            yield
    if kind == "job":
        line, first = Line(target), time.time_ns() % 1_000_000_000 * 1000
        for number in itertools.count(first):
            line("push", "jobs", number)
            need(line("pop", f"done-{number}"), number * number)
            yield
    raise SystemExit(f"no such traffic: {kind}")


def client(kind: str, target: str, file: str = "") -> None:
    for number, _ in enumerate(rounds(kind, target), 1):
        if not file:
            if number == 20:
                return
            continue
        with open(f"{file}.new", "w") as out:
            out.write(str(number))
        os.rename(f"{file}.new", file)
        time.sleep(0.01)


if __name__ == "__main__":
    programs: dict[str, Callable[..., None]] = {
        "store": store, "web": web, "proxy": proxy, "worker": worker, "client": client,
    }  # fmt: skip
    programs[sys.argv[1]](*sys.argv[2:])
