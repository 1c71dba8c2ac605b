"""What containers are asked to be, and what they are as services; and how they are shown."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlencode

import msgspec
import pytest
from aiohttp.test_utils import make_mocked_request

from daemon.docker import bodies, build, options, refused, shown
from daemon.docker.engine import tagged
from daemon.docker.events import ContainerView, between, fits
from daemon.docker.follow import need_all
from daemon.docker.paths import ROUTES, Call
from daemon.docker.service import PORT
from daemon.network.addresses import kernel_entry, published_places
from daemon.turns.added import NONE, checked, with_name, with_ports, with_service, without_service
from sandbox.compose.connections import FIRST_FREE
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
        {"HostConfig": {"VolumesFrom": ["x"]}},
        {"HostConfig": {"Sysctls": {"net.core.somaxconn": "1"}}},
        {"HostConfig": {"Dns": ["1.1.1.1"]}},
        {"HostConfig": {"DeviceRequests": [{"Count": -1}]}},
        {"HostConfig": {"GroupAdd": ["7"]}},
        {"HostConfig": {"IpcMode": "host"}},
        {"HostConfig": {"PidMode": "host"}},
        {"HostConfig": {"UTSMode": "host"}},
        {"HostConfig": {"UsernsMode": "host"}},
        {"HostConfig": {"CgroupnsMode": "host"}},
        {"HostConfig": {"CgroupParent": "x"}},
        {"HostConfig": {"Runtime": "kata"}},
        {"HostConfig": {"Links": ["db:database"]}},
        {"NetworkingConfig": {"EndpointsConfig": {"n": {"IPAMConfig": {"IPv4Address": "10.0.0.7"}}}}},
        {"HostConfig": {"Mounts": [{"Type": "npipe", "Source": "/a", "Target": "/b"}]}},
    ],
)
def test_what_would_be_another_container_is_refused(said: dict[str, Any]) -> None:
    with pytest.raises(Unsupported):
        service(**said)


def test_what_does_something_else_is_said() -> None:
    said: dict[str, Any] = {
        "Hostname": "web", "Volumes": {"/data": {}},
        "HostConfig": {
            "ReadonlyRootfs": True, "CapDrop": ["ALL"], "ShmSize": 1 << 20, "Ulimits": [{"Name": "nofile"}],
            "SecurityOpt": ["seccomp=unconfined"], "PortBindings": {"53/udp": [{"HostPort": "53"}]}, "Links": ["db:db"],
        },
    }  # fmt: skip
    body = msgspec.convert({"Image": "debian", **said}, bodies.ContainerBody)
    assert body.host_config is not None and bodies.service(body, "web").ports == []
    warned = {line.partition(":")[0] for line in options.warnings(body, body.host_config)}
    assert warned == {
        "--cap-drop", "--hostname", "--publish", "--read-only", "--security-opt", "--shm-size", "--ulimit", "--volume"
    }  # fmt: skip
    body = msgspec.convert({"Image": "debian", "Hostname": "f" * 64}, bodies.ContainerBody)
    assert options.warnings(body, bodies.HostConfig()) == []


def test_ports_without_a_number_are_free_ones() -> None:
    said = {"ExposedPorts": {"80/tcp": {}, "81/tcp": {}}, "HostConfig": {"PublishAllPorts": True}}
    body = msgspec.convert({"Image": "debian", **said}, bodies.ContainerBody)
    taken = [FIRST_FREE]
    ports = bodies.service(body, "web", taken).ports
    assert [(one.target, one.published) for one in ports] == [(80, FIRST_FREE + 1), (81, FIRST_FREE + 2)]
    body.host_config = bodies.HostConfig(port_bindings={"80/tcp": [bodies.PortBinding(host_port="8000-8001")]})
    assert [one.published for one in bodies.service(body, "web", [8000]).ports] == [8001]
    with pytest.raises(Invalid, match="no port of 8000-8001 is free"):
        bodies.service(body, "web", [8000, 8001])


def test_a_container_that_is_to_have_no_network_is_alone() -> None:
    said = service(HostConfig={"NetworkMode": "none"})
    made = with_service(None, "web", msgspec.structs.replace(said, container="f" * 64))
    assert not services.goes_outside(made, "web") and services.reaches(made, "web") == ["web"]
    assert without_service(made, "web").networks.keys() == NONE.networks.keys()


def test_another_name_keeps_address_and_place() -> None:
    made = with_service(None, "a", Service(image="i", container="f" * 64))
    made = with_name(with_service(made, "b", Service(image="i", container="e" * 64)), "a", "c")
    assert [(name, services.address(made, name)) for name in made.services] == [("c", "127.1.0.2"), ("b", "127.1.0.3")]
    with pytest.raises(Conflict):
        with_name(made, "c", "b")
    with pytest.raises(Conflict, match="belongs to the composition"):
        with_name(Composition(services={"a": Service(image="i")}, main="a"), "a", "b")


def test_a_port_belongs_to_the_container_that_runs() -> None:
    said = Service(image="i", container="f" * 64, ports=[PublishedPort(target=80, published=8080)])
    made = with_service(with_service(None, "a", said), "b", said)
    assert made.services["a"].ports == said.ports and made.services["b"].claimed == said.ports
    with pytest.raises(Conflict, match="8080 is already allocated, to a"):
        with_ports(made, "b", {"a"})
    made = with_ports(made, "b", ())
    assert published_places(made)[8080][0] & 0xFF == 3
    assert (made.services["a"].ports, made.services["a"].claimed) == ([], said.ports)
    assert with_ports(made, "a", ()).services["a"].ports == said.ports


def test_logs_are_whole_or_refused() -> None:
    def request(**query: str) -> None:
        need_all(Call(make_mocked_request("GET", f"/?{urlencode(query)}"), "web"), 1000.0, 2000.0)

    for said in (
        {},
        {"since": "1000.5"},
        {"since": "1970-01-01T00:16:40.123456789Z"},
        {"until": "2000"},
        {"tail": "3"},
    ):
        request(**said)
    for said in ({"since": "1500"}, {"since": "1970-01-01T00:20:00Z"}, {"until": "1500"}, {"timestamps": "1"}):
        with pytest.raises(Unsupported):
            request(**said)
    with pytest.raises(Invalid):
        request(since="yesterday")


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
        ROUTES.find("POST", "/nosuch")
    for method, path, why, instead in refused.CALLS:
        assert why and instead and ROUTES.find(method, path.replace("{id}", "c").replace("{name}", "i"))


def test_names_are_as_docker_reads_them() -> None:
    assert tagged("app") == "app:latest" and tagged("UPPER") == "UPPER" and PORT == 2375


def test_a_build_without_a_reader_takes_bounded_memory() -> None:
    lines: asyncio.Queue[dict[str, object] | None] = asyncio.Queue()
    for _ in range(3 * build.MAX_LINES):
        build._say(lines, "x" * 10_000)
    assert lines.qsize() == build.MAX_LINES and len(str(lines.get_nowait())) < build.MAX_LINE + 30
