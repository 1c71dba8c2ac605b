"""What each key of a service becomes, and which are refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sandbox.compose import keys
from sandbox.compose.project import DirectoryCopy, FileCopy
from sandbox.messages import Service
from sandbox.messages.services import Dependency, HostMount, Probe, PublishedPort, ServiceLimits, Volume
from tests.support.compose_files import project, refusal, service

SHELL = ["/bin/sh", "-c"]
LIMITS = ServiceLimits(cpus=0.5, memory=1 << 30, processes=9)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("command: echo 'a b' $$X", {"command": ["echo", "a b", "$X"]}),
        ("command: [echo, 'a b', 1]", {"command": ["echo", "a b", "1"]}),
        ("command:", {"command": None}),
        ("command: []", {"command": []}),
        ("entrypoint: /run.sh -x", {"entrypoint": ["/run.sh", "-x"]}),
        ("entrypoint: ''", {"entrypoint": []}),
        ("environment: {A: 1, B: yes, C: , D: 1.50, E: ''}", {"env": {"A": "1", "B": "yes", "D": "1.50", "E": ""}}),
        ("environment: [A=1, B=x=y, C=, GIVEN, MISSING]", {"env": {"A": "1", "B": "x=y", "C": "", "GIVEN": "g"}}),
        ("user: 1000:1000", {"user": "1000:1000"}),
        ("user: 0", {"user": "0"}),
        ("working_dir: /app", {"workdir": "/app"}),
        ("hostname: web.local", {"hostname": "web.local"}),
        ("restart: no", {"restart": "no"}),
        ("restart: on-failure:3", {"restart": "on-failure", "restart_attempts": 3}),
        ("restart: unless-stopped", {"restart": "unless-stopped"}),
        ("deploy: {restart_policy: {condition: any}}", {"restart": "always"}),
        ("deploy: {restart_policy: {condition: on-failure}}", {"restart": "on-failure"}),
        ("stop_signal: SIGINT", {"stop_signal": 2}),
        ("stop_signal: '9'", {"stop_signal": 9}),
        ("stop_grace_period: 1m30s", {"stop_grace_period": 90.0}),
        ("labels: [a=1, b]", {"labels": {"a": "1", "b": ""}}),
        ("labels: {a: 1}", {"labels": {"a": "1"}}),
        ("tty: true", {"tty": True}),
        ("stdin_open: true", {"stdin_open": True}),
        ("tmpfs: /run", {"tmpfs": ["/run"]}),
        ("tmpfs: [/run, '/tmp:size=64m']", {"tmpfs": ["/run", "/tmp"]}),
        ("mem_limit: 1g\ncpus: 0.5\npids_limit: 9", {"limits": LIMITS}),
        ("deploy: {resources: {limits: {cpus: '0.5', memory: 1gb, pids: 9}}}", {"limits": LIMITS}),
        ("cpu_quota: 50000", {"limits": ServiceLimits(cpus=0.5)}),
        ("pids_limit: -1\nmem_limit: 0", {"limits": ServiceLimits()}),
        ("expose: ['80']\ninit: true\nlogging: {driver: json-file}\npull_policy: always\nplatform: linux/amd64", {}),
        ("cap_drop: [ALL]\nsecurity_opt: ['no-new-privileges:true']\nread_only: true\nprivileged: false", {}),
        ("extra_hosts: ['a:10.0.0.7', 'b=::1', 'c:[::2]']", {"extra_hosts": {"a": "10.0.0.7", "b": "::1", "c": "::2"}}),
        ("extra_hosts: {a: 10.0.0.7, h: host-gateway}", {"extra_hosts": {"a": "10.0.0.7"}}),
    ],
)  # fmt: skip
def test_a_key_becomes_a_field(tmp_path: Path, text: str, fields: dict[str, Any]) -> None:
    default = Service(image="debian", limits=ServiceLimits())
    assert service(tmp_path, text, env={"GIVEN": "g"}) == msgspec.structs.replace(default, **fields)


@pytest.mark.parametrize(
    ("text", "probe"),
    [
        ("{test: curl -f http://x}", Probe(test=[*SHELL, "curl -f http://x"])),
        ("{test: [CMD, a, b], interval: 10s, retries: 5}", Probe(test=["a", "b"], interval=10, retries=5)),
        ("{test: [CMD-SHELL, a], start_period: 500ms}", Probe(test=[*SHELL, "a"], start_period=0.5)),
        ("{test: [CMD, a], start_interval: 1s, timeout: 1m}", Probe(test=["a"], start_interval=1, timeout=60)),
        ("{test: 'false'}", Probe(test=[*SHELL, "false"])),
        ("{test: [NONE]}", Probe(test=[])),
        ("{disable: true}", Probe(test=[])),
    ],
)  # fmt: skip
def test_health_checks(tmp_path: Path, text: str, probe: Probe) -> None:
    assert service(tmp_path, f"healthcheck: {text}").healthcheck == probe


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("command: echo 'a", "services.web.command: \"echo 'a\" cannot be split into words"),
        ("working_dir: app", "services.web.working_dir: app is no absolute path"),
        ("restart: sometimes", "services.web.restart: there is no policy sometimes"),
        ("stop_signal: SIGWHAT", "services.web.stop_signal: SIGWHAT is no signal"),
        ("stop_grace_period: 10", "services.web.stop_grace_period: '10' is no duration"),
        ("mem_limit: lots", "services.web.mem_limit: 'lots' is no size"),
        ("cpus: some", "services.web.cpus: 'some' is no number"),
        ("healthcheck: {interval: 3s}", "services.web.healthcheck: it has no test"),
        ("healthcheck: {test: [a, b]}", "services.web.healthcheck.test: a test begins with CMD"),
        ("healthcheck: {test: a, often: 1}", "services.web.healthcheck.often: this key is not supported"),
        ("environment: 5", "services.web.environment: a number stands where a mapping belongs"),
        ("depends_on: {db: {condition: service_ready}}", "there is no condition service_ready"),
        ("platform: linux/arm64", "services.web.platform: sandboxes here are of"),
        ("pull_policy: perhaps", "there is no policy perhaps"),
        ("ports: [x]", "services.web.ports[0]: 'x' is no port"),
        ("ports: ['70000']", "is no port or range"),
        ("ports: ['1-3:1-2']", "have different lengths"),
        ("network_mode: host", "services.web.network_mode: services share one network"),
        ("network_mode: service:db", "services.web.network_mode: services share one network"),
        ("networks: [no]", "services.web.networks[0]: there is no no below networks"),
        ("networks: {default: {ipv4_address: 10.0.0.2}}", "services.web.networks.default.ipv4_address: addresses are"),
        ("links: [no]", "services.web.links[0]: there is no service no"),
        ("extra_hosts: ['a:b']", "'b' is no address"),
        ("volumes: ['no:/x']", "services.web.volumes[0]: there is no no below volumes"),
        ("volumes: ['x:y:z:w']", "is no volume"),
        ("volumes: ['./x:y']", "'y' is no absolute path"),
        ("volumes: [{type: npipe, target: /x}]", "volumes of the type npipe are not supported"),
        ("volumes: [{type: volume}]", "it has no target"),
        ("volumes: ['/:/:ro']", "nothing can be mounted at /"),
        ("configs: [no]", "services.web.configs[0]: there is no no below configs"),
        ("env_file: no.env", "services.web.env_file: there is no file of variables"),
        ("deploy: {resources: {reservations: {devices: [{capabilities: [gpu]}]}}}", "services have no devices and"),
        ("security_opt: ['systempaths=unconfined']", "services.web.security_opt[0]: systempaths:unconfined is"),
        ("scale: 2\ncontainer_name: x", "services.web.container_name: 2 replicas cannot have one name"),
        ("scale: 2\nports: ['80:80']", "web-1 publishes the port 80 as well"),
        ("build: {context: no}", "no is no directory"),
        ("build: {context: ., platform: x}", "services.web.build.platform: this key is not supported"),
        ("colour: red", "services.web.colour: this key is not supported"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_its_key_and_line(tmp_path: Path, text: str, said: str) -> None:
    body = "\n".join(f"    {line}" for line in text.splitlines())
    refused = refusal(tmp_path, f"services:\n  web:\n    image: debian\n{body}\n")
    assert refused.startswith("compose.yaml:") and said in refused.replace(f"{tmp_path}/", "")


VALUES = {"pid": "host", "ipc": "host", "uts": "host", "userns_mode": "host", "cgroup": "host", "runtime": "nvidia"}


@pytest.mark.parametrize("key", sorted(keys.REFUSED))
def test_every_refused_key_is_refused_with_a_hint(tmp_path: Path, key: str) -> None:
    value = VALUES.get(key, "true" if key in ("privileged", "use_api_socket") else "[x]")
    refused = refusal(tmp_path, f"services:\n  web:\n    image: debian\n    {key}: {value}\n")
    assert refused.startswith(f"compose.yaml:4: services.web.{key}: {keys.REFUSED[key][0]} (")
    assert service(tmp_path, f"{key}: []").image == "debian"  # it asks for nothing


@pytest.mark.parametrize("key", sorted(keys.NOTED))
def test_what_does_something_else_is_noted(tmp_path: Path, key: str) -> None:
    made = project(tmp_path, f"services:\n  web:\n    image: debian\n    {key}: x\n")
    assert made.notes == [f"{tmp_path}/compose.yaml:4: services.web.{key}: {keys.NOTED[key]}"]


def test_the_documentation_names_every_key() -> None:
    text = (Path(__file__).parents[3] / "docs/compose.md").read_text()
    assert [
        key for key in {*keys.READ, *keys.NOTED, *keys.REFUSED, *keys.WITHOUT_EFFECT} if f"`{key}`" not in text
    ] == []


# --------------------------------------------------------------------------- ports, networks


@pytest.mark.parametrize(
    ("text", "ports"),
    [
        ("['8080:80']", [(80, 8080)]),
        ("[8080:80, 22:22]", [(80, 8080), (22, 22)]),
        ("['127.0.0.1:8080:80', '[::1]:81:81']", [(80, 8080), (81, 81)]),
        ("['80', 81, '127.0.0.1::82']", [(80, 80), (81, 81), (82, 82)]),
        ("['3000-3002:4000-4002/tcp']", [(4000, 3000), (4001, 3001), (4002, 3002)]),
        ("['8000-8010:80', '8000:81']", [(81, 8000), (80, 8001)]),
        ("['53:53/udp', '53:53/tcp']", [(53, 53)]),
        ("[{target: 80, published: '8080', host_ip: 127.0.0.1, mode: host}]", [(80, 8080)]),
        ("[{target: 80}]", [(80, 80)]),
        ("['80:80', '80']", [(80, 80), (80, 32768)]),
    ],
)  # fmt: skip
def test_ports_are_published(tmp_path: Path, text: str, ports: list[tuple[int, int]]) -> None:
    made = service(tmp_path, f"ports: {text}").ports
    assert made == [PublishedPort(target=target, published=published) for target, published in ports]


def test_networks_names_and_links(tmp_path: Path) -> None:
    made = project(
        tmp_path,
        """
        services:
          web:
            image: debian
            networks: {front: , back: {aliases: [www]}}
            links: [db:database]
            container_name: the-web
          db: {image: debian, networks: [back]}
          alone: {image: debian, network_mode: none}
          bridge: {image: debian, network_mode: bridge}
          workers: {image: debian, deploy: {replicas: 2}, depends_on: [db]}
        networks:
          front: {driver: bridge}
          back: {internal: true}
        """,
    ).composition
    assert made.services["web"].networks == {"front": ["the-web"], "back": ["www", "the-web"]}
    assert made.services["web"].depends_on == {"db": Dependency()}
    assert made.services["db"].networks == {"back": ["database"]}
    assert made.services["alone"].networks == {"none-alone": []} and made.networks["none-alone"].internal
    assert made.services["bridge"].networks == {"default": []}
    assert made.networks["back"].internal and not made.networks["front"].internal
    assert [name for name in made.services if name.startswith("workers")] == ["workers-1", "workers-2"]
    assert made.services["workers-2"].networks == {"default": ["workers"]}


def test_a_dependency_on_replicas_is_one_on_each(tmp_path: Path) -> None:
    made = project(tmp_path, "services: {a: {image: x, depends_on: [b]}, b: {image: x, scale: 2}}").composition
    assert [*made.services["a"].depends_on] == ["b-1", "b-2"]


@pytest.mark.parametrize("section", ["networks", "volumes", "configs", "secrets"])
def test_what_lies_outside_is_refused(tmp_path: Path, section: str) -> None:
    use = {"networks": "[x]", "volumes": "['x:/x']"}.get(section, "[x]")
    text = f"services:\n  web:\n    image: debian\n    {section}: {use}\n{section}:\n  x: {{external: true}}\n"
    assert f"compose.yaml:6: {section}.x.external: it is outside of the sandbox" in refusal(tmp_path, text)


# --------------------------------------------------------------------------- storage


def test_volumes(tmp_path: Path) -> None:
    text = """
        services:
          web:
            image: debian
            volumes:
              - data:/var/lib/data
              - data:/again:ro,z
              - /anonymous/
              - {type: volume, source: data, target: /long, read_only: true}
              - {type: tmpfs, target: /scratch}
              - ./site:/site:ro
              - {type: bind, source: ./site, target: /long-site, read_only: true}
        volumes: {data: {driver: local, labels: [x]}}
        """
    (tmp_path / "site").mkdir()
    made = project(tmp_path, text)
    web = made.composition.services["web"]
    anonymous = web.volumes[2]
    assert web.volumes == [
        Volume(name="data", target="/var/lib/data"),
        Volume(name="data", target="/again", read_only=True),
        Volume(name=anonymous.name, target="/anonymous"),
        Volume(name="data", target="/long", read_only=True),
    ]
    assert anonymous.name.startswith("anonymous-") and web.tmpfs == ["/scratch"]
    site = str(tmp_path / "site")
    assert web.mounts == [HostMount(source=site, target="/site"), HostMount(source=site, target="/long-site")]
    assert project(tmp_path, text) == made  # the same names again
    copied = project(tmp_path, text, copy_binds=True)
    assert copied.composition.services["web"].mounts == []
    assert copied.directories == [DirectoryCopy("web", site, "/site"), DirectoryCopy("web", site, "/long-site")]


def test_a_host_directory_is_read_only_or_copied(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    text = "services:\n  web:\n    image: debian\n    volumes: ['./site:/site']\n"
    refused = refusal(tmp_path, text)
    assert "compose.yaml:4: services.web.volumes[0]: the host directory site would be written to" in refused
    assert ":ro" in refused and "--copy-binds" in refused
    assert project(tmp_path, text, copy_binds=True).directories[0].target == "/site"
    assert "does not exist" in refusal(tmp_path, text.replace("./site:/site", "./no:/no:ro"))


def test_a_file_is_copied(tmp_path: Path) -> None:
    (tmp_path / "nginx.conf").write_text("x")
    text = "services:\n  web:\n    image: debian\n    volumes: ['./nginx.conf:/etc/nginx.conf%s']\n"
    made = project(tmp_path, text % ":ro")
    assert made.files == [FileCopy("web", "/etc/nginx.conf", source=str(tmp_path / "nginx.conf"))] and not made.notes
    assert "is copied: what the service writes there stays" in project(tmp_path, text % "").notes[0]
    os.mkfifo(tmp_path / "socket")
    assert "neither a file nor a directory" in refusal(tmp_path, text.replace("nginx.conf:", "socket:") % ":ro")


def test_configs_and_secrets(tmp_path: Path) -> None:
    (tmp_path / "key.txt").write_text("k")
    made = project(
        tmp_path,
        """
        services:
          web:
            image: debian
            configs: [inline, {source: inline, target: /etc/app.conf, mode: 0440}]
            secrets: [key, {source: password, target: pw}, {source: password, target: /abs}]
        configs: {inline: {content: "port ${PORT:-80}"}}
        secrets: {key: {file: ./key.txt}, password: {environment: PASSWORD}}
        """,
        env={"PASSWORD": "s3cret"},
    )
    assert made.files == [
        FileCopy("web", "/inline", content=b"port 80", mode=0o444),
        FileCopy("web", "/etc/app.conf", content=b"port 80", mode=0o440),
        FileCopy("web", "/run/secrets/key", source=str(tmp_path / "key.txt"), mode=0o444),
        FileCopy("web", "/run/secrets/pw", content=b"s3cret", mode=0o444),
        FileCopy("web", "/abs", content=b"s3cret", mode=0o444),
    ]


# --------------------------------------------------------------------------- builds


def test_builds(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    made = project(
        tmp_path,
        """
        name: Shop
        services:
          short: {build: app}
          long:
            image: named:1
            build:
              context: ./app
              dockerfile: other.Dockerfile
              args: [A=1, FROM_ENV, MISSING]
              target: prod
              no_cache: true
              network: none
              secrets: [key]
              additional_contexts: {base: "docker-image://debian", near: ./app}
          inline: {build: {dockerfile_inline: "FROM debian\\nRUN true\\n"}}
          git: {build: "https://example.org/x.git#main"}
        secrets: {key: {environment: KEY}}
        """,
        env={"FROM_ENV": "e", "KEY": "k"},
    )
    app = str(tmp_path / "app")
    short, long = made.builds["short"], made.builds["long"]
    assert (short.context, short.dockerfile) == (app, None) and short.image.startswith("compose-shop-short-")
    assert made.composition.services["short"].image == short.image
    assert (long.image, long.dockerfile, long.target) == ("named:1", f"{app}/other.Dockerfile", "prod")
    assert (long.arguments, long.cache, long.network) == ({"A": "1", "FROM_ENV": "e"}, False, False)
    assert (long.secrets, long.contexts) == ({"key": b"k"}, {"base": "docker-image://debian", "near": app})
    assert made.builds["inline"].inline == "FROM debian\nRUN true\n"
    assert made.builds["git"].context == "https://example.org/x.git#main"


def test_limits_and_rights_of_all(tmp_path: Path) -> None:
    text = "services: {a: {image: x, ulimits: {nofile: {soft: 1, hard: 65536}, memlock: -1}, security_opt: [%s]}}"
    made = project(tmp_path, text % '"no-new-privileges:true"')
    assert made.open_files == 65536 and made.no_new_privs
    assert not project(tmp_path, text % "").no_new_privs
