"""Servers of HTTPS in the internet of :mod:`bench.harness.own_internet`, with an authority of their own.

They write the headers of each request to a file, a JSON object a line. ``/echo`` answers how long the body was,
``/away`` leads to another host, ``/slow`` sends its answer in pieces, and below ``/private`` lie files for those who
show SECRET. Not a test module.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from bench.harness.own_internet import Internet
from tests.support.programs import Program

SECRET = "Basic c2VjcmV0OnNlY3JldC1vZi10aGUtaG9zdA=="  # secret:secret-of-the-host
NAMES = ["web.test", "other.test", "*.wild.test"]  # that the servers' certificate is for
SERVER = r"""
import http.server, json, pathlib, ssl, sys, threading, time
certificate, log, files, secret = sys.argv[1:]
class Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def __init__(self, *request): super().__init__(*request, directory=files)
    def log_message(self, *_): pass
    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        said = {"method": self.command, "path": self.path, "headers": [[k.lower(), v] for k, v in self.headers.items()]}
        with open(log, "a") as out: out.write(json.dumps(said) + "\n")
        if self.path.startswith("/private"):
            if self.headers.get("Authorization") != secret: return self.send_error(401)
            self.path = self.path[len("/private"):]
            return http.server.SimpleHTTPRequestHandler.do_GET(self)
        answer = json.dumps({"method": self.command, "body": len(body)}).encode()
        self.send_response(302 if self.path == "/away" else 200)
        if self.path == "/away": self.send_header("Location", "https://other.test/echo")
        if self.path == "/slow":
            self.send_header("Transfer-Encoding", "chunked"); self.end_headers()
            for part in (b"first", b"second"):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part)); self.wfile.flush(); time.sleep(0.3)
            return self.wfile.write(b"0\r\n\r\n")
        self.send_header("Content-Length", str(len(answer))); self.end_headers()
        self.wfile.write(answer)
    do_POST = do_PUT = do_GET
for port in (443, 8443):
    server = http.server.ThreadingHTTPServer(("0.0.0.0", port), Handler)
    speaks = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER); speaks.load_cert_chain(certificate)
    server.socket = speaks.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever).start()
pathlib.Path(log).touch()
"""


@dataclass
class TlsWorld:
    log: Path
    files: Path  # what lies below /private
    ca: str  # PEM

    def requests(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def shown(self) -> list[tuple[str, str]]:
        """Host and value of Authorization of each request that had one."""
        result = []
        for request in self.requests():
            headers = dict(request["headers"])  # type: ignore[call-overload]
            if "authorization" in headers:
                result.append((headers["host"], headers["authorization"]))
        return result


@contextlib.contextmanager
def tls_world(internet: Internet, place: Path) -> Iterator[TlsWorld]:
    """Servers on all addresses of this internet, at 443 and 8443."""
    log, files, certificate = place / "requests", place / "files", place / "certificate"
    files.mkdir()
    certificate.write_text(_certificate())
    namespace = list(internet.process.args)[3]  # type: ignore[arg-type]
    program = ["ip", "netns", "exec", str(namespace), sys.executable, "-c", SERVER]
    process = Program([*program, str(certificate), str(log), str(files), SECRET])
    try:
        deadline = time.monotonic() + 60
        while not log.exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        yield TlsWorld(log, files, certificate.read_text().partition("-----BEGIN PRIVATE KEY")[0])
    finally:
        process.destroy()


def _certificate() -> str:
    """One that is its own authority, and its key."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    named = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "an authority of the test")])
    made = (
        x509.CertificateBuilder()
        .subject_name(named)
        .issuer_name(named)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=9))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in NAMES]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return (made.public_bytes(serialization.Encoding.PEM) + private).decode()
