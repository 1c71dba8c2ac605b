"""Compose files from the disk: found, read, extended, included, merged, chosen by profiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sandbox.compose import merge, variables
from sandbox.compose.project import Project
from sandbox.compose.read import parse, read_text
from sandbox.compose.resources import Resources
from sandbox.compose.services import assemble
from sandbox.compose.values import Value
from sandbox.compose.variables import Variables
from sandbox.errors import Invalid, NotFound

NAMES = ("compose.yaml", "compose.yml", "docker-compose.yaml", "docker-compose.yml")
MAX_FILES = 100  # of one project, with all that they extend and include
_TOP = {*merge.SECTIONS, "version", "name", "include"}


def load(
    paths: str | Path | Sequence[str | Path],
    *,
    name: str | None = None,
    profiles: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    main: str | None = None,
    copy_binds: bool = False,
    directory: str | Path | None = None,
) -> Project:
    """The project of one or several compose files, or of a directory that has one.

    `env`: the variables besides those of ``.env`` next to the first file. `main`: the service that calls mean which
    name none; else ``main``, ``default``, the one with ``x-default: true``, the first. `copy_binds`: host directories
    are copied into the service instead of being mounted. `directory`: which relative paths of the files begin at, and
    where ``.env`` is; None: that of the first file. Raises Invalid, with file, line and key; NotFound.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    files = [file for path in given for file in _located(Path(path).absolute())]
    if not files:
        raise Invalid("no compose file is given", hint=f"name one, such as {NAMES[0]}")
    base = files[0].parent if directory is None else Path(directory).absolute()
    outer = dict(env or {})
    scope = Variables({**_dotenv(base / ".env", outer), **outer})
    title = name or scope.values.get("COMPOSE_PROJECT_NAME")
    if title is not None:
        scope.values["COMPOSE_PROJECT_NAME"] = title
    loader = _Loader()
    model = loader.model(files, base, scope)
    said = model.map().get("name")
    title = title or (said.text() if said is not None else "") or base.name
    chosen = [*profiles, *filter(None, scope.values.get("COMPOSE_PROFILES", "").split(","))]
    services = _active(model, chosen)
    resources = Resources(model, scope, title, copy_binds=copy_binds)
    resources.notes += [f"the variable {missing} is not set" for missing in sorted(scope.missing)]
    return assemble(services, resources, main)


def _located(path: Path) -> list[Path]:
    """A file as it is given; of a directory, its compose file, and the one that Compose merges into it by itself."""
    if not path.is_dir():
        return [path]
    file = next((path / name for name in NAMES if (path / name).is_file()), None)
    if file is None:
        raise NotFound(f"there is no compose file in {path}", hint=f"one of {', '.join(NAMES)}")
    overrides = (file.with_name(f"{file.stem}.override{suffix}") for suffix in (".yaml", ".yml"))
    return [file, *[override for override in overrides if override.is_file()][:1]]


def _dotenv(path: Path, outer: Mapping[str, str]) -> dict[str, str]:
    if not path.exists():
        return {}
    try:
        return variables.parse_env(read_text(path, "file of variables"), outer)
    except ValueError as error:
        raise Invalid(f"{path}: {error}", hint="lines of NAME=VALUE") from None


def _active(model: Value, profiles: Sequence[str]) -> dict[str, Value]:
    """The services of no profile, and of those that are chosen."""
    section = model.map().get("services")
    if section is None or not section.map():
        raise Invalid(f"{model.place.file}: there are no services", hint="it needs `services:`")
    result = {}
    for name, service in section.map().items():
        own = service.map().get("profiles")
        names = {item.name() for item in own.items()} if own is not None else set()
        if not names or "*" in profiles or not names.isdisjoint(profiles):
            result[name] = service
    if not result:
        raise section.refuse("every service belongs to a profile", "choose one: profiles=[...], --profile")
    return result


@dataclass(frozen=True)
class _Source:
    """A file, which its relative paths begin at, and its variables."""

    path: Path
    base: Path
    scope: Variables


class _Loader:
    """Reads files, each once."""

    def __init__(self) -> None:
        self._read: dict[tuple[Path, Path, int], Value] = {}
        self._including: list[Path] = []
        self._scopes: list[Variables] = []  # so that no other one gets the id of one

    def model(self, files: Sequence[Path], base: Path, scope: Variables) -> Value:
        """The files merged in their order, with all that they include."""
        result: Value | None = None
        for file in files:
            source = _Source(file, base, scope)
            value = self._with_includes(source, self._extended(source))
            result = value if result is None else merge.merged(result, value)
        assert result is not None
        return result

    def _file(self, source: _Source) -> Value:
        """A file as it stands there, its services normalised."""
        key = (source.path, source.base, id(source.scope))
        if key not in self._read:
            if len(self._read) >= MAX_FILES:
                raise Invalid(f"more than {MAX_FILES} files belong to this project", hint="merge some of them")
            top = parse(read_text(source.path), str(source.path), source.base, source.scope)
            for name, value in top.map().items():
                if name not in _TOP and not name.startswith("x-"):
                    raise value.refuse("this key is not supported", "see docs/compose.md")
            entries = dict(top.map())
            if (services := entries.get("services")) is not None:
                made = {name: merge.normalised(service) for name, service in services.map().items()}
                entries["services"] = services.with_map(made)
            self._read[key] = top.with_map(entries)
        return self._read[key]

    # ----------------------------------------------------------------- extends

    def _extended(self, source: _Source) -> Value:
        """A file with what its services extend."""
        top = self._file(source)
        services = top.map().get("services")
        if services is None:
            return top
        made = {name: self._service(source, name, ()) for name in services.map()}
        return top.with_map({**top.map(), "services": services.with_map(made)})

    def _service(self, source: _Source, name: str, way: tuple[tuple[Path, str], ...]) -> Value:
        services = self._file(source).map().get("services")
        service = services.map().get(name) if services is not None else None
        if service is None:
            raise NotFound(f"{source.path}: there is no service {name}", hint="change `extends`")
        extends = service.map().get("extends")
        if extends is None or extends.is_null:
            return service
        if (source.path, name) in way:
            raise extends.refuse("services extend each other in a circle", "remove one `extends`")
        if isinstance(extends.data, str):
            base_name, file = extends.name(), None
        else:
            extends.only("service", "file")
            said = extends.get("service")
            base_name, file = said.name() if said is not None else name, extends.get("file")
        other = source
        if file is not None:
            path = Path(extends.place.base, file.name())
            other = _Source(path, path.parent, source.scope)
        below = self._service(other, base_name, (*way, (source.path, name)))
        own = service.with_map({key: value for key, value in service.map().items() if key != "extends"})
        return replace(merge.merged_service(below, own), place=service.place, key=service.key)

    # ----------------------------------------------------------------- include

    def _with_includes(self, source: _Source, top: Value) -> Value:
        include = top.map().get("include")
        if include is None:
            return top
        for item in include.items():
            other = self._included(source, item)
            for section in merge.SECTIONS:
                theirs = other.map().get(section)
                if theirs is None or theirs.is_null:
                    continue
                ours = top.map().get(section, theirs.with_map({}))
                if twice := sorted(ours.map().keys() & theirs.map().keys()):
                    raise item.refuse(f"{section}.{twice[0]} is in this file as well", "rename one of the two")
                top = top.with_map({**top.map(), section: ours.with_map({**theirs.map(), **ours.map()})})
        return top

    def _included(self, source: _Source, item: Value) -> Value:
        if isinstance(item.data, dict):
            item.only("path", "project_directory", "env_file")
            said = item.get("path")
            paths = said.several() if said is not None else []
            directory, env_files = item.get("project_directory"), item.get("env_file")
        else:
            paths, directory, env_files = [item], None, None
        if not paths:
            raise item.refuse("it includes no file", "give `path`")
        files = [Path(item.place.base, path.name()) for path in paths]
        if files[0] in (*self._including, source.path):
            raise item.refuse("files include each other in a circle", "remove one `include`")
        base = Path(item.place.base, directory.name()) if directory is not None else files[0].parent
        defaults = (
            [base / ".env"] if env_files is None else [Path(item.place.base, one.name()) for one in env_files.several()]
        )
        values: dict[str, str] = {}
        for path in defaults:
            values |= _dotenv(path, source.scope.values)
        scope = Variables({**values, **source.scope.values})
        scope.missing = source.scope.missing
        self._scopes.append(scope)
        self._including.append(source.path)
        try:
            return self.model(files, base, scope)
        finally:
            self._including.pop()
