"""Docker's own command in the main service of a composition: each verb works, or is refused with what to do instead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox import Client, Sandbox
from tests.support.daemon_host import Daemon
from tests.support.docker_command import (
    COMMAND,
    MISSING,
    PLUGIN_MISSING,
    TRAFFIC,
    more_rounds,
    plugin,
    says,
    with_docker,
)

pytestmark = pytest.mark.skipif(COMMAND is None, reason=MISSING)
SERVE = "python3 -m http.server --directory /etc 80"
FETCH = "python3 -c 'import urllib.request as u; print(u.urlopen(\"http://{}/hostname\").status)'"


@pytest.fixture
async def sb(host: Client, tmp_path: Path) -> AsyncIterator[Sandbox]:
    async with with_docker(host, tmp_path) as sandbox:
        yield sandbox


async def test_run(sb: Sandbox) -> None:
    script = "id -un; pwd; echo $A $B; exit 7"
    told = await says(sb, f"docker run --rm -e A=1 -e 'B=x y' -w /new/dir -u nobody debian sh -c '{script}'", code=7)
    assert told.splitlines() == ["nobody", "/new/dir", "1 x y"]
    assert "not a TTY" in await says(sb, "docker run -it --rm debian tty", code=1)
    terminal = "script -qec 'docker run -it --rm debian tty' /dev/null < /dev/null"
    assert "/dev/pts/" in await says(sb, terminal)
    await says(sb, "mkdir -p /srv/own /work/dir; echo own > /srv/own/f; echo volume > /work/dir/f")
    binds = "-v /srv/own:/a -v ./dir:/b -v /new/source:/c --mount type=tmpfs,dst=/t -w /b/deeper"
    told = await says(sb, f"cd /work; docker run --rm {binds} debian sh -c 'cat /a/f /b/f; touch /c/made /t/x; pwd'")
    assert told.splitlines() == ["own", "volume", "/b/deeper"]
    assert await says(sb, "ls /new/source; ls -d /work/dir/deeper") == "made\n/work/dir/deeper"
    told = await says(sb, "docker run --mount type=bind,src=/nosuch,dst=/x debian true", code=125)
    assert "bind source path does not exist: /nosuch" in told and "Unable to find image" not in told
    told = await says(sb, "docker run --network nosuch debian true", code=125)
    assert "network nosuch not found" in told and "Unable to find image" not in told
    assert await says(sb, "docker ps -aq | wc -l") == "2"


async def test_containers_and_services_find_one_another(sb: Sandbox) -> None:
    await says(sb, f"docker run -d --name web -p 8080:80 debian {SERVE}")
    await says(sb, f"until {FETCH.format('web')} 2> /dev/null; do sleep 0.1; done")
    assert await says(sb, FETCH.format("localhost:8080")) == "200"
    assert await says(sb, f"docker run --rm debian {FETCH.format('web')}") == "200"
    alone = await says(sb, f"docker run --rm --network none debian {FETCH.format('web')}", code=1)
    assert "name resolution" in alone
    listed = (await says(sb, "docker ps --format '{{.Names}} {{.Status}} {{.Ports}} {{.RunningFor}}'")).splitlines()
    assert {line.split()[0] for line in listed} == {"web", "agent", "store"}
    assert any("0.0.0.0:8080->80/tcp" in line for line in listed)
    assert not any("years" in line for line in listed)
    assert await says(sb, "docker port web") == "80/tcp -> 0.0.0.0:8080"
    own = (await says(sb, "docker top web -eo pid,comm")).splitlines()
    assert len(own) == 2 and own[1].endswith("python3")
    assert "none." not in await says(sb, "docker network ls")


async def test_a_container_from_its_beginning_to_its_end(sb: Sandbox) -> None:
    events = "(timeout 60 docker events --format '{{.Action}}' > /tmp/events) > /dev/null 2>&1 &"
    await sb.exec(f"{events} sleep 1")
    await says(sb, "docker create --name first debian sh -c 'echo out; echo err >&2; sleep 1000'")
    await says(sb, "docker rename first c && docker start c")
    assert await says(sb, "until docker logs c | grep out; do sleep 0.1; done; docker exec c sh -c 'exit 4'", code=4)
    assert await says(sb, "echo in | docker exec -i c cat; docker exec -e A=1 -w /tmp -u nobody c sh -c 'id -un; pwd'")
    assert await says(sb, "docker logs --tail 1 c 2>&1 > /dev/null") == "err"
    assert "no times" in await says(sb, "docker logs -t c", code=1)
    assert "no times" in await says(sb, "sleep 2; docker logs --since 1ms c", code=1)
    assert "rename" in await says(sb, "docker rename c d", code=1)  # it runs
    assert await says(sb, "docker inspect -f '{{.State.Status}} {{.Config.Image}}' c") == "running debian"
    assert await says(sb, "docker restart -t 0 c; docker stop -t 0 c; docker start c; docker kill c; docker wait c")
    await says(sb, "docker rm c; docker run -d --name a -p 80:80 debian sleep 1000")
    assert "already allocated" in await says(sb, "docker run -d --name b -p 80:80 debian sleep 1000", code=125)
    await says(sb, "docker stop -t 0 a; docker start b")
    assert "already allocated" in await says(sb, "docker start a", code=1)
    assert "No such container: c" in await says(sb, "docker rm c", code=1)
    acts = await says(sb, "until grep -q destroy /tmp/events; do sleep 0.1; done; cat /tmp/events")
    assert {"create", "rename", "start", "die", "destroy"} <= set(acts.split())


async def test_files_are_copied_in_and_out(sb: Sandbox) -> None:
    await says(sb, "docker run -d --name c debian sleep 1000; mkdir -p /tmp/d/e; echo y > /tmp/d/e/f")
    await says(sb, "docker cp /tmp/d c:/srv && docker cp c:/srv/d /tmp/back && cat /tmp/back/e/f")
    assert await says(sb, "tar cz -C /tmp/d/e f | docker cp - c:/opt; docker exec c cat /opt/f") == "y"
    assert "Could not find the file /nosuch" in await says(sb, "docker cp c:/nosuch /tmp", code=1)
    assert "cannot be unpacked" in await says(sb, "head -c 99 /dev/zero | gzip | head -c 20 | docker cp - c:/", code=1)


async def test_images_are_built_and_not_pulled(sb: Sandbox) -> None:
    lines = ("FROM debian:latest", "ARG V=1", "COPY f /f", "RUN echo $V >> /f", "EXPOSE 80", 'CMD ["cat", "/f"]')
    await sb.files.write("/b/Dockerfile", "\n".join(lines).encode())
    await sb.files.write("/b/f", b"file\n")
    assert "Successfully tagged mine:latest" in await says(sb, "docker build -t mine --build-arg V=2 /b")
    assert await says(sb, "docker run --rm mine") == "file\n2"
    number = await says(sb, "docker build -q /b 2> /dev/null")
    assert number.startswith("sha256:") and await says(sb, f"docker run --rm {number}") == "file\n1"
    assert await says(sb, "docker run --rm $(docker images -q mine)") == "file\n2"
    assert await says(sb, "tar cz -C /b . | docker build -q - 2> /dev/null") == number
    assert "before" in await says(sb, r"printf 'FROM debian\nRUN echo before; false\n' | docker build -q -", code=1)
    assert "->80/tcp" in await says(
        sb, "docker run -d --name p -P mine sleep 9; docker ps -f name=p --format {{.Ports}}"
    )
    assert await says(sb, "docker tag mine mine:3 && docker rmi mine:3") == "Untagged: mine:3"
    listed = (await says(sb, "docker images --format '{{.Repository}}:{{.Tag}}'")).splitlines()
    assert "debian:latest" in listed and "mine:latest" in listed and not any("composition-" in one for one in listed)
    assert "on this host" in await says(sb, "docker pull debian:latest && docker run --rm --pull always debian true")
    assert "whose images sandboxes use" in await says(sb, "docker pull busybox", code=1)
    assert "DOCKER_BUILDKIT=0" in await says(sb, "docker pull moby/buildkit:buildx-stable-1", code=1)


async def test_networks_and_volumes(sb: Sandbox) -> None:
    await says(sb, "docker network create n; docker volume create v; docker volume create")
    await says(sb, f"docker run -d --name web --network n --network-alias www -v v:/v debian {SERVE}")
    await says(sb, f"until docker run --rm --network n debian {FETCH.format('www')} 2> /dev/null; do :; done")
    assert "name resolution" in await says(sb, FETCH.format("www"), code=1)
    await says(sb, "docker network connect n agent")
    assert await says(sb, FETCH.format("www")) == "200"
    await says(sb, "docker network disconnect n agent; docker rm -f web; docker network prune -f")
    assert await says(sb, "docker network ls --format {{.Name}}") == "bridge\ndefault"
    await says(sb, "docker volume prune -f")
    assert await says(sb, "docker volume ls -q") == "v\nwork"
    await says(sb, "docker volume prune -af")
    assert await says(sb, "docker volume ls -q; docker system prune -f > /dev/null") == "work"
    assert "macvlan is not supported" in await says(sb, "docker network create -d macvlan m", code=1)
    assert "addresses are given" in await says(sb, "docker run --network default --ip 10.0.0.1 debian true", code=125)


#: What follows `docker`, and what is said of what to do instead.
REFUSED = (
    ("run --privileged debian true", "no service is privileged"),
    ("run --sysctl net.core.somaxconn=9 debian true", "remove it"),
    ("run --network host debian true", "reach the others by their names"),
    ("pause store", "docker stop"),
    ("update -m 64m store", "docker run"),
    ("commit store x", "docker build"),
    ("diff store", "find"),
    ("export store", "docker cp"),
    ("save debian", "images are those of the host"),
    ("push debian", "images are those of the host"),
    ("login -u a -p b", "images are those of the host"),
    ("swarm init", "docker compose"),
    ("service ls", "docker compose"),
    ("plugin ls", "drivers that are there"),
    ("rm -f store", "stop it"),
)


async def test_what_is_refused_says_what_to_do(sb: Sandbox) -> None:
    for words, instead in REFUSED:
        done = await sb.exec(f"docker {words}")
        assert done.exit_code != 0 and instead in done.stderr.decode(), (words, done.stderr)


async def test_version_and_info(sb: Sandbox) -> None:
    assert await says(sb, "docker version -f '{{.Server.APIVersion}}'") == "1.43"
    assert await says(sb, "docker info -f '{{.Containers}} {{.MemTotal}} {{.Swarm.LocalNodeState}}'") == (
        f"2 {2 << 30} inactive"
    )
    assert "WARNING: --read-only" in await says(sb, "docker run --rm --read-only debian true; docker system df")


@pytest.mark.skipif(plugin() is None, reason=PLUGIN_MISSING)
async def test_compose(host: Client, tmp_path: Path) -> None:
    file = """services:
  web:
    build: .
    command: sh -c 'echo said; exec python3 -m http.server --directory /etc 80'
    ports: [9000:80]
    depends_on: {cache: {condition: service_healthy}}
    volumes: [data:/data]
  cache: {image: "debian:latest", command: sleep infinity, healthcheck: {test: [CMD, "true"], interval: 1s}}
  near: {image: debian, command: sleep infinity, networks: [default, sandbox]}
volumes: {data: }
networks: {sandbox: {name: default, external: true}}
"""
    async with with_docker(host, tmp_path, compose=True) as sb:
        await says(sb, r"mkdir /p; printf 'FROM debian\nRUN echo built > /built\n' > /p/Dockerfile")
        await sb.files.write("/p/compose.yaml", file.encode())
        compose = "docker compose --progress plain -f /p/compose.yaml"
        await says(sb, f"{compose} up -d --wait")
        states = await says(sb, f"{compose} ps --format '{{{{.Service}}}} {{{{.State}}}}'")
        assert sorted(states.splitlines()) == ["cache running", "near running", "web running"]
        await says(sb, f"until {FETCH.format('localhost:9000')} 2> /dev/null; do sleep 0.1; done")
        assert "said" in await says(sb, f"{compose} logs web") and "built" in await says(
            sb, f"{compose} exec -T web ls /"
        )
        assert await says(sb, f"{compose} exec -T cache {FETCH.format('web')}") == "200"
        assert await says(sb, f"{compose} exec -T near getent hosts store | wc -l") == "1"
        assert "said" in await says(sb, f"{compose} run --rm --no-deps web echo said")
        await says(sb, "sed -i s/said/again/ /p/compose.yaml")
        await says(sb, f"{compose} up -d --wait")  # it is made again, under a name for a while, and renamed
        assert "again" in await says(sb, f"until {compose} logs web | grep again; do sleep 0.1; done")
        assert "pg-1" not in await says(sb, "docker ps -a --format {{.Names}}")
        await says(sb, f"{compose} restart cache && {compose} stop near && {compose} down -v")
        assert await says(sb, "docker ps -a --format {{.Names}}") == "agent\nstore"
        assert await says(sb, "docker volume ls -q; docker network ls --format {{.Name}}") == "work\nbridge\ndefault"


# --------------------------------------------------------------------------- checkpoints


async def test_containers_are_in_checkpoints_with_their_connections(sb: Sandbox, own: Daemon) -> None:
    await says(sb, TRAFFIC)
    await says(sb, f"docker run -d --name web -p 8080:80 -v data:/data debian {SERVE}")
    await more_rounds(sb)
    here = await sb.checkpoint()
    await says(sb, "docker rm -f web; docker run -d --name later debian sleep 1000")
    await sb.kill()
    assert (await sb.restore(here, verify=True)).verified
    await more_rounds(sb)
    assert await says(sb, FETCH.format("localhost:8080")) == "200"
    names = "agent\nstore\ntraffic\nweb"
    assert await says(sb, "docker ps -a --format {{.Names}} | sort") == names
    forks = [fork.sandbox for fork in await sb.fork(2)]
    try:
        await asyncio.gather(*(more_rounds(fork) for fork in forks))
        await says(forks[0], "docker rm -f traffic")
        await more_rounds(forks[1])
        assert await says(forks[1], "docker ps -a --format {{.Names}} | sort") == names
    finally:
        for fork in forks:
            await fork.remove()
    await more_rounds(sb)
    point = await sb.checkpoint()
    await sb._client.store.verify(point)  # it is durable by then
    async with own.client() as there:
        await there.store.receive(sb._client.store.stream(point), mounts=True)
        async with (await there.fork(point.id, verify=True))[0].sandbox as moved:
            await more_rounds(moved)
            assert await says(moved, "docker run --rm debian echo new") == "new"
            assert await says(moved, FETCH.format("localhost:8080")) == "200"
