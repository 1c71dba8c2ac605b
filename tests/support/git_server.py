"""A git repository on loopback, served as git hosts do (``git http-backend``), and a file of the web."""

from __future__ import annotations

import hashlib
import os
import subprocess
import threading
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

WHO = ("-c", "user.name=me", "-c", "user.email=me@example.org", "-c", "init.defaultBranch=main")
FILE = b"from the web\n"
DATE = "2001-01-01T00:00:00Z"


class GitServer:
    """``with GitServer(folder) as server:`` `server.address` is that of the repository; `server.file`: of a file.

    What is at `server.top` itself, and at ``files/timeless``, has no time.
    """

    def __init__(self, folder: Path) -> None:
        self.commits: list[str] = []
        self.tag = ""  # its own name, not that of its commit
        self._folder = folder
        self._make()
        serving = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                serving.answer(self)

            do_HEAD = do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        top = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.top, self.address, self.file = top, f"{top}/project.git", f"{top}/files/data"
        self.digest = hashlib.sha256(FILE).hexdigest()

    def __enter__(self) -> GitServer:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _make(self) -> None:
        """Two commits on ``main``, the first one tagged, and a branch."""
        work = self._folder / "work"
        (work / "sub/deep").mkdir(parents=True)
        self._git("init", "-q", str(work))
        for number in (1, 2):
            (work / "file").write_text(f"{number}\n")
            (work / "sub/deep/run").write_text("#!/bin/sh\n")
            (work / "sub/deep/run").chmod(0o755)
            (work / "sub/Dockerfile").write_text(f"FROM debian\nCOPY . /c{number}/\n")
            if number == 1:
                (work / "link").symlink_to("sub/deep/run")
            self._git("-C", str(work), "add", "-A")
            self._git("-C", str(work), "commit", "-qm", f"number {number}")
            self.commits.append(self._git("-C", str(work), "rev-parse", "HEAD").strip())
            if number == 1:
                self._git("-C", str(work), "tag", "-a", "-m", "one", "v1")
                self.tag = self._git("-C", str(work), "rev-parse", "v1").strip()
                self._git("-C", str(work), "branch", "old")
        self._git("clone", "-q", "--bare", str(work), str(self._folder / "project.git"))
        self._git("-C", str(self._folder / "project.git"), "config", "uploadpack.allowAnySHA1InWant", "true")

    def _git(self, *words: str) -> str:
        environment = {**os.environ, "GIT_AUTHOR_DATE": DATE, "GIT_COMMITTER_DATE": DATE}
        done = subprocess.run(["git", *WHO, *words], env=environment, capture_output=True, text=True, check=True)
        return done.stdout

    def answer(self, ask: BaseHTTPRequestHandler) -> None:
        path, _, query = ask.path.partition("?")
        if path == "/files/data":
            return self._send(ask, 200, FILE, {"Last-Modified": formatdate(1_000_000, usegmt=True)})
        if path in ("/", "/files/timeless"):
            return self._send(ask, 200, FILE, {})
        data = ask.rfile.read(int(ask.headers.get("Content-Length") or 0))
        environment = {
            "PATH": os.environ["PATH"],
            "GIT_PROJECT_ROOT": str(self._folder),
            "GIT_HTTP_EXPORT_ALL": "1",
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "safe.directory",
            "GIT_CONFIG_VALUE_0": "*",
            "GIT_PROTOCOL": ask.headers.get("Git-Protocol", ""),
            "REQUEST_METHOD": ask.command,
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "CONTENT_TYPE": ask.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(data)),
            "HTTP_CONTENT_ENCODING": ask.headers.get("Content-Encoding", ""),
            "REMOTE_ADDR": "127.0.0.1",
        }
        done = subprocess.run(["git", "http-backend"], input=data, env=environment, capture_output=True, check=True)
        head, _, body = done.stdout.partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
        return self._send(ask, int(headers.pop("Status", "200").split()[0]), body, headers)

    def _send(self, ask: BaseHTTPRequestHandler, status: int, data: bytes, headers: dict[str, str]) -> None:
        ask.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            ask.send_header(key, value)
        ask.end_headers()
        if ask.command != "HEAD":
            ask.wfile.write(data)
