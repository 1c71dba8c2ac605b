"""The services of a composition: started in order, reached by name, watched over, and through checkpoints."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.catalogue import ProgramRow
from daemon.turns.services import LONGEST_PAUSE, has_reached, pause_before_restart, startup_order
from sandbox import Client
from sandbox.errors import Conflict, Invalid, NotFound
from sandbox.messages import Composition, ProgramKind, Service
from sandbox.messages.services import (
    Condition,
    Dependency,
    HostMount,
    Probe,
    PublishedPort,
    Restart,
    ServiceHealth,
    ServiceNetwork,
    ServiceState,
    Volume,
)
from tests.support.compositions import GET, WELL, composed, server, shell
from tests.support.daemon_host import IMAGE, Daemon

SLEEP = shell("exec sleep 100000")


def program(**more: object) -> ProgramRow:
    row = {"id": "p-1", "kind": ProgramKind.SERVICE, "command": "", "started_at": 0.0, "pid": 7}
    return ProgramRow(**{**row, **more})  # type: ignore[arg-type]


# --------------------------------------------------------------------------- pure


@pytest.mark.parametrize(
    ("policy", "attempts", "restarts", "stopped", "code", "ran", "pause"),
    [
        (Restart.NO, 0, 0, False, 1, 1, None),
        (Restart.ALWAYS, 0, 0, False, 0, 1, 0.1),
        (Restart.ALWAYS, 0, 3, False, 0, 1, 0.8),
        (Restart.ALWAYS, 0, 3, False, 0, 11, 0.1),  # it had settled
        (Restart.ALWAYS, 0, 500, False, 0, 1, LONGEST_PAUSE),
        (Restart.ALWAYS, 0, 0, True, 0, 1, None),
        (Restart.UNLESS_STOPPED, 0, 0, False, 137, 1, 0.1),
        (Restart.ON_FAILURE, 0, 0, False, 0, 1, None),
        (Restart.ON_FAILURE, 0, 7, False, 1, 1, 12.8),
        (Restart.ON_FAILURE, 3, 2, False, 1, 1, 0.4),
        (Restart.ON_FAILURE, 3, 3, False, 1, 1, None),
    ],
)
def test_pause_before_a_restart(
    policy: Restart, attempts: int, restarts: int, stopped: bool, code: int, ran: float, pause: float | None
) -> None:
    service = Service(image="a", restart=policy, restart_attempts=attempts)
    row = program(restarts=restarts, stopped=stopped)
    assert pause_before_restart(service, row, code, ran) == (pause if pause is None else pytest.approx(pause))


@pytest.mark.parametrize(
    ("status", "health", "condition", "restarts", "reached"),
    [
        (None, ServiceHealth.NONE, Condition.STARTED, True, True),
        (None, ServiceHealth.STARTING, Condition.HEALTHY, True, False),
        (None, ServiceHealth.HEALTHY, Condition.HEALTHY, True, True),
        (None, ServiceHealth.UNHEALTHY, Condition.HEALTHY, True, None),
        (None, ServiceHealth.NONE, Condition.COMPLETED, True, False),
        (0, ServiceHealth.NONE, Condition.COMPLETED, False, True),
        (0, ServiceHealth.NONE, Condition.STARTED, False, True),
        (0, ServiceHealth.STARTING, Condition.HEALTHY, False, None),
        (1 << 8, ServiceHealth.NONE, Condition.COMPLETED, False, None),
        (1 << 8, ServiceHealth.NONE, Condition.STARTED, True, False),  # it is started again
    ],
)
def test_what_others_wait_for(
    status: int | None, health: ServiceHealth, condition: Condition, restarts: bool, reached: bool | None
) -> None:
    assert has_reached(program(exit_status=status, health=health), condition, restarts=restarts) is reached


@given(st.data())
def test_services_start_after_those_that_they_depend_on(data: st.DataObject) -> None:
    names = [f"s{number}" for number in range(data.draw(st.integers(1, 8)))]
    needs = {
        name: data.draw(st.sets(st.sampled_from(names[:at]) if at else st.nothing())) for at, name in enumerate(names)
    }
    order = data.draw(st.permutations(names))
    composition = Composition(
        services={
            name: Service(image="a", depends_on={other: Dependency() for other in needs[name]}) for name in order
        },
        main=names[0],
    )
    requested = data.draw(st.lists(st.sampled_from(names)))
    result = startup_order(composition, requested)
    assert len(set(result)) == len(result)
    assert set(requested or names) <= set(result)
    for at, name in enumerate(result):
        assert needs[name] <= set(result[:at])


def test_a_circle_is_refused() -> None:
    services = {
        "a": Service(image="a", depends_on={"b": Dependency()}),
        "b": Service(image="a", depends_on={"a": Dependency()}),
    }
    with pytest.raises(ValueError, match="a -> b -> a"):
        Composition(services=services, main="a").order()


# --------------------------------------------------------------------------- real


async def test_services_find_each_other_and_no_others(host: Client) -> None:
    composition = Composition(
        services={
            "web": server(
                "web",
                healthcheck=WELL,
                hostname="page",
                networks={"front": ["www"]},
                ports=[PublishedPort(target=80, published=8080)],
            ),
            "db": server(
                "db", healthcheck=WELL, networks={"front": [], "back": []}, extra_hosts={"elsewhere": "10.9.8.7"}
            ),
            "far": server("far", healthcheck=WELL, networks={"back": []}),
        },
        networks={"front": ServiceNetwork(), "back": ServiceNetwork(internal=True)},
        main="web",
    )
    async with composed(host, composition) as sb:
        await sb.up()
        assert await sb.says(GET % "db") == "db 127.1.0.2"  # from its own address
        for own in ("localhost", "127.0.0.1", "[::1]", "web", "www", "page", "$(hostname)", "$HOSTNAME"):
            assert await sb.says(GET % own, "web") == "web 127.1.0.2"
        assert await sb.says(GET % "far", "db") == "far 127.1.0.3"
        assert "Operation not permitted" in await sb.says(GET % "127.1.0.4", "web")
        assert "Operation not permitted" in await sb.says(GET % "10.9.8.7", "far")  # no network but an internal one
        assert "elsewhere" in await sb.says("cat /etc/hosts", "db")
        assert "far" not in await sb.says("cat /etc/hosts", "web")
        assert await sb.says("echo $HOSTNAME", "web") == "page"
        assert await sb.says("df / | tail -1 | grep -o '/$'; ls /services 2>&1") == (
            "/\nls: cannot access '/services': No such file or directory"
        )
        handle = await host.get(sb.id)
        reader, writer = await handle.ports.connect(8080)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        assert (await reader.read()).endswith(b"web 127.0.0.1")
        writer.close()
        assert await handle.ports.list() == [80, 8080]


async def test_two_may_have_a_port_and_one_two_families(host: Client) -> None:
    both = r"""
import socket as s
a = s.socket(); a.bind(("0.0.0.0", 90)); a.listen()
b = s.socket(s.AF_INET6); b.setsockopt(s.IPPROTO_IPV6, s.IPV6_V6ONLY, 1); b.bind(("::", 90)); b.listen()
u = s.socket(s.AF_INET, s.SOCK_DGRAM); u.bind(("", 90))
c = s.create_connection(("localhost", 90)); v = s.socket(s.AF_INET, s.SOCK_DGRAM); v.sendto(b"x", ("127.0.0.1", 90))
print(a.getsockname()[0], a.accept()[1][0], u.recvfrom(9)[0].decode())
"""
    services = {name: Service(image=IMAGE, command=SLEEP) for name in ("one", "two")}
    async with composed(host, Composition(services=services, main="one")) as sb:
        said = [await sb.says(f"python3 -c '{both}'", name) for name in ("one", "two")]
        assert said == ["127.1.0.2 127.1.0.2 x", "127.1.0.3 127.1.0.3 x"]


async def test_order_health_and_ends(host: Client) -> None:
    composition = Composition(
        services={
            "web": server(
                "web",
                depends_on={
                    "db": Dependency(condition=Condition.HEALTHY),
                    "init": Dependency(condition=Condition.COMPLETED),
                },
            ),
            "init": Service(
                image=IMAGE, command=shell("sleep 0.3; echo done > /d/ok"), volumes=[Volume(name="d", target="/d")]
            ),
            "db": server("db", healthcheck=WELL, volumes=[Volume(name="d", target="/var/data", read_only=True)]),
            "broken": Service(
                image=IMAGE,
                command=shell("echo no luck >&2; exit 3"),
                restart=Restart.ON_FAILURE,
                restart_attempts=2,
                healthcheck=WELL,
            ),
            "ill": Service(
                image=IMAGE, command=SLEEP, healthcheck=Probe(test=shell("echo bad; exit 1"), interval=0.1, retries=2)
            ),
        },
        main="web",
    )
    async with composed(host, composition) as sb:
        up = await sb.up("web")
        assert up["web"].started_at > max(up["db"].started_at, up["init"].started_at)
        assert (up["db"].health, up["init"].exit_code) == (ServiceHealth.HEALTHY, 0)
        assert await sb.says("cat /var/data/ok; touch /var/data/x", "db") == (
            "done\ntouch: cannot touch '/var/data/x': Read-only file system"
        )
        with pytest.raises(Conflict, match="service broken ended with 3: no luck"):
            await sb.up("broken")
        with pytest.raises(Conflict, match="service ill is unhealthy: bad"):
            await sb.up("ill")
        now = await sb.services()
        assert (now["broken"].state, now["broken"].restarts) == (ServiceState.EXITED, 2)
        handle = await host.get(sb.id)
        for _ in range(20):  # more than are kept of those that have ended
            await (await handle.processes.start("true", ends_turn=False)).wait()
        assert (await sb.services())["init"].exit_code == 0
        stopped = await sb.act("web", "stop")
        assert (stopped.state, stopped.exit_code) == (ServiceState.EXITED, 128 + 15)
        again = await sb.act("web", "restart")
        assert again.state is ServiceState.RUNNING and again.program != stopped.program


async def test_what_a_service_started_ends_with_it(host: Client) -> None:
    leaves = shell("setsid sleep 4711 & exec sleep 100000")
    services = {
        "a": Service(image=IMAGE, command=leaves),
        "b": Service(image=IMAGE, command=shell("setsid sleep 4712 & exec sleep 1")),
    }
    async with composed(host, Composition(services=services, main="a")) as sb:
        await sb.up()
        await sb.act("a", "stop")
        left = await sb.says("for p in /proc/[0-9]*; do grep -q '^sleep' $p/comm && tr '\\0' ' ' <$p/cmdline; done")
        assert "4711" not in left and "4712" in left


async def test_a_service_is_killed_and_started_again(host: Client) -> None:
    composition = Composition(
        services={"web": server("web", restart=Restart.ALWAYS), "main": Service(image=IMAGE, command=SLEEP)},
        main="main",
    )
    async with composed(host, composition) as sb:
        first = (await sb.up())["web"]
        await sb.run(f"kill -9 {first.pid}")
        for _ in range(100):
            now = (await sb.services())["web"]
            if now.state is ServiceState.RUNNING and now.program != first.program:
                break
            await asyncio.sleep(0.05)
        assert (now.restarts, now.state) == (1, ServiceState.RUNNING)


async def test_all_of_it_goes_through_kills_restores_and_forks(host: Client) -> None:
    socket = r"""
import os, socket as s, threading
os.makedirs("/run/x", exist_ok=True)
a = s.socket(s.AF_UNIX); a.bind("/var/run/x/s"); a.listen()
while True:
    c, _ = a.accept(); c.sendall(a.getsockname().encode()); c.close()
"""
    client = (
        "python3 -c 'import socket as s; c = s.socket(s.AF_UNIX); c.connect(\"/run/x/s\"); print(c.recv(99).decode())'"
    )
    # One connection over which the two count up, never closed.
    left = r"""
import socket as s
a = s.socket(); a.bind(("", 7)); a.listen(); c = a.accept()[0]
while True: c.sendall(b"%d\n" % (int(c.recv(99)) + 1))
"""
    right = r"""
import os, socket as s, time
while True:
    try: c = s.create_connection(("left", 7)); break
    except OSError: time.sleep(0.05)
n = 0
while True:
    c.sendall(b"%d\n" % n); got = int(c.recv(99)); assert got == n + 1; n = got
    open("/n.new", "w").write(str(n)); os.replace("/n.new", "/n"); time.sleep(0.01)
"""
    composition = Composition(
        services={
            "main": Service(image=IMAGE, command=["python3", "-c", socket], volumes=[Volume(name="v", target="/v")]),
            "left": Service(image=IMAGE, command=["python3", "-c", left], tmpfs=["/scratch"]),
            "right": Service(image=IMAGE, command=["python3", "-c", right]),
        },
        main="main",
    )
    async with composed(host, composition) as sb:
        await sb.up()
        await sb.run("echo kept > /v/f")
        await sb.run("echo gone > /scratch/f", "left")
        for _ in range(3):
            assert (await sb.run("sleep 0.2")).checkpoint_error is None
            await sb.restore()
            before = int(await sb.says("cat /n; sleep 0.3", "right"))
            assert int(await sb.says("cat /n", "right")) > before
            assert await sb.says(client) == "/var/run/x/s"
        forks = await sb.fork(2)
        try:
            await forks[0].run("echo changed > /v/f")
            for fork in forks:
                assert {one.state for one in (await fork.services()).values()} == {ServiceState.RUNNING}
                before = int(await fork.says("cat /n; sleep 0.3", "right"))
                assert int(await fork.says("cat /n", "right")) > before
            assert [await one.says("cat /v/f") for one in (sb, *forks)] == ["kept", "changed", "kept"]
            await forks[0].act("left", "restart")
            assert await forks[0].says("ls /scratch", "left") == ""
        finally:
            for fork in forks:
                await fork.remove()


async def test_a_new_daemon_watches_over_them(own: Daemon) -> None:
    composition = Composition(services={"web": server("web", healthcheck=WELL, restart=Restart.ALWAYS)}, main="web")
    async with own.client() as host, composed(host, composition) as sb:
        first = (await sb.up())["web"]
        own.kill()
        own.start()
        assert (await sb.services())["web"].program == first.program
        assert await sb.says(GET % "localhost") == "web 127.1.0.2"
        await sb.run(f"kill -9 {first.pid}")
        for _ in range(100):
            if (now := (await sb.services())["web"]).health is ServiceHealth.HEALTHY and now.restarts:
                break
            await asyncio.sleep(0.05)
        assert (now.restarts, now.health) == (1, ServiceHealth.HEALTHY)


async def test_a_daemon_that_dies_before_a_restart_leaves_it_to_the_next(own: Daemon) -> None:
    row = Service(image=IMAGE, command=shell("sleep 0.2; exit 1"), restart=Restart.ALWAYS)
    async with own.client() as host, composed(host, Composition(services={"a": row}, main="a")) as sb:
        await sb.up()
        for _ in range(200):  # the pause doubles: it becomes long enough to be met
            if (now := (await sb.services())["a"]).restarts >= 4 and now.state is ServiceState.RESTARTING:
                break
            await asyncio.sleep(0.02)
        own.kill()
        own.start()
        for _ in range(200):
            if (await sb.services())["a"].program != now.program:
                break
            await asyncio.sleep(0.02)
        assert (await sb.services())["a"].program != now.program


async def test_files_and_users_are_those_of_a_service(host: Client, tmp_path: Path) -> None:
    (tmp_path / "given").write_text("by the host")
    os.chmod(tmp_path, 0o755)
    volume = Volume(name="v", target="/var/lib/data")
    composition = Composition(
        services={
            "main": Service(image=IMAGE, command=SLEEP, volumes=[volume], workdir="/srv/here"),
            "other": Service(
                image=IMAGE,
                command=SLEEP,
                user="nobody",
                env={"WHERE": "there"},
                mounts=[HostMount(source=str(tmp_path), target="/given")],
            ),
        },
        main="main",
    )
    async with composed(host, composition) as sb:
        handle = await host.get(sb.id)
        await handle.files.write("/var/lib/data/x", b"through the API")
        await handle.files.write("/etc/of-main", b"")
        assert await sb.says("pwd; cat /var/lib/data/x") == "/srv/here\nthrough the API"
        assert await sb.says("id -un; echo $WHERE; cat /given/given; ls /etc/of-main 2>&1", "other") == (
            "nobody\nthere\nby the hostls: cannot access '/etc/of-main': No such file or directory"
        )
        assert (await sb.run("echo more > /var/lib/data/y")).checkpoint_error is None
        await sb.restore()
        assert await sb.says("cat /given/given", "other") == "by the host"
        assert await sb.says("cat /var/lib/data/y") == "more"
        with pytest.raises(NotFound, match="no service nowhere"):
            await sb.run("true", "nowhere")
    async with host.create(IMAGE) as plain:
        with pytest.raises(Invalid, match="no services"):
            await host.call("GET", f"/v1/sandboxes/{plain.id}/services", list)


@pytest.mark.parametrize(
    ("composition", "words"),
    [
        (Composition(services={}, main="a"), "1 to 32 services"),
        (Composition(services={"a": Service(image=IMAGE)}, main="b"), "main service b"),
        (Composition(services={"a": Service(image=IMAGE)}, main="a"), "names a command"),
        (
            Composition(services={"a": Service(image=IMAGE, command=SLEEP, networks={"n": []})}, main="a"),
            "no network n",
        ),
        (
            Composition(
                services={
                    "a": Service(image=IMAGE, command=SLEEP, volumes=[Volume(name="v", target="/v")], tmpfs=["/v/t"])
                },
                main="a",
            ),
            "mounted at /v and /v/t overlaps",
        ),
        (
            Composition(
                services={
                    "a": Service(image=IMAGE, command=SLEEP, depends_on={"b": Dependency(condition=Condition.HEALTHY)}),
                    "b": Service(image=IMAGE, command=SLEEP),
                },
                main="a",
            ),
            "health of b, which has no check",
        ),
        (
            Composition(
                services={"a": Service(image=IMAGE, command=SLEEP, volumes=[Volume(name="v", target="/proc")])},
                main="a",
            ),
            "nothing can be mounted at /proc",
        ),
        (
            Composition(
                services={
                    n: Service(image=IMAGE, command=SLEEP, ports=[PublishedPort(target=1, published=2)]) for n in "ab"
                },
                main="a",
            ),
            "both publish port 2",
        ),
    ],
)
async def test_what_cannot_be_is_refused(host: Client, composition: Composition, words: str) -> None:
    with pytest.raises(Invalid, match=words):
        async with composed(host, composition):
            pass


async def test_a_program_that_is_not_there_is_named(host: Client) -> None:
    composition = Composition(services={"a": Service(image=IMAGE, command=["/no/such"])}, main="a")
    async with composed(host, composition) as sb:
        with pytest.raises(Exception, match="service a cannot be started: /no/such: no such program"):
            await sb.up()


async def test_a_shell_without_arguments_waits_at_its_stdin(host: Client) -> None:
    shells = {"a": Service(image=IMAGE, command=["sh"], stdin_open=True), "b": Service(image=IMAGE, command=["sh"])}
    async with composed(host, Composition(services=shells, main="a")) as sb:
        await sb.up()
        for _ in range(100):
            now = await sb.services()
            if now["b"].state is ServiceState.EXITED:
                break
            await asyncio.sleep(0.05)
        assert (now["a"].state, now["b"].exit_code) == (ServiceState.RUNNING, 0)


async def test_hostile_acts_between_networks_are_refused(host: Client) -> None:
    """By address, in every form, from others' addresses and by sockets of every kind; the neighbour is reached so."""
    acts = r"""
import socket as s, sys
target, own = sys.argv[1:]
def tcp(address, family=s.AF_INET, source=None):
    c = s.socket(family); c.settimeout(2)
    if source: c.bind((source, 0))
    c.connect((address, 80)); c.close()
def udp(address, family=s.AF_INET):
    s.socket(family, s.SOCK_DGRAM).sendto(b"x", (address, 9))
def connected(address, family=s.AF_INET):
    c = s.socket(family, s.SOCK_DGRAM); c.connect((address, 9)); c.send(b"x")
def fast(address):
    s.socket().sendto(b"x", s.MSG_FASTOPEN, (address, 80))
def raw(address):
    s.socket(s.AF_INET, s.SOCK_RAW, s.IPPROTO_RAW)
def packet(address):
    s.socket(s.AF_PACKET, s.SOCK_RAW, 3)
mapped = "::ffff:" + target
acts = {
    "tcp": lambda: tcp(target), "mapped": lambda: tcp(mapped, s.AF_INET6), "udp": lambda: udp(target),
    "udp6": lambda: udp(mapped, s.AF_INET6), "connected": lambda: connected(target),
    "connected6": lambda: connected(mapped, s.AF_INET6), "fast": lambda: fast(target), "raw": lambda: raw(target),
    "packet": lambda: packet(target), "spoofed": lambda: tcp(target, source="127.1.0.3"),
}
for name, act in acts.items():
    try: act(); print(name, "done")
    except OSError as error: print(name, error.strerror)
"""
    spoof = "import socket as s; a = s.socket(); a.bind(('127.1.0.3', 81)); print(a.getsockname()[0])"
    composition = Composition(
        services={
            "bad": server("bad", healthcheck=WELL, networks={"one": []}),
            "between": server("between", healthcheck=WELL, networks={"one": [], "two": []}),
            "other": server("other", healthcheck=WELL, networks={"two": []}),
        },
        networks={"one": ServiceNetwork(), "two": ServiceNetwork(internal=True)},
        main="bad",
    )
    async with composed(host, composition) as sb:
        await sb.up()
        handle = await host.get(sb.id)
        await handle.files.write("/acts.py", acts.encode())
        refused = "Operation not permitted"
        said = dict(line.split(" ", 1) for line in (await sb.says("python3 /acts.py 127.1.0.4 127.1.0.2")).splitlines())
        assert said.pop("packet") in (refused, "Address family not supported by protocol")  # which not all kernels have
        assert said == dict.fromkeys(said, refused) and len(said) == 9
        said = dict(line.split(" ", 1) for line in (await sb.says("python3 /acts.py 127.1.0.3 127.1.0.2")).splitlines())
        assert {name for name, word in said.items() if word == refused} - {"packet"} == {"raw"}
        assert await sb.says(f'python3 -c "{spoof}"') == "127.1.0.2"  # who binds another's address gets its own
