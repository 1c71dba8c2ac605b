"""What a project has besides its services: networks, volumes, configs and secrets, and what is collected for all."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sandbox.compose.project import DirectoryCopy, FileCopy, ServiceBuild
from sandbox.compose.values import Place, Value
from sandbox.compose.variables import Variables
from sandbox.messages.services import HostMount, Volume

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_EXTERNAL = "it is outside of the sandbox, which has all of its services"


@dataclass(frozen=True)
class Content:
    """A config or secret: a file of this machine, or its content."""

    source: str | None
    content: bytes


class Resources:
    """The project outside of one service. `notes` and the lists are filled as services are read."""

    def __init__(self, model: Value, scope: Variables, title: str, *, copy_binds: bool) -> None:
        self._model, self.scope, self.title, self.copy_binds = model, scope, title, copy_binds
        self.notes: list[str] = []
        self.builds: dict[str, ServiceBuild] = {}
        self.policies: dict[str, str] = {}
        self.files: list[FileCopy] = []
        self.directories: list[DirectoryCopy] = []
        self.open_files: int | None = None

    def note(self, value: Value, text: str) -> None:
        self.notes.append(f"{value.place}: {value.key}: {text}")

    def section(self, name: str) -> dict[str, Value]:
        section = self._model.map().get(name)
        return section.map() if section is not None else {}

    def _entry(self, section: str, use: Value, name: str, *accepted: str) -> Value:
        """An entry of a section that a service names. Raises Invalid where it is missing or cannot be."""
        if NAME.fullmatch(name) is None:
            raise use.refuse(f"{name!r} is no name", "letters, digits, _, . and -, at most 63")
        entry = self.section(section).get(name)
        if entry is None:
            raise use.refuse(f"there is no {name} below {section}", f"add it: {section}: {{{name}: ...}}")
        external = entry.map().get("external")
        if external is not None and not external.is_empty:
            raise external.refuse(_EXTERNAL, f"define it in this file, below {section}")
        for key, value in entry.map().items():
            if key not in accepted and not key.startswith("x-") and not value.is_empty:
                raise value.refuse("this key is not supported", "see docs/compose.md")
        return entry

    # ----------------------------------------------------------------- networks

    def network(self, use: Value, name: str) -> bool:
        """Whether a network is internal. `default` is always there."""
        if name == "default" and name not in self.section("networks"):
            return False
        entry = self._entry(
            "networks",
            use,
            name,
            *("name", "driver", "internal", "labels", "external", "attachable", "ipam", "enable_ipv4", "enable_ipv6"),
            "driver_opts",
        )
        driver = entry.get("driver")
        if driver is not None and driver.text() not in ("bridge", "default", "overlay"):
            raise driver.refuse(f"the driver {driver.text()} is not supported", "remove it")
        for key in ("ipam", "driver_opts", "enable_ipv6"):
            if (value := entry.get(key)) is not None and not value.is_empty:
                self.note(value, "addresses are given by the sandbox")
        internal = entry.get("internal")
        return internal is not None and internal.flag()

    # ----------------------------------------------------------------- volumes

    def volume(self, use: Value, name: str) -> str:
        """The name of a volume that is defined here."""
        entry = self._entry("volumes", use, name, "name", "driver", "labels", "external", "driver_opts")
        driver = entry.get("driver")
        if driver is not None and driver.text() not in ("local", "default"):
            raise driver.refuse(f"the driver {driver.text()} is not supported", "remove it: volumes are in the sandbox")
        options = entry.get("driver_opts")
        if options is not None and not options.is_empty:
            raise options.refuse("a volume is a directory of the sandbox", "remove it, or mount a host directory")
        return name

    # ----------------------------------------------------------------- configs and secrets

    def content(self, section: str, use: Value, name: str) -> Content:
        """What a config or secret holds."""
        entry = self._entry(section, use, name, "name", "file", "environment", "content", "labels", "external")
        file, variable, content = (entry.get(key) for key in ("file", "environment", "content"))
        if sum(item is not None for item in (file, variable, content)) != 1:
            raise entry.refuse("it needs one of file, environment, content")
        if file is not None:
            return Content(located(file.place, file.name()), b"")
        if content is not None:
            return Content(None, content.text().encode())
        assert variable is not None
        if (value := self.scope.values.get(variable.name())) is None:
            raise variable.refuse(f"the variable {variable.name()} is not set", "set it in the environment or in .env")
        return Content(None, value.encode())


def located(place: Place, path: str) -> str:
    """A path of this machine that stands in a file: absolute, relative to the file, or to the home directory."""
    import os.path

    return os.path.normpath(os.path.join(place.base, os.path.expanduser(path)))


@dataclass(frozen=True)
class Storage:
    """What a service has besides the tree of its image."""

    volumes: list[Volume]
    mounts: list[HostMount]
    tmpfs: list[str]
