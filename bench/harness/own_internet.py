"""An internet of our own for tests and benches: a network namespace beside the host, with servers in it.

Nothing outside this machine is reached. ``192.88.99.0/24`` (public, and nobody's since RFC 7526) lies behind a
veth pair; the server there answers on every address that it was given.

::

    host   192.88.99.1 ── inet… ── 192.88.99.10 web, 192.88.99.11 other, 192.88.99.53:5353 DNS
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.harness import aftermath

HOST = "192.88.99.1"
WEB = "192.88.99.10"
OTHER = "192.88.99.11"
DNS = "192.88.99.53"
DNS_PORT = 5353
PRIVATE = "10.99.0.10"

SERVER = r"""
import asyncio, sys
import dns.message, dns.rdatatype, dns.rrset, dns.rcode, dns.flags

RECORDS = {
    "web.test.": [("A", 1, "192.88.99.10")],
    "other.test.": [("A", 300, "192.88.99.11")],
    "alias.test.": [("CNAME", 300, "deep.cdn.test."), ("deep.cdn.test.", "A", 300, "192.88.99.10")],
    "a.wild.test.": [("A", 300, "192.88.99.10")],
    "rebind.test.": [("A", 300, "127.0.0.1"), ("A", 300, "169.254.169.254"), ("A", 300, "10.99.0.10")],
    "half.test.": [("A", 300, "192.88.99.10"), ("A", 300, "198.18.0.1")],
    "stray.test.": [("A", 300, "192.88.99.10"), ("elsewhere.test.", "A", 300, "192.88.99.11")],
    "private.test.": [("A", 300, "10.99.0.10")],
    "many.test.": [("A", 300, f"192.88.99.{n}") for n in range(100, 160)],
    "loop.test.": [("CNAME", 300, "loop2.test."), ("loop2.test.", "CNAME", 300, "loop.test.")],
}

def answer(data):
    query = dns.message.from_wire(data)
    name = query.question[0].name.to_text().lower()
    print("ASKED", name, flush=True)
    response = dns.message.make_response(query)
    if name not in RECORDS:
        response.set_rcode(dns.rcode.NXDOMAIN)
    for record in RECORDS.get(name, ()):
        owner, kind, ttl, value = record if len(record) == 4 else (name, *record)
        response.answer.append(dns.rrset.from_text(owner, ttl, "IN", kind, value))
    return response

class Datagrams(asyncio.DatagramProtocol):
    def connection_made(self, transport): self.transport = transport
    def datagram_received(self, data, address):
        response = answer(data)
        try: wire = response.to_wire(max_size=512)
        except dns.exception.TooBig:
            response.answer.clear(); response.flags |= dns.flags.TC; wire = response.to_wire()
        self.transport.sendto(wire, address)

async def stream(reader, writer):
    try:
        size = int.from_bytes(await reader.readexactly(2), "big")
        wire = answer(await reader.readexactly(size)).to_wire()
        writer.write(len(wire).to_bytes(2, "big") + wire)
        await writer.drain()
    except (OSError, EOFError): pass
    writer.close()

async def web(reader, writer):
    try:
        peer = writer.get_extra_info("peername")[0]
        while line := await reader.readline():
            if line == b"hold\n": continue          # a connection that stays
            if line in (b"\r\n", b"\n"): break
        body = f"served {writer.get_extra_info('sockname')[0]} to {peer}\n".encode()
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
    except (OSError, EOFError): pass
    writer.close()

class Echo(asyncio.DatagramProtocol):
    def connection_made(self, transport): self.transport = transport
    def datagram_received(self, data, address):
        print("UDP", address[0], data[:40], flush=True)
        self.transport.sendto(data, address)

async def discard(reader, writer):
    try:
        while await reader.read(1 << 20): pass
        writer.write(b"x"); await writer.drain()
    except OSError: pass
    writer.close()

async def main():
    loop = asyncio.get_running_loop()
    await loop.create_datagram_endpoint(Datagrams, local_addr=("192.88.99.53", 5353))
    await loop.create_datagram_endpoint(Echo, local_addr=("192.88.99.10", 7))
    servers = [await asyncio.start_server(stream, "0.0.0.0", 5353)]
    servers.append(await asyncio.start_server(discard, "192.88.99.10", 9, limit=1 << 22))
    for port in (80, 8080): servers.append(await asyncio.start_server(web, "0.0.0.0", port))
    print("READY", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@dataclass
class Internet:
    """A running one."""

    process: subprocess.Popen[str]
    log: Path

    @property
    def resolvers(self) -> str:
        """For PAGURUS_RESOLVERS."""
        return f"{DNS}:{DNS_PORT}"

    def datagrams(self) -> list[str]:
        """What came to its UDP echo server."""
        return [line for line in self.log.read_text().splitlines() if line.startswith("UDP")]

    def requested(self) -> list[str]:
        """Names that its DNS server was asked for."""
        return [line.split()[1] for line in self.log.read_text().splitlines() if line.startswith("ASKED")]


def missing() -> str:
    """Why there can be none here; "" when there can."""
    if os.geteuid() != 0:
        return "needs root"
    for program in ("ip", "nft"):
        if subprocess.run(["sh", "-c", f"command -v {program}"], capture_output=True, check=False).returncode:
            return f"the program {program} is missing: run `make setup`"
    return ""


@contextlib.contextmanager
def internet(directory: Path) -> Iterator[Internet]:
    """Set one up, and take it away again."""
    name = f"inet-{secrets.token_hex(4)}"
    log = directory / f"{name}.log"
    process: subprocess.Popen[str] | None = None
    alone = os.open("/tmp/pagurus-test-internet.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(alone, fcntl.LOCK_EX)  # its addresses can lie behind one link only
    try:
        _collect()
        aftermath.note(command=["ip", "netns", "delete", name])
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "address", "add", f"{HOST}/24", "dev", name)
        _run("ip", "link", "set", name, "up")
        _run("ip", "route", "add", "10.99.0.0/24", "dev", name)
        Path(f"/proc/sys/net/ipv4/conf/{name}/forwarding").write_text("1")
        for address in (f"{WEB}/24", f"{OTHER}/24", f"{DNS}/24", f"{PRIVATE}/24"):
            _run("ip", "-n", name, "address", "add", address, "dev", "eth0")
        _run("ip", "-n", name, "link", "set", "eth0", "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", name, "route", "add", "default", "via", HOST)
        with log.open("w") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, "-c", SERVER], stdout=output, stderr=output, text=True
            )
        _await_ready(process, log)
        yield Internet(process, log)
    finally:
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait()
        subprocess.run(["ip", "link", "delete", name], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        os.close(alone)


def _collect() -> None:
    """What a killed run left: whoever holds the lock is the only one."""
    for link in Path("/sys/class/net").glob("inet-*"):
        subprocess.run(["ip", "link", "delete", link.name], capture_output=True, check=False)
    for namespace in Path("/run/netns").glob("inet-*"):
        pids = subprocess.run(["ip", "netns", "pids", namespace.name], capture_output=True, text=True, check=False)
        for pid in pids.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "delete", namespace.name], capture_output=True, check=False)


def _await_ready(process: subprocess.Popen[str], log: Path) -> None:
    for _ in range(600):
        if "READY" in log.read_text():
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            raise AssertionError(f"the internet ended with {process.wait(0.05)}: {log.read_text()}")
    raise AssertionError(f"the internet does not come up: {log.read_text()}")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
