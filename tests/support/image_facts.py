"""What is compared of two images: the names of a tree with all that they are, and the configuration. Not a test module.

A fact is a text, so that a difference reads by itself. Times are compared where a builder sets them: those of the
context are long ago, all others are "now".
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import Any

from sandbox.messages import ImageConfig

LONG_AGO = 1_500_000_000  # what is older was set
#: What every image of ours has, whatever it was made of; compared where the reference has it too.
ALWAYS = ("/dev", "/proc", "/sys", "/run", "/tmp", "/root", "/etc", "/etc/hosts")
MOUNTED = ("/dev", "/proc", "/sys")  # whose times no copy sets: they are mounted, or made anew
_PRIVATE = ("trusted.", "security.selinux")
_SHOWN = 24  # bytes of a content that is shown as it is


def tree_facts(root: Path) -> dict[str, str]:
    """By path, of all that is below a directory."""
    result: dict[str, str] = {}
    links: dict[tuple[int, int], list[str]] = {}
    pending = [root]
    while pending:
        with os.scandir(pending.pop()) as entries:
            names = list(entries)
        for entry in names:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # a whiteout of an overlay, in a directory that no lower layer has
                continue
            path = "/" + os.path.relpath(entry.path, root)
            result[os.fsencode(path).decode("utf-8", "backslashreplace")] = _fact(
                entry.path, status, timed=path not in MOUNTED
            )
            if stat.S_ISDIR(status.st_mode):
                pending.append(Path(entry.path))
            elif status.st_nlink > 1:
                links.setdefault((status.st_dev, status.st_ino), []).append(path)
    for group in links.values():
        for path in sorted(group)[1:]:
            result[path] += f" linked {min(group)}"
    return result


def _fact(path: str, status: os.stat_result, *, timed: bool) -> str:
    kind = stat.S_IFMT(status.st_mode)
    words = [f"{status.st_mode:o}", f"{status.st_uid}:{status.st_gid}"]
    if kind == stat.S_IFREG:
        words += [str(status.st_size), _content(path, status.st_size)]
    elif kind == stat.S_IFLNK:
        words.append(f"-> {os.readlink(path)}")
    elif kind in (stat.S_IFCHR, stat.S_IFBLK):
        words.append(f"device {os.major(status.st_rdev)}:{os.minor(status.st_rdev)}")
    if timed:
        words.append(f"at {int(status.st_mtime)}" if status.st_mtime < LONG_AGO else "now")
    for key in sorted(os.listxattr(path, follow_symlinks=False)):
        if not key.startswith(_PRIVATE):
            words.append(f"{key}={os.getxattr(path, key, follow_symlinks=False).hex()}")
    return " ".join(words)


def _content(path: str, size: int) -> str:
    with open(path, "rb") as file:
        return repr(file.read()) if size <= _SHOWN else hashlib.file_digest(file, "sha256").hexdigest()[:16]


def docker_config(about: dict[str, Any]) -> dict[str, Any]:
    """Of what `docker image inspect` says."""
    config = about.get("Config") or {}
    check = config.get("Healthcheck") or {}
    return {
        "env": sorted(config.get("Env") or []),
        "workdir": config.get("WorkingDir") or "/",
        "user": config.get("User") or "",
        "entrypoint": config.get("Entrypoint") or [],
        "cmd": config.get("Cmd") or [],
        "labels": config.get("Labels") or {},
        "ports": sorted(config.get("ExposedPorts") or {}),
        "volumes": sorted(config.get("Volumes") or {}),
        "stop_signal": config.get("StopSignal") or "",
        "shell": config.get("Shell") or [],
        "on_build": config.get("OnBuild") or [],
        "check": check.get("Test") or [],
        "check_times": [
            check.get(name, 0) for name in ("Interval", "Timeout", "StartPeriod", "StartInterval", "Retries")
        ],
        "author": about.get("Author") or "",
    }


def our_config(config: ImageConfig) -> dict[str, Any]:
    """The same, of an image of ours."""
    check = config.health_check
    times = [0] * 5
    if check is not None:
        times = [check.interval, check.timeout, check.start_period, check.start_interval, check.retries]
    return {
        "env": sorted(f"{name}={value}" for name, value in config.env.items()),
        "workdir": config.workdir,
        "user": config.user,
        "entrypoint": list(config.entrypoint),
        "cmd": list(config.cmd),
        "labels": dict(config.labels),
        "ports": sorted(config.exposed_ports),
        "volumes": sorted(config.volumes),
        "stop_signal": config.stop_signal,
        "shell": list(config.shell),
        "on_build": list(config.on_build),
        "check": list(check.test) if check is not None else [],
        "check_times": times,
        "author": config.author,
    }


def differences(reference: dict[str, Any], ours: dict[str, Any], always: tuple[str, ...] = ALWAYS) -> list[str]:
    """One line for each that is not equal."""
    return [
        f"{name}: reference {reference.get(name, 'nothing')}, here {ours.get(name, 'nothing')}"
        for name in sorted({*reference, *ours})
        if reference.get(name) != ours.get(name) and not (name in always and name not in reference)
    ]
