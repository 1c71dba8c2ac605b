"""The volumes, binds, tmpfs, configs and secrets of one service."""

from __future__ import annotations

import os
import posixpath
import re
from dataclasses import dataclass
from hashlib import blake2b

from sandbox.compose.project import DirectoryCopy, FileCopy
from sandbox.compose.resources import NAME, Resources, Storage, located
from sandbox.compose.values import Value
from sandbox.messages.services import HostMount, Volume

_SECRETS = "/run/secrets"
_DOCKER_SOCKET = "docker.sock"
_MODE = re.compile(r"(?:0o?)?([0-7]{3,4})")
_WITHOUT_EFFECT = {
    *("z", "Z", "cached", "delegated", "consistent", "rw", "ro", "rprivate", "private", "rslave", "slave", "rshared"),
    "shared",
}


@dataclass(frozen=True)
class _Bind:
    """One entry of `volumes`."""

    kind: str  # bind, volume, tmpfs
    source: str  # "" of an anonymous volume
    target: str
    read_only: bool
    create: bool  # of a bind whose source is missing
    value: Value


def storage(service: str, value: Value, resources: Resources) -> Storage:
    """All of them; what is copied is added to the lists of `resources`."""
    reader = _Reader(service, resources)
    for item in value.map().get("volumes", value.with_list([])).items():
        reader.take(_short(item) if isinstance(item.data, str) else _long(item))
    for item in value.map().get("tmpfs", value.with_list([])).several():
        path, _, options = item.name().partition(":")
        reader.tmpfs.append(_absolute(item, path))
        if options:
            resources.note(item, "the options of a tmpfs are not used")
    for section in ("configs", "secrets"):
        for item in value.map().get(section, value.with_list([])).items():
            reader.hand(section, item)
    return Storage(reader.volumes, reader.mounts, reader.tmpfs)


def _short(item: Value) -> _Bind:
    """SOURCE:TARGET:OPTIONS, or TARGET of an anonymous volume."""
    parts = item.name().split(":")
    if len(parts) == 1:
        return _Bind("volume", "", _absolute(item, parts[0]), False, True, item)
    if len(parts) > 3 or not parts[0]:
        raise item.refuse(f"{item.text()!r} is no volume", "SOURCE:TARGET[:ro]")
    options = set(parts[2].split(",")) if len(parts) == 3 else set()
    if unknown := sorted(options - _WITHOUT_EFFECT):
        raise item.refuse(f"the option {unknown[0]} is not supported", "there are ro and rw")
    source = parts[0]
    kind = "bind" if source.startswith(("/", ".", "~")) else "volume"
    return _Bind(kind, source, _absolute(item, parts[1]), "ro" in options, True, item)


def _long(item: Value) -> _Bind:
    item.only("type", "source", "target", "read_only", "bind", "volume", "tmpfs", "consistency")
    kind = item.get("type")
    name = kind.text() if kind is not None else "volume"
    if name not in ("bind", "volume", "tmpfs"):
        assert kind is not None
        raise kind.refuse(f"volumes of the type {name} are not supported", "there are bind, volume and tmpfs")
    source, target, read_only = item.get("source"), item.get("target"), item.get("read_only")
    if target is None:
        raise item.refuse("it has no target", "give the directory in the service")
    if (options := item.get("volume")) is not None:
        for key in ("nocopy", "subpath"):
            if (value := options.get(key)) is not None and not value.is_empty:
                raise value.refuse("this key is not supported", "remove it")
    bind = item.get("bind")
    create = bind.get("create_host_path") if bind is not None else None
    if name == "bind" and source is None:
        raise item.refuse("it has no source", "give the directory of the host")
    return _Bind(
        name,
        source.name() if source is not None else "",
        _absolute(target, target.name()),
        read_only is not None and read_only.flag(),
        create is not None and create.flag(),
        item,
    )


def _absolute(item: Value, path: str) -> str:
    if not path.startswith("/"):
        raise item.refuse(f"{path!r} is no absolute path of the service", "begin it with /")
    result = posixpath.normpath(path)
    if result in ("/", "//"):
        raise item.refuse("nothing can be mounted at /", "name a directory below")
    return result


class _Reader:
    def __init__(self, service: str, resources: Resources) -> None:
        self._service, self._resources = service, resources
        self.volumes: list[Volume] = []
        self.mounts: list[HostMount] = []
        self.tmpfs: list[str] = []

    def take(self, bind: _Bind) -> None:
        if bind.kind == "tmpfs":
            self.tmpfs.append(bind.target)
        elif bind.kind == "bind":
            self._bind(bind, located(bind.value.place, bind.source))
        else:
            name = self._resources.volume(bind.value, bind.source) if bind.source else self._anonymous(bind.target)
            self.volumes.append(Volume(name=name, target=bind.target, read_only=bind.read_only))

    def _anonymous(self, target: str) -> str:
        """The same name for the same place, so that an equal file is an equal composition."""
        digest = blake2b(f"{self._service}:{target}".encode(), digest_size=6).hexdigest()
        return f"anonymous-{digest}"

    def _bind(self, bind: _Bind, source: str) -> None:
        resources = self._resources
        if os.path.isfile(source):
            resources.files.append(FileCopy(self._service, bind.target, source=source))
            if not bind.read_only:
                resources.note(bind.value, f"{source} is copied: what the service writes there stays in the sandbox")
            return
        if os.path.basename(source) == _DOCKER_SOCKET:
            raise bind.value.refuse(
                "the socket of the host's Docker Engine is not shared",
                "remove it: with --docker (docker=True) the main service has docker, within its sandbox",
            )
        missing = not os.path.lexists(source)
        if not missing and not os.path.isdir(source):
            raise bind.value.refuse(f"{source} is neither a file nor a directory", "remove it: no socket, no device")
        if resources.copy_binds:
            if missing and not bind.create:
                raise bind.value.refuse(f"{source} does not exist", "make it, or remove the volume")
            resources.directories.append(DirectoryCopy(self._service, "" if missing else source, bind.target))
            return
        if not bind.read_only:
            raise bind.value.refuse(
                f"the host directory {source} would be written to, which no checkpoint could hold",
                "add :ro (read_only: true), or have it copied: copy_binds=True, --copy-binds",
            )
        if missing:
            raise bind.value.refuse(f"{source} does not exist", "make it, or remove the volume")
        self.mounts.append(HostMount(source=source, target=bind.target))

    def hand(self, section: str, item: Value) -> None:
        """A config or secret, as a file of the service."""
        default = "/" if section == "configs" else _SECRETS
        mode = 0o444
        if isinstance(item.data, str):
            name, target = item.name(), posixpath.join(default, item.name())
        else:
            item.only("source", "target", "uid", "gid", "mode")
            source = item.get("source")
            if source is None:
                raise item.refuse("it has no source", f"name one of {section}")
            name, said = source.name(), item.get("target")
            target = posixpath.join(default, said.name() if said is not None else name)
            mode = _mode(item)
            if any(item.get(key) is not None for key in ("uid", "gid")):
                self._resources.note(item, "the file belongs to root")
        if NAME.fullmatch(name) is None:
            raise item.refuse(f"{name!r} is no name of one of {section}")
        made = self._resources.content(section, item, name)
        if made.source is not None and not os.path.isfile(made.source):
            raise item.refuse(f"{made.source} is no file", f"correct `file` of {section}.{name}")
        self._resources.files.append(
            FileCopy(self._service, _absolute(item, target), source=made.source, content=made.content, mode=mode)
        )


def _mode(item: Value) -> int:
    if (mode := item.get("mode")) is None:
        return 0o444
    if (match := _MODE.fullmatch(mode.text())) is None:
        raise mode.refuse(f"{mode.text()!r} is no mode", "octal, such as 0440")
    return int(match[1], 8)
