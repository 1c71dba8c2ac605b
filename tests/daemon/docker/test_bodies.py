"""What containers are asked to be, and what they are as services; and how they are shown."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from daemon.docker import bodies, build, shown
from daemon.docker.engine import tagged
from daemon.docker.events import ContainerView, between, fits
from daemon.docker.paths import ROUTES
from daemon.docker.service import PORT
from daemon.network.addresses import kernel_entry, published_places
from daemon.turns.added import checked, with_service, without_service
from sandbox.container import services
from sandbox.errors import Conflict, Invalid, NotFound, TooMany, Unsupported
from sandbox.messages import Composition, Service, ServiceInfo
from sandbox.messages.services import PublishedPort, Restart, ServiceHealth, ServiceState, TreeMount, Volume


def service(**said: Any) -> Service:
    return bodies.service(msgspec.convert({"Image": "debian", **said}, bodies.ContainerBody), "web")


def test_a_container_as_clients_ask_for_it() -> None:
    made = service(
        Cmd=["echo", "hi"],
        Entrypoint="sh",
        Env=["A=1=2", "B=", "C"],
        User="crab",
        WorkingDir="/srv",
        OpenStdin=True,
        Tty=True,
        StopSignal="SIGINT",
        StopTimeout=3,
        Labels={"a": "b"},
        Healthcheck={"Test": ["CMD-SHELL", "true"], "Interval": 2_000_000_000, "Retries": 5},
        HostConfig={
            "Binds": ["/data:/app:ro", "data:/var/lib/data"],
            "Mounts": [{"Type": "bind", "Source": "/c", "Target": "/d", "ReadOnly": True}],
            "PortBindings": {"80/tcp": [{"HostIp": "", "HostPort": "8080"}], "53/udp": [{"HostPort": "53"}], "9": None},
            "RestartPolicy": {"Name": "on-failure", "MaximumRetryCount": 2},
            "AutoRemove": True,
            "Memory": 1 << 20,
            "NanoCpus": 1_500_000_000,
            "PidsLimit": 7,
            "Tmpfs": {"/t": "size=1m"},
            "ExtraHosts": ["db:10.0.0.1", "host.docker.internal:host-gateway"],
            "NetworkMode": "net1",
        },
        NetworkingConfig={"EndpointsConfig": {"net1": {"Aliases": ["www"]}}},
    )
    assert made.entrypoint == ["sh"] and made.command == ["echo", "hi"] and made.env == {"A": "1=2", "B": ""}
    assert made.trees == [
        TreeMount(source="/data", target="/app", read_only=True),
        TreeMount(source="/c", target="/d", read_only=True),
    ]
    assert made.volumes == [Volume(name="data", target="/var/lib/data")]
    assert made.ports == [PublishedPort(target=80, published=8080)]
    assert made.restart is Restart.ON_FAILURE and made.restart_attempts == 2 and made.remove_at_end
    assert made.limits.cpus == 1.5 and made.limits.memory == 1 << 20 and made.limits.processes == 7
    assert made.healthcheck is not None and made.healthcheck.interval == 2 and made.healthcheck.retries == 5
    assert made.extra_hosts == {"db": "10.0.0.1", "host.docker.internal": "127.0.0.1"}
    assert made.networks == {"net1": ["www"]} and made.stop_signal == 2 and made.stop_grace_period == 3
    assert made.tmpfs == ["/t"] and made.stdin_open and made.tty and made.user == "crab" and made.workdir == "/srv"


def test_clients_send_null_for_what_they_do_not_say() -> None:
    made = service(Cmd=None, Entrypoint=[], Env=None, HostConfig={"Binds": None, "RestartPolicy": {"Name": ""}})
    assert made.command is None and made.entrypoint is None and made.networks == {bodies.BRIDGE: []}
    assert service(HostConfig={"NetworkMode": "none"}).networks == {bodies.none_of("web"): []}
    assert service(HostConfig=None).restart is Restart.NO


@pytest.mark.parametrize(
    "said",
    [
        {"HostConfig": {"Privileged": True}},
        {"HostConfig": {"CapAdd": ["SYS_ADMIN"]}},
        {"HostConfig": {"Devices": [{}]}},
        {"HostConfig": {"NetworkMode": "host"}},
        {"HostConfig": {"NetworkMode": "container:x"}},
        {"HostConfig": {"ReadonlyRootfs": True}},
        {"HostConfig": {"VolumesFrom": ["x"]}},
        {"HostConfig": {"Mounts": [{"Type": "npipe", "Source": "/a", "Target": "/b"}]}},
    ],
)
def test_what_would_be_another_container_is_refused(said: dict[str, Any]) -> None:
    with pytest.raises(Unsupported):
        service(**said)


@pytest.mark.parametrize(
    "said",
    [
        {"HostConfig": {"Binds": ["/a:b"]}},
        {"HostConfig": {"Binds": ["../a:/b"]}},
        {"HostConfig": {"PortBindings": {"70000/tcp": [{}]}}},
        {"HostConfig": {"PortBindings": {"http": [{}]}}},
        {"StopSignal": "SIGNOTHING"},
        {"HostConfig": {"RestartPolicy": {"Name": "sometimes"}}},
    ],
)
def test_nonsense_is_refused(said: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        service(**said)


def test_those_that_are_there_keep_their_addresses() -> None:
    composed = Composition(services={"a": Service(image="i"), "b": Service(image="i")}, main="a")
    made = with_service(composed, "c", Service(image="i", container="f" * 64))
    addresses = {name: services.address(made, name) for name in made.services}
    assert addresses == {"a": "127.1.0.2", "b": "127.1.0.3", "c": "127.1.0.4"}
    made = with_service(made, "d", Service(image="i", container="e" * 64))
    made = with_service(without_service(made, "c"), "e", Service(image="i", container="d" * 64))
    assert {name: services.address(made, name) for name in made.services} == {
        **{name: addresses[name] for name in "ab"},
        "d": "127.1.0.5",
        "e": "127.1.0.4",
    }
    assert kernel_entry(made, "d", 1, 0).reaches == 0b1111
    with pytest.raises(Conflict):
        without_service(made, "a")
    with pytest.raises(NotFound):
        without_service(made, "c")
    with pytest.raises(Conflict):
        with_service(made, "d", Service(image="i"))


def test_a_sandbox_has_so_many() -> None:
    made: Composition | None = None
    with pytest.raises(TooMany):
        for number in range(100):
            made = with_service(made, f"c{number}", Service(image="i"))
    assert made is not None and len(made.services) == 32 and made.main == ""


@pytest.mark.parametrize(
    "said",
    [
        {"name": "../web"},
        {"name": "web", "networks": {"a/b": []}},
        {"name": "web", "networks": {"a": ["x y"]}},
        {"name": "web", "trees": [TreeMount(source="/a\0", target="/b")]},
        {"name": "web", "ports": [PublishedPort(target=0, published=70_000)]},
        {"name": "web", "env": {"A": "x" * 300_000}},
    ],
)
def test_what_a_new_daemon_could_not_read_is_not_written(said: dict[str, Any]) -> None:
    name = said.pop("name")
    with pytest.raises(Invalid):
        checked(with_service(None, name, Service(image="i", **said)))


def test_a_port_is_published_once() -> None:
    web = Service(image="i", ports=[PublishedPort(target=80, published=8080)])
    with pytest.raises(Conflict, match="already allocated"):
        with_service(with_service(None, "a", web), "b", web)


def test_published_ports_lead_to_their_service() -> None:
    web = Service(image="i", ports=[PublishedPort(target=80, published=8080)])
    made = with_service(with_service(None, "a", Service(image="i")), "web", web)
    assert published_places(made) == {8080: (0x7F010003, 80)}


@pytest.mark.parametrize(
    ("state", "code", "health", "ago", "said"),
    [
        (ServiceState.CREATED, None, ServiceHealth.NONE, 5, "Created"),
        (ServiceState.RUNNING, None, ServiceHealth.NONE, 1, "Up 1 second"),
        (ServiceState.RUNNING, None, ServiceHealth.STARTING, 130, "Up 2 minutes (health: starting)"),
        (ServiceState.RUNNING, None, ServiceHealth.HEALTHY, 7300, "Up 2 hours (healthy)"),
        (ServiceState.EXITED, 3, ServiceHealth.NONE, 90_000, "Exited (3) 1 day ago"),
        (ServiceState.RESTARTING, 1, ServiceHealth.NONE, 4, "Restarting (1) 4 seconds ago"),
    ],
)
def test_states_as_docker_says_them(
    state: ServiceState, code: int | None, health: ServiceHealth, ago: float, said: str
) -> None:
    info = ServiceInfo(name="a", image="i", state=state, address="", health=health, exit_code=code, started_at=1000.0)
    assert shown.status(info, 1000.0 + ago) == said


def views(*said: tuple[str, str, int | None]) -> dict[str, ContainerView]:
    service = Service(image="i", container="f" * 64, labels={"a": "b"})
    return {name: ContainerView(name, service, program, code) for name, program, code in said}


@pytest.mark.parametrize(
    ("before", "after", "actions"),
    [
        ([], [("a", "", None)], ["create"]),
        ([], [("a", "p-1", 3)], ["create", "start", "die"]),
        ([("a", "", None)], [("a", "p-1", None)], ["start"]),
        ([("a", "p-1", None)], [("a", "p-1", 0)], ["die"]),
        ([("a", "p-1", None)], [("a", "p-2", None)], ["die", "start"]),
        ([("a", "p-1", 1)], [("a", "p-2", None)], ["start"]),
        ([("a", "p-1", None)], [], ["die", "destroy"]),
        ([("a", "p-1", 0)], [], ["destroy"]),
        ([("a", "p-1", 0)], [("a", "p-1", 0)], []),
    ],
)
def test_what_has_happened_between_two_views(before: list[Any], after: list[Any], actions: list[str]) -> None:
    events = between(views(*before), views(*after), 5.0)
    assert [event["Action"] for event in events] == actions
    for event in events:
        assert fits(event, {"type": ["container"], "label": ["a=b"], "container": ["a"]})
        assert not fits(event, {"label": ["a=c"]}) and not fits(event, {"type": ["network"]})


def test_calls_are_found_with_and_without_a_version() -> None:
    assert ROUTES.find("GET", "/v1.43/containers/web/json") == ROUTES.find("GET", "/containers/web/json")
    handler, named = ROUTES.find("GET", "/v1.24/images/team%2Fapp:1/json")
    assert named == "team/app:1" and handler.__name__ == "_image"
    assert ROUTES.find("GET", "/images/team/app:1/json")[1] == "team/app:1"
    with pytest.raises(NotFound):
        ROUTES.find("POST", "/swarm/init")


def test_names_are_as_docker_reads_them() -> None:
    assert tagged("app") == "app:latest" and tagged("UPPER") == "UPPER" and PORT == 2375


def test_a_build_without_a_reader_takes_bounded_memory() -> None:
    lines: asyncio.Queue[dict[str, object] | None] = asyncio.Queue()
    for _ in range(3 * build.MAX_LINES):
        build._say(lines, "x" * 10_000)
    assert lines.qsize() == build.MAX_LINES and len(str(lines.get_nowait())) < build.MAX_LINE + 30
