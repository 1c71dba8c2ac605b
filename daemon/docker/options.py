"""What `docker run` may ask for and a container of a sandbox does not have: refused, or accepted with a warning. Pure.

Guarantee: an option that changes what a container is does not vanish. Where compose files have a key for it, it is
refused or noted in the same words (:mod:`sandbox.compose.keys`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from sandbox.compose import keys
from sandbox.errors import Unsupported

if TYPE_CHECKING:
    from daemon.docker.bodies import ContainerBody, HostConfig

_HINT = "leave it out"
_OPEN_FILES = "the limits of the sandbox hold for its containers"
_SHARED = "containers of a sandbox share network, IPC, UTS and PID namespace"


def _shares(mode: str) -> bool:
    """Whether a namespace of the host is meant: that of a container is shared anyway."""
    return mode == "host"


def need_possible(body: ContainerBody, host: HostConfig) -> None:
    """Raises Unsupported for a container that would not be what the client requests."""
    by_key = {
        "--privileged": ("privileged", host.privileged),
        "--cap-add": ("cap_add", host.cap_add),
        "--device": ("devices", host.devices),
        "--gpus": ("gpus", host.device_requests),
        "--device-cgroup-rule": ("device_cgroup_rules", host.device_cgroup_rules),
        "--volumes-from": ("volumes_from", host.volumes_from),
        "--sysctl": ("sysctls", host.sysctls),
        "--dns": ("dns", host.dns),
        "--group-add": ("group_add", host.group_add),
        "--cgroup-parent": ("cgroup_parent", host.cgroup_parent),
        "--cgroupns host": ("cgroup", _shares(host.cgroupns_mode)),
        "--ipc host": ("ipc", _shares(host.ipc_mode)),
        "--pid host": ("pid", _shares(host.pid_mode)),
        "--uts host": ("uts", _shares(host.uts_mode)),
        "--userns host": ("userns_mode", _shares(host.userns_mode)),
        "--runtime": ("runtime", host.runtime not in ("", "runc")),
    }
    for option, (key, said) in by_key.items():
        if said:
            why, hint = keys.REFUSED[key]
            raise Unsupported(f"{option}: {why}", hint=hint)
    if host.network_mode == "host" or host.network_mode.startswith("container:"):
        raise Unsupported(
            f"--network {host.network_mode.partition(':')[0]}: each container has an address of its own",
            hint="name a network, and reach the others by their names",
        )
    for link in host.links or []:
        target, _, alias = link.partition(":")
        if alias not in ("", target.removeprefix("/")):
            raise Unsupported(
                f"--link {link[:80]}: a link gives no other name",
                hint=f"use the name itself, or `docker run --network-alias {alias[:60]}` for {target[:60]}",
            )


def warnings(body: ContainerBody, host: HostConfig) -> list[str]:
    """What is accepted and does something else than in Docker, a line each."""
    limits: Collection[object] = host.ulimits or ()
    udp = [port for port, places in (host.port_bindings or {}).items() if places and not port.endswith("/tcp")]
    noted = {
        "--cap-drop": (keys.NOTED["cap_drop"], host.cap_drop),
        "--dns-search": (keys.NOTED["dns_search"], host.dns_search),
        "--dns-option": (keys.NOTED["dns_opt"], host.dns_options),
        "--domainname": (keys.NOTED["domainname"], body.domainname),
        "--hostname": (f"{_SHARED}: programs see the sandbox's host name", body.hostname and _chosen(body)),
        "--read-only": (keys.NOTED["read_only"], host.readonly_rootfs),
        "--security-opt": ("containers have the rights that sandboxes have", host.security_opt),
        "--shm-size": (keys.NOTED["shm_size"], host.shm_size),
        "--ulimit": (_OPEN_FILES, limits),
        "--volume": (f"{', '.join(body.volumes or {})}: is part of the container and is removed with it", body.volumes),
        "--publish": (f"{', '.join(udp)[:80]}: is reached by other containers only", udp),
    }
    return [f"{option}: {text}" for option, (text, said) in noted.items() if said]


def _chosen(body: ContainerBody) -> bool:
    """Whether the client names one: else it sends the id of the container, or nothing."""
    return len(body.hostname) < 64


def refuse_address(network: str, address: str) -> Unsupported:
    return Unsupported(
        f"--ip {address[:45]} in {network[:63]}: addresses are given by the sandbox", hint="use the container's name"
    )
