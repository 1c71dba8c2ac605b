"""The services of a project, from the values of their files."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Mapping
from pathlib import Path

import msgspec

from sandbox.compose import connections, keys
from sandbox.compose.builds import image_name, service_build
from sandbox.compose.project import Project
from sandbox.compose.read import read_text
from sandbox.compose.resources import NAME, Resources, located
from sandbox.compose.storage import storage
from sandbox.compose.values import Value
from sandbox.compose.variables import parse_env
from sandbox.errors import Invalid, NotFound
from sandbox.image.stages import fits, platform_name
from sandbox.messages import Composition
from sandbox.messages.services import (
    MAX_SERVICES,
    Condition,
    Dependency,
    Probe,
    Restart,
    Service,
    ServiceLimits,
    ServiceNetwork,
)

_POLICIES = {"always": "always", "never": "never", "build": "build", "missing": "missing", "if_not_present": "missing"}
_RESTART_OF_DEPLOY = {"none": Restart.NO, "on-failure": Restart.ON_FAILURE, "any": Restart.ALWAYS}
_DEPLOY_WITHOUT_EFFECT = ("labels", "update_config", "rollback_config", "placement", "endpoint_mode", "reservations")


def assemble(services: Mapping[str, Value], resources: Resources, main: str | None) -> Project:
    """The project of these services. Raises Invalid."""
    made: dict[str, Service] = {}
    networks: dict[str, bool] = {}
    ports = connections.Ports(resources)
    replicas = {name: _names(name, service) for name, service in services.items()}
    for name, service in services.items():
        if NAME.fullmatch(name) is None:
            raise service.refuse(f"{name!r} is no name of a service", "letters, digits, _, . and -, at most 63")
        keys.check(service, resources.notes)
        for copy in replicas[name]:
            reader = _Reader(copy, name, service, resources)
            made[copy] = reader.service(replicas)
            networks |= reader.internal
            ports.take(copy, service)
    if not made or len(made) > MAX_SERVICES:
        raise Invalid(f"the project has {len(made)} services; there can be 1 to {MAX_SERVICES}", hint="split it")
    _link(services, made, replicas)
    published = ports.of()
    made = {name: msgspec.structs.replace(one, ports=published.get(name, [])) for name, one in made.items()}
    composition = Composition(
        services=made,
        networks={name: ServiceNetwork(internal=internal) for name, internal in networks.items()},
        main=_main(services, replicas, main),
    )
    try:
        composition.order()
    except ValueError as error:
        raise Invalid(str(error), hint="change `depends_on`") from None
    return Project(
        name=resources.title,
        composition=composition,
        builds=resources.builds,
        policies=resources.policies,
        files=resources.files,
        directories=resources.directories,
        open_files=resources.open_files,
        no_new_privs=all(_no_new_privs(service, resources) for service in services.values()),
        notes=list(dict.fromkeys(resources.notes)),
    )


def _main(services: Mapping[str, Value], replicas: Mapping[str, list[str]], given: str | None) -> str:
    marked = [name for name, one in services.items() if (said := one.get("x-default")) is not None and said.flag()]
    candidates = [given] if given is not None else ["main", "default", *marked, *services]
    result = next((replicas[name][0] for name in candidates if replicas.get(name)), None)
    if result is None:
        raise NotFound(f"there is no service {given}", hint=f"there are: {', '.join(services)}")
    return result


def _names(name: str, service: Value) -> list[str]:
    """A service, or NAME-1, NAME-2, ... of one that is to run several times."""
    deploy = service.get("deploy")
    said = service.get("scale") or (deploy.get("replicas") if deploy is not None else None)
    count = 1 if said is None else said.integer(0, 1000)
    if count <= 1:
        return [name] * count
    if (container := service.get("container_name")) is not None:
        raise container.refuse(f"{count} replicas cannot have one name", "remove it")
    return [f"{name}-{number}" for number in range(1, count + 1)]


def _link(services: Mapping[str, Value], made: dict[str, Service], replicas: Mapping[str, list[str]]) -> None:
    """Links are further names of their targets, in the networks that both have."""
    for name, service in services.items():
        for target, alias, item in connections.links(service):
            if target not in replicas:
                raise item.refuse(f"there is no service {target}", "name one of this file")
            for own in replicas[name]:
                for other in replicas[target] if alias != target else ():
                    shared = made[own].networks.keys() & made[other].networks.keys()
                    named = {
                        network: [*names, alias] if network in shared and alias not in names else names
                        for network, names in made[other].networks.items()
                    }
                    made[other] = msgspec.structs.replace(made[other], networks=named)


def _no_new_privs(service: Value, resources: Resources) -> bool:
    said = service.get("security_opt")
    result = False
    for item in said.items() if said is not None else []:
        text = item.name().replace("=", ":")
        if text in ("no-new-privileges", "no-new-privileges:true"):
            result = True
        elif text == "no-new-privileges:false" or text.startswith(("label:", "seccomp:", "apparmor:")):
            resources.note(item, "services have the rights that sandboxes have")
        else:
            raise item.refuse(f"{text} is not supported", "no-new-privileges:true is")
    return result


class _Reader:
    """One service; `name` is its own where it runs several times, `family` that of the file."""

    def __init__(self, name: str, family: str, value: Value, resources: Resources) -> None:
        self._name, self._family, self._value, self._resources = name, family, value, resources
        self._deploy = value.get("deploy") or value.with_map({})
        networks, self.internal = connections.networks(name, value, resources)
        if name != family:
            networks = {network: [*names, family] for network, names in networks.items()}
        self._networks = networks

    def service(self, replicas: Mapping[str, list[str]]) -> Service:
        value, get = self._value, self._value.get
        self._check_deploy()
        self._open_files()
        stored = storage(self._name, value, self._resources)
        restart, attempts = self._restart()
        grace, stop = get("stop_grace_period"), get("stop_signal")
        user, workdir, hostname = get("user"), get("working_dir"), get("hostname")
        labels = get("labels")
        if workdir is not None and not workdir.name().startswith("/"):
            raise workdir.refuse(f"{workdir.text()} is no absolute path", "begin it with /")
        if hostname is not None and NAME.fullmatch(hostname.name()) is None:
            raise hostname.refuse(f"{hostname.text()!r} is no name", "letters, digits, _, . and -, at most 63")
        return Service(
            image=self._image(),
            entrypoint=self._words("entrypoint"),
            command=self._words("command"),
            env=self._environment(),
            user=user.name() if user is not None else None,
            workdir=workdir.text() if workdir is not None else None,
            depends_on=self._dependencies(replicas),
            healthcheck=self._health(),
            restart=restart,
            restart_attempts=attempts,
            volumes=stored.volumes,
            mounts=stored.mounts,
            tmpfs=stored.tmpfs,
            networks=self._networks,
            extra_hosts=connections.extra_hosts(value, self._resources),
            hostname=hostname.text() if hostname is not None else "",
            limits=self._limits(),
            stop_signal=_signal(stop) if stop is not None else None,
            stop_grace_period=grace.seconds() if grace is not None else 10.0,
            labels={name: text or "" for name, text in labels.pairs().items()} if labels is not None else {},
            stdin_open=self._has("stdin_open"),
            tty=self._has("tty"),
        )

    def _has(self, key: str) -> bool:
        flag = self._value.get(key)
        return flag is not None and flag.flag()

    # ----------------------------------------------------------------- image

    def _image(self) -> str:
        image, build, platform = (self._value.get(key) for key in ("image", "build", "platform"))
        if platform is not None and not fits(platform.name()):
            raise platform.refuse(f"sandboxes here are of {platform_name()}", "remove it")
        if (policy := self._value.get("pull_policy")) is not None:
            said = policy.text()
            if said in ("daily", "weekly") or said.startswith("every_"):
                said = "missing"
            if said not in _POLICIES:
                raise policy.refuse(f"there is no policy {said}", f"there are {', '.join(_POLICIES)}")
            self._resources.policies[self._name] = _POLICIES[said]
        if build is None:
            if image is None:
                raise self._value.refuse("it has neither `image` nor `build`", "give one")
            return image_name(image)
        made = service_build(self._family, build, image_name(image) if image is not None else None, self._resources)
        self._resources.builds[self._name] = made
        return made.image

    # ----------------------------------------------------------------- what runs

    def _words(self, key: str) -> list[str] | None:
        """A command: a list, or one text that is split as a shell would; None: as the image says."""
        value = self._value.map().get(key)
        if value is None or value.is_null:
            return None
        if isinstance(value.data, list):
            return [item.text() for item in value.data]
        try:
            return shlex.split(value.text())
        except ValueError as error:
            raise value.refuse(f"{value.text()!r:.200} cannot be split into words: {error}", "use a list") from None

    def _environment(self) -> dict[str, str]:
        result: dict[str, str] = {}
        outer = self._resources.scope.values
        files = self._value.get("env_file")
        for item in files.several() if files is not None else []:
            result |= self._env_file(item, {**outer, **result})
        said = self._value.get("environment")
        for name, value in said.pairs().items() if said is not None else ():
            if value is not None:
                result[name] = value
            elif name in outer:
                result[name] = outer[name]
        return result

    def _env_file(self, item: Value, outer: Mapping[str, str]) -> dict[str, str]:
        path, required, raw = item, True, False
        if isinstance(item.data, dict):
            item.only("path", "required", "format")
            if (said := item.get("path")) is None:
                raise item.refuse("it has no path")
            path = said
            required = (flag := item.get("required")) is None or flag.flag()
            raw = (kind := item.get("format")) is not None and kind.text() == "raw"
        file = located(path.place, path.name())
        if not required and not Path(file).exists():
            return {}
        try:
            return parse_env(read_text(file, "file of variables"), outer, raw=raw)
        except ValueError as error:
            raise path.refuse(f"{file}: {error}", "lines of NAME=VALUE") from None
        except (Invalid, NotFound) as error:
            raise path.refuse(error.message, "correct the path, or say `required: false`") from None

    def _dependencies(self, replicas: Mapping[str, list[str]]) -> dict[str, Dependency]:
        result: dict[str, Dependency] = {}
        said = self._value.get("depends_on")
        for name, value in said.map().items() if said is not None else ():
            value.only("condition", "required", "restart")
            condition, required, restart = (value.get(key) for key in ("condition", "required", "restart"))
            try:
                kind = Condition(condition.text()) if condition is not None else Condition.STARTED
            except ValueError:
                assert condition is not None
                raise condition.refuse(f"there is no condition {condition.text()}", ", ".join(Condition)) from None
            one = Dependency(
                condition=kind,
                required=required is None or required.flag(),
                restart=restart is not None and restart.flag(),
            )
            if name not in replicas and one.required:
                raise value.refuse(f"there is no service {name}, or it belongs to a profile that is not chosen")
            result |= dict.fromkeys(replicas.get(name, ()), one)
        for name, _, _ in connections.links(self._value):
            for other in replicas.get(name, ()):
                result.setdefault(other, Dependency())
        return result

    def _health(self) -> Probe | None:
        value = self._value.get("healthcheck")
        if value is None:
            return None
        value.only("test", "interval", "timeout", "retries", "start_period", "start_interval", "disable")
        test, disable = value.get("test"), value.get("disable")
        if disable is not None and disable.flag():
            return Probe(test=[])
        if test is None or test.is_null or not test.data:
            raise value.refuse("it has no test", 'such as ["CMD", "pg_isready"]; or disable: true')
        if isinstance(test.data, str):
            words = ["/bin/sh", "-c", test.text()]
        else:
            kind, *words = [item.text() for item in test.items()]
            if kind == "NONE":
                return Probe(test=[])
            if kind not in ("CMD", "CMD-SHELL") or not words:
                raise test.refuse(f"a test begins with CMD, CMD-SHELL or NONE, not {kind!r}")
            words = ["/bin/sh", "-c", words[0]] if kind == "CMD-SHELL" else words
        times = {
            key: said.seconds()
            for key in ("interval", "timeout", "start_period", "start_interval")
            if (said := value.get(key)) is not None
        }
        retries = value.get("retries")
        return Probe(test=words, **times, retries=retries.integer(1, 1000) if retries is not None else 3)

    def _restart(self) -> tuple[Restart, int]:
        if (said := self._value.get("restart")) is not None:
            kind, _, count = said.text().partition(":")
            try:
                return Restart(kind), min(1000, int(count)) if count else 0
            except ValueError:
                raise said.refuse(f"there is no policy {said.text()}", f"there are {', '.join(Restart)}") from None
        policy = self._deploy.get("restart_policy")
        if policy is None:
            return Restart.NO, 0
        condition, attempts = policy.get("condition"), policy.get("max_attempts")
        kind = condition.text() if condition is not None else "any"
        if kind not in _RESTART_OF_DEPLOY:
            raise policy.refuse(f"there is no condition {kind}", f"there are {', '.join(_RESTART_OF_DEPLOY)}")
        result = _RESTART_OF_DEPLOY[kind]
        return result, attempts.integer(0, 1000) if attempts is not None and result is Restart.ON_FAILURE else 0

    # ----------------------------------------------------------------- limits

    def _check_deploy(self) -> None:
        self._deploy.only("mode", "replicas", "resources", "restart_policy", *_DEPLOY_WITHOUT_EFFECT)
        resources = self._deploy.get("resources")
        if resources is None:
            return
        resources.only("limits", "reservations")
        for part in resources.map().values():
            if (devices := part.get("devices")) is not None and not devices.is_empty:
                raise devices.refuse("services have no devices and no GPU", "remove it")

    def _limits(self) -> ServiceLimits:
        resources = self._deploy.get("resources")
        limits = (resources.get("limits") if resources is not None else None) or self._value.with_map({})
        limits.only("cpus", "memory", "pids", "devices")
        cpus, memory, pids = limits.get("cpus"), limits.get("memory"), limits.get("pids")
        cpus = cpus or self._value.get("cpus")
        memory, pids = memory or self._value.get("mem_limit"), pids or self._value.get("pids_limit")
        quota, period = self._value.get("cpu_quota"), self._value.get("cpu_period")
        cores = cpus.number() if cpus is not None else None
        if cores is None and quota is not None:
            cores = quota.number() / (period.number() if period is not None and period.number() else 100_000)
        return ServiceLimits(
            cpus=max(0.01, cores) if cores else None,
            memory=(memory.size() or None) if memory is not None else None,
            processes=None if pids is None or pids.text() in ("-1", "0") else pids.integer(1, 1 << 22),
        )

    def _open_files(self) -> None:
        limits = self._value.get("ulimits")
        for name, value in limits.map().items() if limits is not None else ():
            if name != "nofile":
                self._resources.note(value, "limits are those of the sandbox")
                continue
            soft = value if isinstance(value.data, str) else value.map().get("hard", value)
            number = min(1 << 20, max(16, soft.integer(-1, 1 << 30) % (1 << 31)))
            self._resources.open_files = max(self._resources.open_files or 0, number)


def _signal(value: Value) -> int:
    text = value.name().upper()
    if text.isdecimal() and 1 <= int(text) <= 64:
        return int(text)
    try:
        return int(signal.Signals[text if text.startswith("SIG") else f"SIG{text}"])
    except KeyError:
        raise value.refuse(f"{value.text()} is no signal", "a name such as SIGINT, or a number") from None
