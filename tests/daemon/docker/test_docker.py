"""Docker in a sandbox, by its real clients: the SDK for Python through a forwarded port, and the command itself."""

from __future__ import annotations

import asyncio
import io
import shutil
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeVar

import docker
import pytest
from docker.errors import APIError, BuildError, ContainerError, ImageNotFound, NotFound

from daemon.docker.service import PORT
from sandbox import Client, Sandbox
from sandbox.errors import Invalid
from sandbox.messages import Limits, Mount
from tests.support.daemon_host import Daemon

T = TypeVar("T")
SERVER = """perl -MIO::Socket::INET -e '$s = IO::Socket::INET->new(LocalPort => 80, Listen => 5, ReuseAddr => 1);
while ($c = $s->accept) { print $c "hello ".$c->peerhost."\\n"; close $c }'"""
ASK = "perl -MIO::Socket::INET -e '$c = IO::Socket::INET->new(\"{}\") or die $!; print <$c>'"
CLIENT = shutil.which("docker")
PLACE = "" if CLIENT is None else str(Path(CLIENT).resolve().parent)


@pytest.fixture
async def sb(host: Client) -> AsyncIterator[Sandbox]:
    mounts = [] if CLIENT is None else [Mount.read_only(PLACE, "/opt/host")]
    async with host.create("debian", docker=True, mounts=mounts) as sandbox:
        yield sandbox


@pytest.fixture
async def engine(sb: Sandbox) -> AsyncIterator[Any]:
    async with sb.ports.forward(PORT) as address:
        yield await client_of(address)


async def client_of(address: str) -> Any:
    """It asks at once, and who forwards the port is in this thread."""
    return await asyncio.to_thread(docker.DockerClient, base_url=f"tcp://{address}", version="auto", timeout=100)


def printed(container: Any, command: str, expected: tuple[int, Any], **more: Any) -> None:
    """The SDK loses what comes with the head of the response: then the command prints later.

    The daemon waits for its reader inside the sandbox, which is not this SDK but what carries the port to it.
    """
    for pause in (0.1, 1, 5, 20):
        if (result := container.exec_run(["sh", "-c", f"sleep {pause}; {command}"], **more)) == expected:
            return
    assert result == expected


async def asked(sb: Sandbox, place: str) -> str:
    """What a server says, as soon as it listens."""
    for _ in range(200):
        done = await sb.exec(ASK.format(place))
        if done.exit_code == 0:
            return done.text.strip()
        await asyncio.sleep(0.05)
    raise AssertionError(done.stderr)


async def test_the_sdk_runs_containers(sb: Sandbox, engine: Any) -> None:
    def acts() -> None:
        assert engine.ping() and engine.version()["ApiVersion"] == "1.43"
        assert engine.containers.run("debian", "echo hi", remove=True) == b"hi\n"
        with pytest.raises(ContainerError) as failed:
            engine.containers.run("debian", ["sh", "-c", "echo no >&2; exit 3"], remove=True)
        assert failed.value.exit_status == 3 and b"no" in failed.value.stderr
        assert engine.containers.list(all=True) == []
        web = engine.containers.run(
            "debian", ["sh", "-c", "echo begun; sleep 1000"], name="web", detach=True, labels={"a": "b"}
        )
        assert [one.name for one in engine.containers.list(filters={"label": "a=b"})] == ["web"]
        assert web.status == "created" and engine.containers.get("web").status == "running"
        printed(web, "echo $0; exit 4", (4, b"sh\n"))
        printed(web, "echo o; echo e >&2", (0, (b"o\n", b"e\n")), demux=True)
        printed(web, "head -c 20000000 /dev/zero", (0, bytes(20_000_000)))
        printed(web, "tty", (0, b"/dev/pts/0\r\n"), tty=True)
        assert web.logs() == b"begun\n" and web.logs(tail=0) == b""
        with pytest.raises(APIError, match="is running"):
            web.remove()
        web.stop(timeout=1)
        assert web.wait()["StatusCode"] == 143
        web.start()
        web.kill()
        web.remove(force=True)
        with pytest.raises(NotFound):
            engine.containers.get("web")
        logs = [
            engine.containers.run("debian", "head -c 900000 /dev/zero", name=f"l{number}", detach=True)
            for number in range(3)
        ]
        read = [one.logs(stream=True, follow=True) for one in logs]
        for one in logs:
            one.wait()
            one.remove()
        assert [b"".join(one) for one in read] == [bytes(900_000)] * 3, "logs are whole when it is removed before"
        seen = engine.containers.run("debian", ["sh", "-c", "test -t 0 && test -t 1 && stty size"], tty=True)
        assert seen == b"24 80\r\n"
        engine.containers.prune()
        with pytest.raises(ImageNotFound):
            engine.containers.run("nosuch:1", "true")

    await asyncio.to_thread(acts)
    assert (await sb.exec("ls /services /volumes 2>/dev/null")).text.split() == ["/services:"]
    assert "services" not in (await sb.exec("cat /proc/self/mountinfo")).text


LATE = """
import socket, sys, time
body = b'{"Detach": false, "Tty": false}'
head = f"POST /exec/{sys.argv[1]}/start HTTP/1.1\\nHost: a\\nConnection: Upgrade\\nUpgrade: tcp\\n"
head += f"Content-Type: application/json\\nContent-Length: {len(body)}\\n\\n"
with socket.create_connection(("127.0.0.1", 2375)) as server:
    server.sendall(head.replace("\\n", "\\r\\n").encode() + body)
    time.sleep(1)
    head = server.recv(8192)
    rest = b""
    while data := server.recv(8192):
        rest += data
print(head.endswith(b"\\r\\n\\r\\n"), rest)
"""


async def test_no_output_comes_with_the_head_of_a_response(sb: Sandbox, engine: Any) -> None:
    """Docker's Python SDK reads the head through a buffer and the rest past it, and would lose it."""
    made = await asyncio.to_thread(engine.containers.run, "debian", "sleep 1000", detach=True)
    prepared = await asyncio.to_thread(engine.api.exec_create, made.id, ["echo", "hi"])
    done = await sb.exec(["python3", "-c", LATE, prepared["Id"]])
    assert done.text.strip() == r"True b'\x01\x00\x00\x00\x00\x00\x00\x03hi\n'", done.stderr


async def test_networks_volumes_and_mounts(sb: Sandbox, engine: Any) -> None:
    await sb.exec("mkdir -p /data/dir; echo conf > /data/conf; echo data > /data/dir/data")

    def acts() -> None:
        for name in ("front", "back"):
            engine.networks.create(name, internal=name == "back")
        engine.containers.run(
            "debian", ["sh", "-c", SERVER], name="web", network="front", detach=True, ports={"80/tcp": 8080}
        )
        volumes = {
            "/data/dir": {"bind": "/dir", "mode": "rw"},
            "/data/conf": {"bind": "/etc/own/conf", "mode": "ro"},
            "kept": {"bind": "/kept", "mode": "rw"},
        }
        script = "cat /dir/data /etc/own/conf; echo new > /dir/new; echo k > /kept/k; ! echo x > /etc/own/conf"
        said = engine.containers.run("debian", ["sh", "-c", script], volumes=volumes, remove=True, stderr=False)
        assert said == b"data\nconf\n"
        assert [one.name for one in engine.volumes.list()] == ["kept"]
        assert engine.containers.run("debian", "cat /v/k", volumes={"kept": {"bind": "/v"}}, remove=True) == b"k\n"
        with pytest.raises(APIError, match="active endpoints"):
            engine.networks.get("front").remove()

    await asyncio.to_thread(acts)
    assert await sb.files.read("/data/dir/new") == b"new\n"
    assert await asked(sb, "127.0.0.1:8080") == "hello 127.0.0.1"

    def between() -> None:
        run = engine.containers.run
        assert b"hello 127.1.0." in run("debian", ["sh", "-c", ASK.format("web:80")], network="front", remove=True)
        with pytest.raises(ContainerError, match="not permitted"):
            run("debian", ["sh", "-c", ASK.format("127.1.0.2:80")], network="back", remove=True)
        other = run("debian", "sleep 1000", name="other", network="back", detach=True)
        engine.networks.get("front").connect("other", aliases=["o"])
        assert other.exec_run(["sh", "-c", ASK.format("web:80")]).exit_code == 0
        engine.networks.get("front").disconnect("other")
        assert other.exec_run(["sh", "-c", ASK.format("127.1.0.2:80")]).exit_code == 1
        engine.volumes.get("kept").remove()
        for one in engine.containers.list():
            one.remove(force=True)
        engine.networks.get("front").remove()

    await asyncio.to_thread(between)


async def test_volumes_lie_in_one_another(sb: Sandbox, engine: Any) -> None:
    await sb.exec("mkdir /given; echo given > /given/file; echo conf > /conf")
    volumes = {"in": {"bind": "/out/in"}, "/conf": {"bind": "/out/in/etc/conf"}, "/given": {"bind": "/out/in/given"}}
    look = "cat /out/x /out/in/x /out/in/given/file /out/in/etc/conf"

    def acts() -> None:
        box = engine.containers.run(
            "debian", "sleep 1000", name="box", volumes={**volumes, "out": {"bind": "/out"}}, detach=True
        )
        assert box.exec_run(["sh", "-c", f"echo out > /out/x; echo in > /out/in/x; {look}"]).exit_code == 0
        run = engine.containers.run
        assert run("debian", "cat /in/x", volumes={"in": {"bind": "/in"}}, remove=True) == b"in\n"
        for more in ({"volumes": {"v": {"bind": "/t/v"}}}, {"volumes": {"v": {"bind": "/t"}}}):
            with pytest.raises(APIError, match="overlaps"):
                run("debian", "true", tmpfs={"/t": ""}, **more)

    await asyncio.to_thread(acts)
    here = await sb.checkpoint()
    assert (await sb.restore(here.id, verify=True)).verified
    async with (await sb.fork(1))[0].sandbox as fork:
        for one in (sb, fork):
            assert (await one.exec(look, service="box")).stdout == b"out\nin\ngiven\nconf\n"


async def test_each_meets_its_own_limits(sb: Sandbox, engine: Any) -> None:
    def acts() -> None:
        run = engine.containers.run
        other = run("debian", "sleep 1000", name="other", detach=True, mem_limit="64m", pids_limit=4)
        other.reload()
        said = other.attrs["HostConfig"]
        assert (said["Memory"], said["PidsLimit"]) == (64 << 20, 4)
        hog = ["python3", "-c", "x = bytes([1]) * (100 << 20); print(len(x))"]
        with pytest.raises(ContainerError) as failed:
            run("debian", hog, name="hog", mem_limit="64m", remove=True)
        assert failed.value.exit_status == 137
        ended = run("debian", hog, detach=True, mem_limit="64m")
        assert ended.wait()["StatusCode"] == 137
        ended.reload()
        other.reload()
        assert (ended.attrs["State"]["OOMKilled"], other.attrs["State"]["OOMKilled"]) == (True, False)
        assert run("debian", hog, name="hog", remove=True) == b"104857600\n"  # another one of that name
        many = "for n in 1 2 3 4 5 6 7 8; do sleep 100 & done; echo all"
        with pytest.raises(ContainerError, match="fork"):
            run("debian", ["sh", "-c", many], pids_limit=4, remove=True)
        assert run("debian", ["sh", "-c", many], remove=True) == b"all\n"
        assert other.exec_run(["sh", "-c", many]).exit_code != 0
        other.reload()
        assert other.status == "running"

    await asyncio.to_thread(acts)


async def test_what_happens_is_reported(sb: Sandbox, engine: Any) -> None:
    def acts() -> list[str]:
        stream = engine.events(decode=True, filters={"label": "a"})
        engine.containers.run("debian", "true", remove=True)  # without the label
        engine.containers.run("debian", ["sh", "-c", "exit 4"], name="a", labels={"a": ""}, detach=True).wait()
        engine.containers.get("a").remove()
        seen: list[str] = []
        for event in stream:
            assert event["Actor"]["Attributes"]["name"] == "a"
            seen.append(event["Action"] + event["Actor"]["Attributes"].get("exitCode", ""))
            if seen[-1] == "destroy":
                return seen
        return seen

    assert await asyncio.to_thread(acts) == ["create", "start", "die4", "destroy"]


async def test_labels_come_back(sb: Sandbox, engine: Any) -> None:
    def acts() -> None:
        engine.networks.create("n", labels={"of": "n"})
        engine.volumes.create("v", labels={"of": "v"})
        assert engine.networks.get("n").attrs["Labels"] == {"of": "n"}
        assert engine.volumes.get("v").attrs["Labels"] == {"of": "v"}
        engine.volumes.get("v").remove()
        engine.volumes.create("v")
        assert engine.volumes.get("v").attrs["Labels"] == {}

    await asyncio.to_thread(acts)


async def test_they_are_part_of_the_state(sb: Sandbox, engine: Any) -> None:
    run = engine.containers.run
    await asyncio.to_thread(
        run, "debian", ["sh", "-c", SERVER], name="web", detach=True, ports={"80/tcp": 8080}, auto_remove=True
    )
    assert await asked(sb, "127.0.0.1:8080") == "hello 127.0.0.1"
    await sb.exec("mkdir -p /data/dir; echo 1 > /data/dir/data; echo conf > /data/conf")
    script = "exec 3>> /dir/data 4< /conf; while :; do echo more >&3; sleep 0.1; done"
    volumes = ["/data/dir:/dir", "/data/conf:/conf:ro", "/:/all:ro"]
    await asyncio.to_thread(run, "debian", ["sh", "-c", script], name="binds", detach=True, volumes=volumes)
    one = await sb.checkpoint()
    await asyncio.to_thread(run, "debian", "sleep 1000", name="later", detach=True)
    two = await sb.checkpoint()

    async def names(of: Sandbox) -> list[str]:
        return [service.name for service in await of.services.list()]

    assert await names(sb) == ["web", "binds", "later"]
    assert (await sb.restore(one.id, verify=True)).verified
    assert await names(sb) == ["web", "binds"] and await asked(sb, "127.0.0.1:8080") == "hello 127.0.0.1"
    assert (await sb.exec("ls /services")).text.split() == ["binds", "web"]
    size = (await sb.files.stat("/data/dir/data")).size
    assert await sb.files.read("/dir/data", service="binds", limit=2) == b"1\n"
    assert await sb.files.read("/conf", service="binds") == b"conf\n"
    assert (await sb.exec("cat /all/data/conf; ls /all/proc", service="binds")).text == "conf\n"
    await asyncio.sleep(0.5)
    assert (await sb.files.stat("/data/dir/data")).size > size
    await asyncio.to_thread(run, "debian", "sleep 1000", name="instead", detach=True)
    assert (await sb.restore(two.id, verify=True)).verified
    assert await names(sb) == ["web", "binds", "later"]
    async with (await sb.fork(1))[0].sandbox as fork:
        assert (
            await names(fork) == ["web", "binds", "later"] and await asked(fork, "127.0.0.1:8080") == "hello 127.0.0.1"
        )
        async with fork.ports.forward(PORT) as address:
            client = await client_of(address)
            found = await asyncio.to_thread(client.containers.get, "web")
            await asyncio.to_thread(found.stop, timeout=1)  # it is removed when it has ended
            for _ in range(100):
                if await names(fork) == ["binds", "later"]:
                    break
                await asyncio.sleep(0.05)
        assert await names(fork) == ["binds", "later"]
    assert await names(sb) == ["web", "binds", "later"]
    (root,) = [one for one in await sb.tree() if one.label == "created"]
    await sb.restore(root.id)  # before anything was there
    with pytest.raises(Invalid, match="no services"):
        await sb.services.list()
    assert (await sb.exec("ls /services")).exit_code == 2
    await asyncio.to_thread(run, "debian", "true", name="first", remove=True)


async def test_builds_and_copies(sb: Sandbox, engine: Any, host: Client) -> None:
    def context(dockerfile: str, **files: str) -> io.BytesIO:
        result = io.BytesIO()
        with tarfile.open(fileobj=result, mode="w") as packed:
            for name, text in {"Dockerfile": dockerfile, **files}.items():
                header = tarfile.TarInfo(name)
                header.size = len(text)
                packed.addfile(header, io.BytesIO(text.encode()))
        result.seek(0)
        return result

    def build(dockerfile: str, tag: str, **files: str) -> Any:
        return engine.images.build(fileobj=context(dockerfile, **files), custom_context=True, tag=tag)

    def acts() -> None:
        build('FROM debian\nCOPY a /a\nRUN echo built >> /a\nCMD ["cat", "/a"]\n', "own/app:1", a="content\n")
        assert engine.containers.run("own/app:1", remove=True) == b"content\nbuilt\n"
        build("FROM own/app:1\nRUN echo more >> /a\n", "second")
        assert engine.containers.run("second", remove=True) == b"content\nbuilt\nmore\n"
        for text in ("FROM nosuch:9\n", "FROM debian\nADD http://127.0.0.1:9/x /x\n"):
            with pytest.raises(Exception, match=r"nosuch:9|fetches nothing"):
                build(text, "third")
        assert {tag for one in engine.images.list() for tag in one.tags} >= {"own/app:1", "second:latest"}
        with pytest.raises(APIError, match="belongs to the host"):
            engine.images.remove("debian")
        with pytest.raises(APIError, match="no part"):
            engine.containers.create("debian", "true", volumes=["/proc:/p"])
        web = engine.containers.create("debian", "true", name="files")
        archive = context("x", one="1")
        assert web.put_archive("/srv", archive.read())
        parts, status = web.get_archive("/srv/one")
        with tarfile.open(fileobj=io.BytesIO(b"".join(parts))) as packed:
            assert packed.getnames() == ["one"] and status["size"] == 1

    await asyncio.to_thread(acts)
    (name,) = {one.name for one in await host.images.list() if one.name.startswith("built-")} & set(
        [one.name for one in await host.images.list() if one.name.startswith("built-")][:1]
    )
    async with host.create("debian", docker=True) as other, other.ports.forward(PORT) as address:
        client = await client_of(address)
        with pytest.raises(ImageNotFound):
            await asyncio.to_thread(client.containers.run, name, "true")
        assert {tag for one in await asyncio.to_thread(client.images.list) for tag in one.tags}.isdisjoint(
            {"own/app:1", name}
        )


async def test_no_image_outlives_its_sandbox(host: Client) -> None:
    async def built() -> set[str]:
        return {one.name for one in await host.images.list() if one.name.startswith("built-")}

    before = await built()
    async with host.create("debian", docker=True) as sandbox, sandbox.ports.forward(PORT) as address:
        client = await client_of(address)
        for text in (b"FROM debian\nRUN echo x > /only-here\n", b"FROM debian\nRUN echo y > /only-here\n"):
            await asyncio.to_thread(client.images.build, fileobj=io.BytesIO(text), tag="mine")
            assert len(await built() - before) == 1
    assert await built() == before


async def test_what_is_built_takes_no_more_than_a_disk(host: Client) -> None:
    limits = Limits(disk="300MiB")
    async with host.create("debian", docker=True, limits=limits) as sandbox, sandbox.ports.forward(PORT) as address:
        client = await client_of(address)
        text = b"FROM debian\nRUN head -c 200000000 /dev/urandom > /large\n"
        with pytest.raises(BuildError, match="is the limit"):
            await asyncio.to_thread(client.images.build, fileobj=io.BytesIO(text), tag="large")
        assert await asyncio.to_thread(client.images.list, "large") == []


@pytest.mark.skipif(CLIENT is None, reason="there is no docker client")
async def test_the_command_itself(sb: Sandbox) -> None:
    assert CLIENT is not None
    await sb.exec("ln -s /opt/host/docker /usr/local/bin/docker")

    async def run(command: str) -> tuple[int, str]:
        done = await sb.exec(command, timeout=100)
        return done.exit_code, (done.stdout + done.stderr).decode()

    assert await run("docker run --rm debian sh -c 'echo out; exit 3'") == (3, "out\n")
    assert await run("echo in | docker run -i --rm debian sh -c 'cat; echo end'") == (0, "in\nend\n")
    code, said = await run("docker run --rm debian nosuchprogram")
    assert code == 127 and "executable file not found" in said
    code, said = await run("docker run --privileged debian true")
    assert code == 125 and "--privileged" in said
    assert (await run("docker ps -aq")) == (0, "")
    await run("docker run -d --name web debian sleep 1000")
    background = "(docker exec web sh -c 'sleep 2; exit 5'; echo code $? > /tmp/code) > /dev/null 2>&1 & sleep 0.5"
    assert (await sb.exec(background)).exit_code == 0
    here = await sb.checkpoint()
    assert (await sb.restore(here.id, verify=True)).verified
    assert await run("until test -s /tmp/code; do sleep 0.1; done; cat /tmp/code") == (0, "code 5\n")


async def test_a_new_daemon_goes_on(own: Daemon) -> None:
    async with own.client() as host:
        sandbox = await host.create("debian", docker=True)
        async with sandbox.ports.forward(PORT) as address:
            client = await client_of(address)
            await asyncio.to_thread(client.containers.run, "debian", "sleep 1000", name="web", detach=True)
            for said in ({"name": "../web"}, {"name": "x", "network": "a/b"}, {"name": "x", "ports": {"99999/tcp": 1}}):
                with pytest.raises(APIError):
                    await asyncio.to_thread(client.containers.create, "debian", "true", **said)
        own.kill()
        own.start()
        sandbox = await host.get(sandbox.id)
        async with sandbox.ports.forward(PORT) as address:
            client = await client_of(address)
            web = await asyncio.to_thread(client.containers.get, "web")
            assert (await asyncio.to_thread(web.exec_run, "test -e /etc/debian_version")).exit_code == 0
            assert await asyncio.to_thread(client.containers.run, "debian", "echo new", remove=True) == b"new\n"


async def test_who_plays_with_the_places_of_services_gets_nothing(sb: Sandbox, engine: Any) -> None:
    """The root of the sandbox owns the tree in which services lie."""
    await sb.exec("ln -s / /services")
    with pytest.raises(APIError):
        await asyncio.to_thread(engine.containers.run, "debian", "true", name="proc")
    assert (await sb.exec("mount | grep -c 'on /proc '")).text.strip() == "1"
    assert (await sb.exec("cat /proc/kcore | head -c 1; rm /services; ls -d /proc/1")).text.strip() == "/proc/1"
    assert await asyncio.to_thread(engine.containers.run, "debian", "echo fine", remove=True) == b"fine\n"
    await asyncio.to_thread(engine.containers.run, "debian", "sleep 1000", name="web", detach=True)
    await sb.exec("mv /services /other; mkdir /services; mkdir /services/web")
    web = await asyncio.to_thread(engine.containers.get, "web")
    assert (await asyncio.to_thread(web.exec_run, "true")).exit_code in (126, 127)
    await asyncio.to_thread(web.remove, force=True)
    assert (await sb.exec("ls -d /proc/1")).exit_code == 0


async def test_another_host_takes_them(host: Client, own: Daemon) -> None:
    async with host.create("debian", docker=True) as sandbox, sandbox.ports.forward(PORT) as address:
        client = await client_of(address)
        await asyncio.to_thread(client.containers.run, "debian", "sleep 1000", name="web", detach=True)
        point = await sandbox.checkpoint()
        await host.store.verify(point)  # it is durable by then
        async with own.client() as there:
            await there.store.receive(host.store.stream(point))
            async with (
                (await there.fork(point.id, verify=True))[0].sandbox as moved,
                moved.ports.forward(PORT) as place,
            ):
                client = await client_of(place)
                web = await asyncio.to_thread(client.containers.get, "web")
                assert (web.name, web.status) == ("web", "running")
                assert (await asyncio.to_thread(web.exec_run, "test -e /etc/debian_version")).exit_code == 0
                assert "sleep 1000" in (await moved.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).text
                assert await asyncio.to_thread(client.containers.run, "debian", "echo new", remove=True) == b"new\n"
