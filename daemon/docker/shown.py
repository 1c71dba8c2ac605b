"""What clients of Docker's Engine API are shown of a sandbox's services.

Pure. Times are seconds since the epoch.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any

from blake3 import blake3

from sandbox.container import services
from sandbox.container.cgroup import parse_bytes
from sandbox.messages import Composition, ImageInfo, Service, ServiceInfo
from sandbox.messages.services import PublishedPort, Restart, ServiceHealth, ServiceState

ZERO = "0001-01-01T00:00:00Z"


def identity(name: str, service: Service) -> str:
    """The id of a container: 64 hexadecimal digits."""
    return service.container or blake3(name.encode(), derive_key_context="pagurus 2026 container").hexdigest()


def network_id(name: str) -> str:
    return blake3(name.encode(), derive_key_context="pagurus 2026 network").hexdigest()


def timestamp(when: float) -> str:
    if not when:
        return ZERO
    return datetime.datetime.fromtimestamp(when, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def state(info: ServiceInfo) -> dict[str, Any]:
    running = info.state is ServiceState.RUNNING
    result: dict[str, Any] = {
        "Status": info.state.value,
        "Running": running,
        "Paused": False,
        "Restarting": info.state is ServiceState.RESTARTING,
        "OOMKilled": info.oom_killed,
        "Dead": False,
        "Pid": info.pid if running else 0,
        "ExitCode": info.exit_code or 0,
        "Error": "",
        "StartedAt": timestamp(info.started_at),
        "FinishedAt": ZERO if running else timestamp(info.ended_at),
    }
    if info.health is not ServiceHealth.NONE:
        result["Health"] = {"Status": info.health.value, "FailingStreak": 0, "Log": []}
    return result


def status(info: ServiceInfo, now: float) -> str:
    """As `docker ps` says it."""
    if info.state is ServiceState.CREATED:
        return "Created"
    since = _ago(now - (info.ended_at or info.started_at))
    if info.state is ServiceState.RUNNING:
        since = _ago(now - info.started_at)
        health = "" if info.health is ServiceHealth.NONE else f" ({_HEALTH.get(info.health, info.health.value)})"
        return f"Up {since}{health}"
    said = f"({info.exit_code or 0}) {since} ago"
    return f"Restarting {said}" if info.state is ServiceState.RESTARTING else f"Exited {said}"


_HEALTH = {ServiceHealth.STARTING: "health: starting"}


def _ago(seconds: float) -> str:
    for size, name in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {name}{'s' * (count != 1)}"
    count = max(1, int(seconds))
    return f"{count} second{'s' * (count != 1)}"


def listed(composition: Composition, info: ServiceInfo, now: float, born: float) -> dict[str, Any]:
    """One of GET /containers/json. `born`: when the services of the sandbox's composition were made."""
    service = composition.services[info.name]
    return {
        "Id": identity(info.name, service),
        "Names": [f"/{info.name}"],
        "Image": service.image,
        "ImageID": f"sha256:{service.image_digest}",
        "Command": " ".join([*(service.entrypoint or []), *(service.command or [])])[:200],
        "Created": int(service.created_at or born),
        "Ports": [
            {"IP": "0.0.0.0", "PrivatePort": one.target, "PublicPort": one.published, "Type": one.protocol}
            for one in service.ports
        ],
        "Labels": service.labels,
        "State": info.state.value,
        "Status": status(info, now),
        "HostConfig": {"NetworkMode": next(iter(service.networks), "none")},
        "NetworkSettings": {"Networks": networks(composition, info.name)},
        "Mounts": mounts(service),
    }


def mounts(service: Service) -> list[dict[str, Any]]:
    trees = [
        {"Type": "bind", "Source": one.source, "Destination": one.target, "Mode": "", "RW": not one.read_only}
        for one in service.trees
    ]
    volumes = [
        {
            "Type": "volume",
            "Name": one.name,
            "Source": f"{services.VOLUMES}/{one.name}",
            "Destination": one.target,
            "Driver": "local",
            "Mode": "",
            "RW": not one.read_only,
        }
        for one in service.volumes
    ]
    return trees + volumes


def networks(composition: Composition, name: str) -> dict[str, Any]:
    service = composition.services[name]
    return {
        network: {
            "NetworkID": network_id(network),
            "EndpointID": network_id(f"{network} {name}"),
            "IPAddress": services.address(composition, name),
            "IPPrefixLen": 16,
            "Gateway": "127.0.0.1",
            "MacAddress": "",
            "Aliases": aliases or None,
            "DNSNames": [name, *aliases],
        }
        for network, aliases in service.networks.items()
    }


def _bindings(ports: Iterable[PublishedPort]) -> dict[str, list[dict[str, str]]]:
    result: dict[str, list[dict[str, str]]] = {}
    for one in ports:
        result.setdefault(f"{one.target}/tcp", []).append({"HostIp": "0.0.0.0", "HostPort": str(one.published)})
    return result


def inspected(composition: Composition, info: ServiceInfo, born: float) -> dict[str, Any]:
    """GET /containers/{id}/json; `born` as in :func:`listed`."""
    name, service = info.name, composition.services[info.name]
    argv = [*(service.entrypoint or []), *(service.command or [])]
    published, named = (_bindings(ports) for ports in (service.ports, [*service.ports, *service.claimed]))
    return {
        "Id": identity(name, service),
        "Created": timestamp(service.created_at or born),
        "Path": argv[0] if argv else "",
        "Args": argv[1:],
        "State": state(info),
        "Image": f"sha256:{service.image_digest}",
        "Name": f"/{name}",
        "RestartCount": info.restarts,
        "Driver": "overlay2",
        "Platform": "linux",
        "MountLabel": "",
        "ProcessLabel": "",
        "AppArmorProfile": "",
        "ExecIDs": None,
        "HostConfig": {
            "NetworkMode": next(iter(service.networks), "none"),
            "RestartPolicy": {
                "Name": service.restart.value,
                "MaximumRetryCount": service.restart_attempts if service.restart is Restart.ON_FAILURE else 0,
            },
            "AutoRemove": service.remove_at_end,
            "Memory": 0 if service.limits.memory is None else parse_bytes(service.limits.memory),
            "NanoCpus": round((service.limits.cpus or 0) * 1e9),
            "PidsLimit": service.limits.processes,
            "PortBindings": named,
            "Binds": [f"{one.source}:{one.target}{':ro' * one.read_only}" for one in service.trees],
            "LogConfig": {"Type": "json-file", "Config": {}},
        },
        "Mounts": mounts(service),
        "Config": {
            "Hostname": service.hostname or name,
            "User": str(service.user or ""),
            "Tty": service.tty,
            "OpenStdin": service.stdin_open,
            "AttachStdout": True,
            "AttachStderr": True,
            "Env": [f"{key}={value}" for key, value in service.env.items()],
            "Cmd": service.command,
            "Entrypoint": service.entrypoint,
            "Image": service.image,
            "WorkingDir": service.workdir or "",
            "Labels": service.labels,
        },
        "NetworkSettings": {
            "Ports": published,
            "IPAddress": services.address(composition, name),
            "Networks": networks(composition, name),
        },
    }


def network(composition: Composition | None, name: str) -> dict[str, Any]:
    """GET /networks/{id}"""
    members = {} if composition is None else composition.services
    said = None if composition is None else composition.networks.get(name)
    return {
        "Id": network_id(name),
        "Name": name,
        "Driver": "bridge",
        "Scope": "local",
        "Created": ZERO,
        "EnableIPv6": False,
        "Internal": said is not None and said.internal,
        "Attachable": False,
        "Ingress": False,
        "IPAM": {"Driver": "default", "Config": [{"Subnet": "127.1.0.0/16"}]},
        "Containers": {
            identity(other, service): {
                "Name": other,
                "IPv4Address": f"{services.address(composition, other)}/16" if composition is not None else "",
            }
            for other, service in members.items()
            if name in service.networks
        },
        "Options": {},
        "Labels": {} if said is None else said.labels,
    }


def volume(composition: Composition, name: str) -> dict[str, Any]:
    place = f"{services.VOLUMES}/{name}"
    return {
        "Name": name, "Driver": "local", "Mountpoint": place, "Scope": "local",
        "Labels": composition.volume_labels.get(name, {}), "Options": None,
        "CreatedAt": ZERO,
    }  # fmt: skip


def image(info: ImageInfo) -> dict[str, Any]:
    """One of GET /images/json."""
    return {
        "Id": f"sha256:{info.digest}",
        "ParentId": "",
        "RepoTags": [info.name if ":" in info.name.rsplit("/", 1)[-1] else f"{info.name}:latest"],
        "RepoDigests": [],
        "Created": int(info.created_at),
        "Size": info.size,
        "SharedSize": -1,
        "VirtualSize": info.size,
        "Labels": info.config.labels,
        "Containers": -1,
    }


def history(info: ImageInfo) -> list[dict[str, Any]]:
    """GET /images/{name}/history: of an image its tree is known, not the steps to it."""
    shown = image(info)
    fields = {"Id": shown["Id"], "Created": shown["Created"], "Size": info.size, "Tags": shown["RepoTags"]}
    return [{**fields, "CreatedBy": "", "Comment": "one tree"}]


def image_inspected(info: ImageInfo) -> dict[str, Any]:
    """GET /images/{name}/json"""
    config = info.config
    return {
        "Id": f"sha256:{info.digest}",
        "RepoTags": image(info)["RepoTags"],
        "RepoDigests": [],
        "Parent": "",
        "Created": timestamp(info.created_at),
        "Size": info.size,
        "VirtualSize": info.size,
        "Os": "linux",
        "Architecture": "amd64",
        "Author": config.author,
        "Config": {
            "Env": [f"{key}={value}" for key, value in config.env.items()],
            "Cmd": config.cmd or None,
            "Entrypoint": config.entrypoint or None,
            "WorkingDir": config.workdir,
            "User": config.user,
            "Labels": config.labels,
            "ExposedPorts": {port: {} for port in config.exposed_ports} or None,
            "Volumes": {place: {} for place in config.volumes} or None,
            "StopSignal": config.stop_signal,
        },
        "RootFS": {"Type": "layers", "Layers": [f"sha256:{info.digest}"]},
    }
