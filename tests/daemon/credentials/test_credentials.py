"""Credentials of a real daemon: real TLS, and git, curl, pip, node and Python inside real sandboxes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pip
import pytest

from bench.harness import own_internet as world
from sandbox import Client, Credential, Invalid, Mount, Network, NotFound, Sandbox
from tests.support.daemon_host import IMAGE, Daemon, missing
from tests.support.tls_world import SECRET, TlsWorld, tls_world

ASK = """
import json, ssl, sys, urllib.request
for url in sys.argv[1:]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer: print(answer.status, *answer.read().decode().split())
    except Exception as error: print(type(error).__name__, getattr(error, "code", getattr(error, "reason", error)))
"""
#: What a client says where it is free to lie: a name in the handshake, another one in the request.
LIE = """
import socket, ssl, sys
shown, host, address = sys.argv[1:]
speaks = ssl.create_default_context()
if not shown: speaks.check_hostname = False
try:
    plain = socket.create_connection((address, 443), 30)
    with speaks.wrap_socket(plain, server_hostname=shown or None) as peer:
        peer.sendall(f"GET /echo HTTP/1.1\\r\\nHost: {host}\\r\\nConnection: close\\r\\n\\r\\n".encode())
        print(peer.makefile().readline().split()[1])
except OSError as error: print(type(error).__name__)
"""
CUT = ("SSLError", "SSLZeroReturnError", "SSLEOFError", "ConnectionResetError")  # in the handshake


@pytest.fixture(scope="module")
def internet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[world.Internet]:
    if reason := world.missing():
        pytest.skip(reason)
    with world.internet(tmp_path_factory.mktemp("internet")) as made:
        yield made


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, internet: world.Internet) -> Iterator[TlsWorld]:
    with tls_world(internet, tmp_path_factory.mktemp("tls")) as made:
        yield made


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, internet: world.Internet) -> Iterator[Daemon]:
    if reason := missing():
        pytest.skip(reason)
    daemon = Daemon(tmp_path_factory.mktemp("host"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGURUS_RESOLVERS", internet.resolvers)
        try:
            yield daemon.start()
        finally:
            daemon.clean()


@pytest.fixture
async def credential(host: Client, servers: TlsWorld) -> str:
    servers.log.write_text("")
    await host.credentials.put("web", Credential(hosts=("web.test", "web.test:8443"), value=SECRET, ca=servers.ca))
    return "web"


async def ask(sandbox: Sandbox, *urls: str) -> list[str]:
    done = await sandbox.exec(["python3", "-c", ASK, *urls], timeout=240)
    assert done.exit_code == 0, done
    return done.stdout.decode().splitlines()


async def lie(sandbox: Sandbox, shown: str, host: str, address: str) -> str:
    return (await sandbox.exec(["python3", "-c", LIE, shown, host, address], timeout=240)).stdout.decode().strip()


async def test_a_request_has_a_header_that_the_sandbox_never_sees(
    host: Client, daemon: Daemon, servers: TlsWorld, credential: str
) -> None:
    async with host.create(IMAGE, network=Network.allow(credentials=[credential])) as sandbox:
        said = await ask(sandbox, "https://web.test/private/", "https://web.test:8443/echo", "https://other.test/echo")
        assert [line.split()[0] for line in said] == ["200", "200", "URLError"]
        # What the client sends by itself is replaced, and nothing of the body is lost.
        own = "urlopen(urllib.request.Request(url, b'x' * 300_000, {'Authorization': 'mine'})"
        program = ASK.replace("urlopen(url", own)
        done = await sandbox.exec(["python3", "-c", program, "https://web.test/echo"])
        status, _, echoed = done.stdout.decode().partition(" ")
        assert (status, json.loads(echoed)["body"]) == ("200", 300_000)
        assert servers.shown() == [("web.test", SECRET), ("web.test:8443", SECRET), ("web.test", SECRET)]
        # It is nowhere inside, nor in a checkpoint, nor in what the daemon writes down or tells.
        secret = SECRET.partition(" ")[2]
        shown = await sandbox.exec(f"env; cat /proc/[0-9]*/environ; grep -rs '{secret[:-8]}' /etc /root /tmp; true")
        assert secret not in shown.stdout.decode()
        made = await sandbox.checkpoint("later", wait="durable")
        kept = await asyncio.to_thread(_holders, secret, daemon.state, daemon.run)
        assert kept == [str(daemon.state / "credentials.json")], made
        assert (daemon.state / "credentials.json").stat().st_mode & 0o777 == 0o600
        log = daemon.log.read_text()
        assert secret not in log and "credential web: POST web.test: 200" in log
        [info] = await host.credentials.list()
        assert (info.name, info.requests) == ("web", 3) and secret not in repr(info)


async def test_a_header_goes_to_no_other_host(host: Client, servers: TlsWorld, credential: str) -> None:
    async with host.create(IMAGE, network=Network.open(credentials=[credential])) as sandbox:
        # A redirect to another host: that request is another one, by itself and without it.
        away = "import urllib.request as u, ssl; c = ssl._create_unverified_context(); "
        done = await sandbox.exec(["python3", "-c", away + "print(u.urlopen('https://web.test/away', context=c).url)"])
        assert done.stdout == b"https://other.test/echo\n", done
        assert servers.shown() == [("web.test", SECRET)]
        proxy = "127.0.0.54"
        assert await lie(sandbox, "web.test", "web.test", proxy) == "200"
        assert await lie(sandbox, "web.test", "other.test", proxy) == "421"
        assert await lie(sandbox, "web.test", "web.test:8443", proxy) == "421"
        assert await lie(sandbox, "web.test", world.WEB, proxy) == "421"
        assert await lie(sandbox, "other.test", "web.test", proxy) in CUT
        assert await lie(sandbox, "", "web.test", proxy) in CUT
        # The address itself: the host is reached, by its own certificate, which the sandbox does not trust.
        assert await lie(sandbox, "web.test", "web.test", world.WEB) == "SSLCertVerificationError"
        assert servers.shown() == [("web.test", SECRET)] * 2


async def test_an_upstream_shows_that_it_is_the_host(host: Client, servers: TlsWorld) -> None:
    await host.credentials.put("untrusted", Credential(hosts=("other.test",), value=SECRET))
    await host.credentials.put("wrong", Credential(hosts=("private.test",), value=SECRET, ca=servers.ca))
    await host.credentials.put("below", Credential(hosts=("*.wild.test",), value=SECRET, ca=servers.ca))
    servers.log.write_text("")
    policy = Network.allow(credentials=["untrusted", "wrong", "below"])
    async with host.create(IMAGE, network=policy) as sandbox:
        urls = [f"https://{name}/echo" for name in ("other.test", "private.test", "a.wild.test")]
        said = await ask(sandbox, *urls)
        assert [line[:13] for line in said] == ["HTTPError 502", "HTTPError 502", '200 {"method"'[:13]]
        # A private address is reached where the policy names it, and there the certificate is another name's.
        await sandbox.network.set(Network.allow(credentials=["wrong"], cidrs=["10.99.0.0/16"]))
        told = 'error.read() if hasattr(error, "read") else getattr(error, "code"'
        program = ASK.replace('getattr(error, "code"', told)
        shown = await sandbox.exec(["python3", "-c", program, "https://private.test/"])
        assert "certificate is not valid" in shown.stdout.decode(), shown
    assert servers.shown() == [("a.wild.test", SECRET)]


async def test_policies_change_and_credentials_go(host: Client, servers: TlsWorld, credential: str) -> None:
    url = "https://web.test/private/"
    async with host.create(IMAGE, network=Network.none()) as sandbox:
        before = await sandbox.checkpoint("before")
        await sandbox.network.set(Network.allow(credentials=[credential]))
        assert (await ask(sandbox, url))[0].startswith("200")
        # The policy is a setting: a restore keeps it, and what runs then trusts the host again; a fork inherits it.
        await sandbox.restore(before)
        assert (await ask(sandbox, url))[0].startswith("200")
        [fork] = await sandbox.fork(1)
        async with fork.sandbox as child:
            assert (await ask(child, url))[0].startswith("200")
        await host.credentials.put("web", Credential(hosts=("web.test",), value="Bearer other", ca=servers.ca))
        assert await ask(sandbox, url) == ["HTTPError 401"]
        await host.credentials.remove("web")
        assert (await ask(sandbox, url))[0].startswith("URLError")  # it is a name like others again, not on the list
        await sandbox.network.set(Network.none())
        with pytest.raises(NotFound, match="no such credential: web"):
            await sandbox.network.set(Network.allow(credentials=["web"]))
    with pytest.raises(NotFound, match="no such credential"):
        await host.create(IMAGE, network=Network.allow(credentials=["web"]))
    for hosts, header, value in (
        ("*", "A", "x"),
        ("a:1-2", "A", "x"),
        ("a.test", "Host", "x"),
        ("a.test", "A", "x\ny"),
    ):
        with pytest.raises(Invalid):
            await host.credentials.put("odd", Credential(hosts=(hosts,), header=header, value=value))


async def test_a_killed_daemon_leaves_the_sockets(
    host: Client, daemon: Daemon, servers: TlsWorld, credential: str
) -> None:
    async with host.create(IMAGE, network=Network.allow(credentials=[credential])) as sandbox:
        await sandbox.exec(f"setsid python3 -c '{ASK}' https://web.test/slow >/before 2>&1", ends_turn=False)
        daemon.kill()
        daemon.start()
        assert (await ask(sandbox, "https://web.test/private/"))[0].startswith("200")
        assert (await sandbox.files.read("/before")).startswith(b"200 firstsecond")


async def test_tools_with_stores_of_their_own(host: Client, servers: TlsWorld, credential: str) -> None:
    _repository(servers.files)
    _index(servers.files)
    mounts = [Mount(source="/usr", target="/usr"), Mount(source=str(Path(pip.__file__).parents[1]), target="/opt/lib")]
    network = Network.allow(credentials=[credential])
    install = "PYTHONPATH=/opt/lib python3 -m pip --disable-pip-version-check --no-cache-dir"
    steps = {
        "curl": "curl -sSf https://web.test/private/hello",
        "git": "git clone -q https://web.test/private/repository.git /tmp/clone && cat /tmp/clone/hello",
        "pip": f"{install} install -q --root-user-action ignore --no-deps --target /tmp/lib "
        "--index-url https://web.test/private/simple crab && cat /tmp/lib/crab.py",
        "requests": "PYTHONPATH=/opt/lib python3 -c 'from pip._vendor import requests; "
        'print(requests.get("https://web.test/private/hello").text, end=str())\'',
        "node": 'node -e \'fetch("https://web.test/private/hello").then(x => x.text())'
        ".then(x => process.stdout.write(x))'",
        "openssl": "openssl s_client -connect web.test:443 -servername web.test -verify_return_error </dev/null "
        ">/dev/null 2>&1 && echo hello",
        "none": "env -i PATH=$PATH python3 -c 'import urllib.request as u; "
        'print(u.urlopen("https://web.test/private/hello").read().decode(), end=str())\'',
    }
    async with host.create(IMAGE, network=network, mounts=mounts) as sandbox:
        for tool, step in steps.items():
            if tool in ("curl", "git", "node", "openssl") and shutil.which(tool, path="/usr/bin") is None:
                continue
            done = await sandbox.exec(step, timeout=240, env={"HOME": "/root"})
            assert done.stdout.decode() == "hello\n", (tool, done)
    assert {value for _, value in servers.shown()} == {SECRET}


def _holders(secret: str, *places: Path) -> list[str]:
    """Files below these that hold it."""
    return subprocess.run(["grep", "-rlsF", secret, *places], capture_output=True, text=True).stdout.split()


def _repository(files: Path) -> None:
    """A bare repository for git's plain protocol."""
    work, who = (
        files / "work",
        ["-c", "user.name=me", "-c", "user.email=me@example.org", "-c", "init.defaultBranch=main"],
    )
    (files / "hello").write_text("hello\n")
    work.mkdir()
    (work / "hello").write_text("hello\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run(["git", *who, *command], cwd=work, check=True, env={**os.environ, "HOME": str(files)})
    subprocess.run(["git", "clone", "-q", "--bare", work, files / "repository.git"], check=True)
    subprocess.run(["git", "update-server-info"], cwd=files / "repository.git", check=True)


def _index(files: Path) -> None:
    """A package index with one wheel."""
    import zipfile

    name = "crab-1.0-py3-none-any.whl"
    place = files / "simple" / "crab"
    place.mkdir(parents=True)
    (place / "index.html").write_text(f'<a href="{name}">{name}</a>')
    with zipfile.ZipFile(place / name, "w") as wheel:
        wheel.writestr("crab.py", "hello\n")
        wheel.writestr("crab-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: crab\nVersion: 1.0\n")
        wheel.writestr("crab-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("crab-1.0.dist-info/RECORD", "")


async def test_the_command_line(host: Client, daemon: Daemon, servers: TlsWorld, tmp_path: Path) -> None:
    authority = tmp_path / "authority.pem"
    await asyncio.to_thread(authority.write_text, servers.ca)

    def pagurus(*words: str, said: str = "") -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PAGURUS_RUN": str(daemon.run)}
        command = [sys.executable, "-m", "pagurus", *words]
        return subprocess.run(command, input=said, capture_output=True, text=True, env=environment, timeout=240)

    user, password = "secret", "secret-of-the-host"
    words = ["--host", "web.test", "--basic", user, "--ca", str(authority)]
    put = await asyncio.to_thread(pagurus, "credential", "put", "shell", *words, said=f"{password}\n")
    assert put.returncode == 0 and "web.test" in put.stdout and password not in put.stdout, put
    program = "import urllib.request as u; print(u.urlopen('https://web.test/private/').status)"
    ran = await asyncio.to_thread(pagurus, "run", "--credential", "shell", IMAGE, "python3", "-c", program)
    assert ran.stdout == "200\n", ran
    async with host.create(IMAGE) as sandbox:
        shown = await asyncio.to_thread(pagurus, "net", sandbox.id, "--credential", "shell", "--json")
        assert json.loads(shown.stdout)["network"]["credentials"] == ["shell"], shown
    listed = json.loads((await asyncio.to_thread(pagurus, "credential", "ls", "--json")).stdout)
    assert [item["requests"] for item in listed if item["name"] == "shell"] == [1]
    assert (await asyncio.to_thread(pagurus, "credential", "rm", "shell")).returncode == 0
    refused = await asyncio.to_thread(pagurus, "credential", "put", "x", "--host", "a.test", said="\n")
    assert refused.returncode == 1 and "the secret is empty" in refused.stderr
