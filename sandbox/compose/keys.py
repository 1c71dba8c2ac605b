"""Which keys of a service do something here, which change nothing, and which are refused. Pure.

The tables are those of docs/compose.md.
"""

from __future__ import annotations

from sandbox.compose.values import Value

READ = frozenset(
    (
        *("image", "build", "platform", "pull_policy", "command", "entrypoint", "environment", "env_file", "user"),
        *("working_dir", "hostname", "container_name", "depends_on", "healthcheck", "restart", "volumes", "tmpfs"),
        *("configs", "secrets", "ports", "expose", "networks", "network_mode", "links", "extra_hosts", "deploy"),
        *("scale", "mem_limit", "cpus", "cpu_quota", "cpu_period", "pids_limit", "stop_signal", "stop_grace_period"),
        *("labels", "profiles", "stdin_open", "tty", "ulimits", "security_opt", "extends"),
    )
)
WITHOUT_EFFECT = frozenset(  # nothing of what a service can observe depends on them
    (
        *("annotations", "attach", "blkio_config", "cpu_count", "cpu_percent", "cpu_rt_period", "cpu_rt_runtime"),
        *("cpu_shares", "cpuset", "develop", "init", "label_file", "logging", "mem_reservation", "mem_swappiness"),
        *("memswap_limit", "oom_kill_disable", "oom_score_adj", "storage_opt"),
    )
)
NOTED = {  # accepted, with a note
    "cap_drop": "services have the capabilities that sandboxes have",
    "dns_opt": "names are resolved by the sandbox's resolver",
    "dns_search": "names are resolved by the sandbox's resolver",
    "domainname": "a service has its host name only",
    "mac_address": "services share one network interface",
    "read_only": "its root can be written to",
    "shm_size": "/dev/shm has the size that sandboxes have",
}
REFUSED = {
    "cap_add": ("no service gets more capabilities", "remove it, or run what needs it on a machine of its own"),
    "cgroup": ("cgroups of the host are not shared", "remove it"),
    "cgroup_parent": ("cgroups of the host are not shared", "remove it"),
    "credential_spec": ("it is of Windows", "remove it"),
    "device_cgroup_rules": ("services have no devices", "remove it"),
    "devices": ("services have no devices", "remove it"),
    "dns": ("names are resolved by the sandbox's resolver", "remove it, or use extra_hosts"),
    "external_links": ("containers outside are not reached", "add that service to this file"),
    "gpus": ("services have no GPU", "remove it"),
    "group_add": ("further groups are not supported", "give them to the user in the image"),
    "ipc": ("the IPC namespace of the host is not shared", "remove it: services share one"),
    "isolation": ("it is of Windows", "remove it"),
    "models": ("models are not supported", "give the service the address of one, as a variable"),
    "pid": ("the processes of the host are not shared", "remove it: services share one PID namespace"),
    "post_start": ("hooks are not supported", "put it into the command"),
    "pre_stop": ("hooks are not supported", "let the service handle its stop signal"),
    "privileged": ("no service is privileged", "remove it, or run what needs it on a machine of its own"),
    "provider": ("providers are not supported", "use a service with an image"),
    "runtime": ("there is one runtime", "remove it"),
    "sysctls": ("services do not change the kernel's settings", "remove it"),
    "use_api_socket": ("the host's Docker Engine is not shared", "remove it: --docker gives the main service its own"),
    "userns_mode": ("user namespaces of the host are not shared", "remove it"),
    "uts": ("the UTS namespace of the host is not shared", "remove it"),
    "volumes_from": ("volumes are named", "name the volumes of that service"),
}
_HARMLESS = {"ipc": ("private", "shareable"), "cgroup": ("private",), "runtime": ("runc",), "isolation": ("default",)}


def check(service: Value, notes: list[str]) -> None:
    """Refuse what is not supported, by its key and line; note what is accepted and does something else."""
    for name, value in service.map().items():
        if name in READ or name in WITHOUT_EFFECT or name.startswith("x-") or value.is_empty:
            continue
        if name in NOTED:
            notes.append(f"{value.place}: {value.key}: {NOTED[name]}")
        elif name not in REFUSED:
            raise value.refuse("this key is not supported", "see docs/compose.md")
        elif not isinstance(value.data, str) or value.data not in _HARMLESS.get(name, ()):
            raise value.refuse(*REFUSED[name])
