"""What the instructions of a Dockerfile mean: variables, configuration, and what is to be done to the tree. Pure.

Guarantee: as BuildKit has it; what it would do and we do not is refused with its line.
"""

from __future__ import annotations

import platform
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from sandbox.errors import Invalid, Unsupported
from sandbox.image import words
from sandbox.image.dockerfile import BuildStage, Dockerfile, Document, Instruction
from sandbox.image.durations import nanoseconds
from sandbox.image.run_mounts import BuildMount, mounts_of
from sandbox.messages.images import HealthCheck, ImageConfig

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # where a base has none
PROXIES = tuple(f"{item}_proxy" for item in ("http", "https", "ftp", "no", "all"))  # build arguments without an ARG
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_CHECKSUM = re.compile(r"sha256:[0-9a-f]{64}")
_PORT = re.compile(r"(?:.*:)?(\d{1,5})(?:-(\d{1,5}))?(?:/(\w+))?")
_MODE = re.compile(r"[0-7]{1,5}|[ugoa]*[-+=][rwxXstugo]*(?:[-+=][rwxXstugo]*)*(?:,[ugoa]*(?:[-+=][rwxXstugo]*)+)*")
_SIGNAL = re.compile(  # of Linux on x86-64 and ARM
    r"(SIG)?(ABRT|ALRM|BUS|CHLD|CLD|CONT|FPE|HUP|ILL|INT|IO|IOT|KILL|PIPE|POLL|PROF|PWR|QUIT|SEGV|STKFLT|STOP|SYS|TERM"
    r"|TRAP|TSTP|TTIN|TTOU|URG|USR1|USR2|VTALRM|WINCH|XCPU|XFSZ|RTMIN(\+([1-9]|1[0-5]))?|RTMAX(-([1-9]|1[0-4]))?)",
    re.IGNORECASE,
)
_GIT = re.compile(r"(?:git://|git@|ssh://git@|https?://[^#?]+\.git(?:$|[#?/])).*")


@dataclass(frozen=True)
class RunAction:
    """A command in a sandbox."""

    command: tuple[str, ...]
    variables: dict[str, str]
    workdir: str
    user: str
    mounts: tuple[BuildMount, ...] = ()
    network: str = "default"
    script: str = ""  # an executable file that the command is, with the name in `script_name`
    script_name: str = ""


@dataclass(frozen=True)
class CopyInstruction:
    """A COPY or an ADD."""

    sources: tuple[str, ...]  # of the context or of `origin`
    target: str
    origin: str = ""  # a stage or an image; "": the context
    addresses: tuple[str, ...] = ()
    repositories: tuple[str, ...] = ()
    documents: tuple[tuple[str, str], ...] = ()  # name and content
    owner: str = ""
    mode: str = ""
    parents: bool = False
    exclude: tuple[str, ...] = ()
    unpack: bool | None = None  # None: archives of the context only
    checksum: str = ""
    keep_git: bool = False
    add: bool = False


@dataclass(frozen=True)
class DirectoryAction:
    """A WORKDIR."""

    path: str
    owner: str


Action = RunAction | CopyInstruction | DirectoryAction


@dataclass(frozen=True)
class StageState:
    """What the instructions of a stage have set so far. `scope` is what they see: ENV and ARG, the last one counts."""

    config: ImageConfig
    scope: dict[str, str] = field(default_factory=dict)
    has_cmd: bool = False  # CMD was in this stage

    @classmethod
    def of(cls, config: ImageConfig, scope: Mapping[str, str] | None = None) -> StageState:
        """At the beginning of a stage: of an image, or of a former stage with what that saw."""
        env = dict(config.env) if "PATH" in config.env else {**config.env, "PATH": PATH}
        return cls(_changed(config, env=env, on_build=[]), {**(scope or {}), **env})


@dataclass(frozen=True)
class BuildArguments:
    """What comes from outside: build arguments, and the ARG instructions before the first FROM."""

    given: dict[str, str]
    outside: dict[str, str]
    escape: str = "\\"

    @classmethod
    def of(cls, file: Dockerfile, given: Mapping[str, str], target: str = "") -> BuildArguments:
        outside = {name: given.get(name, value) for name, value in platform_arguments(target).items()}
        for instruction in file.arguments:
            for word in instruction.words:
                name, has_default, default = word.partition("=")
                if name in given:
                    outside[name] = given[name]
                elif has_default:
                    outside[name] = _expand(default, outside, file.escape, instruction.line)
        return cls(dict(given), outside, file.escape)

    def base(self, stage: BuildStage) -> str:
        """What a stage begins with. Raises Unsupported for another platform than this machine's."""
        name = _expand(stage.base, self.outside, self.escape, stage.line)
        if not name:
            raise Invalid(f"line {stage.line}: FROM names nothing: {stage.base} is empty", hint="--build-arg")
        target = _expand(stage.platform, self.outside, self.escape, stage.line)
        if target and not fits(target):
            raise Unsupported(
                f"line {stage.line}: FROM --platform={target}: sandboxes of this host are {platform_name()}",
                hint="build it on a host of that platform, or leave --platform out",
            )
        return name

    @property
    def proxies(self) -> dict[str, str]:
        return {name: value for name, value in self.given.items() if name.lower() in PROXIES}


def platform_name() -> str:
    """Example: ``linux/amd64``."""
    machine = platform.machine()
    return f"linux/{ARCHITECTURES.get(machine, machine)}"


def fits(target: str) -> bool:
    """Whether an image for this platform runs here."""
    system, _, rest = target.lower().partition("/")
    machine, _, variant = rest.partition("/")
    machine = {"x86_64": "amd64", "x86-64": "amd64", "aarch64": "arm64"}.get(machine or system, machine or system)
    if not rest and system == "linux":
        return True
    own = platform_name().partition("/")[2]
    return (not rest or system == "linux") and machine == own and variant in ("", "v1" if own == "amd64" else "v8")


def platform_arguments(target: str) -> dict[str, str]:
    """The variables that are there without being declared before the first FROM."""
    name = platform_name()
    system, _, machine = name.partition("/")
    result: dict[str, str] = {}
    for item in ("BUILD", "TARGET"):
        result |= {f"{item}PLATFORM": name, f"{item}OS": system, f"{item}OSVERSION": "", f"{item}ARCH": machine}
        result |= {f"{item}VARIANT": ""}
    return {**result, "TARGETSTAGE": target or "default"}


def apply(instruction: Instruction, state: StageState, arguments: BuildArguments) -> tuple[StageState, Action | None]:
    """The state behind an instruction, and what is to be done to the tree. Raises Invalid with the line."""
    meaning = _Meaning(instruction, state, arguments)
    return meaning.state(), meaning.action()


class _Meaning:
    """One instruction as its state sees it."""

    def __init__(self, instruction: Instruction, state: StageState, arguments: BuildArguments) -> None:
        self._is, self._before, self._arguments = instruction, state, arguments

    def _word(self, text: str) -> str:
        return _expand(text, self._before.scope, self._arguments.escape, self._is.line)

    def _refuse(self, why: str, hint: str = "") -> Invalid:
        return Invalid(f"line {self._is.line}: {why}", hint=hint)

    def state(self) -> StageState:
        before, config, here = self._before, self._before.config, self._is
        kind = here.kind
        if kind == "ARG":
            return self._with_arguments()
        if kind == "ENV":
            pairs = self._pairs()
            return replace(
                before, config=_changed(config, env={**config.env, **pairs}), scope={**before.scope, **pairs}
            )
        if kind == "ENTRYPOINT":
            return replace(
                before, config=_changed(config, entrypoint=self._command(), cmd=config.cmd if before.has_cmd else [])
            )
        if kind == "CMD":
            return replace(before, config=_changed(config, cmd=self._command()), has_cmd=True)
        changes: dict[str, object] = {}
        if kind == "LABEL":
            changes["labels"] = {**config.labels, **self._pairs()}
        elif kind == "WORKDIR":
            path = self._word(here.words[0])  # recorded as it stands there where it is absolute
            changes["workdir"] = path if path.startswith("/") else _joined(config.workdir, path)
        elif kind == "USER":
            changes["user"] = self._word(here.words[0])
        elif kind == "SHELL":
            changes["shell"] = list(here.words)
        elif kind == "STOPSIGNAL":
            changes["stop_signal"] = self._signal()
        elif kind == "MAINTAINER":
            changes["author"] = here.words[0]
        elif kind == "EXPOSE":
            changes["exposed_ports"] = sorted({*config.exposed_ports, *self._ports()})
        elif kind == "VOLUME":
            changes["volumes"] = sorted({*config.volumes, *(self._word(word) for word in here.words)})
        elif kind == "HEALTHCHECK":
            changes["health_check"] = self._health_check()
        elif kind == "ONBUILD":
            changes["on_build"] = [*config.on_build, here.words[0]]
        return replace(before, config=_changed(config, **changes)) if changes else before

    def action(self) -> Action | None:
        config = self._before.config
        if self._is.kind == "RUN":
            return self._run()
        if self._is.kind in ("COPY", "ADD"):
            return self._copy()
        if self._is.kind == "WORKDIR":
            path = _joined(config.workdir, self._word(self._is.words[0]))
            return DirectoryAction(path, config.user) if path != "/" else None
        return None

    # ----------------------------------------------------------------- configuration

    def _signal(self) -> str:
        value = self._word(self._is.words[0])
        number = int(value) if value.isdecimal() else 0
        if not number and _SIGNAL.fullmatch(value) is None:
            raise self._refuse(f"STOPSIGNAL: {value!r} is no signal", "a name such as SIGTERM, or a number")
        return value

    def _with_arguments(self) -> StageState:
        state, given = self._before, self._arguments.given
        for word in self._is.words:
            name, has_default, default = word.partition("=")
            if not name:
                raise self._refuse("ARG NAME[=DEFAULT]")
            value = given.get(name)
            if value is None and has_default:
                value = _expand(default, state.scope, self._arguments.escape, self._is.line)
            elif value is None:
                value = self._arguments.outside.get(name)
            if value is not None:
                state = replace(state, scope={**state.scope, name: value})
        return state

    def _pairs(self) -> dict[str, str]:
        names, values = self._is.words[::2], self._is.words[1::2]
        pairs = {self._word(name): self._word(value) for name, value in zip(names, values, strict=True)}
        if "" in pairs:
            raise self._refuse(f"{self._is.kind}: a name is empty")
        return pairs

    def _command(self) -> list[str]:
        if self._is.json:
            return list(self._is.words)
        return [*(self._before.config.shell or ("/bin/sh", "-c")), *(self._is.words or ("",))]

    def _ports(self) -> list[str]:
        result = []
        for word in self._is.words:
            for port in _split(word, self._before.scope, self._arguments.escape, self._is.line):
                match = _PORT.fullmatch(port)
                low, high = (int(match[1]), int(match[2] or match[1])) if match is not None else (0, -1)
                if (
                    match is None
                    or high < low
                    or high > 65535
                    or (match[3] or "tcp").lower() not in ("tcp", "udp", "sctp")
                ):
                    raise self._refuse(f"EXPOSE: {port!r} is no port", "PORT[-PORT][/tcp|/udp|/sctp]")
                result += [f"{number}/{(match[3] or 'tcp').lower()}" for number in range(low, high + 1)]
        return result

    def _health_check(self) -> HealthCheck:
        here = self._is
        kind = here.words[0].upper()
        if kind == "NONE":
            return HealthCheck(test=["NONE"])
        if kind != "CMD" or not any(here.words[1:]):
            raise self._refuse("HEALTHCHECK CMD command, or HEALTHCHECK NONE")
        times: dict[str, int] = {}
        for name, value in here.flags.items():
            try:
                times[name.replace("-", "_")] = int(value) if name == "retries" else nanoseconds(value)
            except ValueError:
                raise self._refuse(f"HEALTHCHECK --{name}={value}", "numbers with units: 30s, 1m30s") from None
            if times[name.replace("-", "_")] < 0:
                raise self._refuse(f"HEALTHCHECK --{name}={value} is below zero")
            if name != "retries" and 0 < times[name.replace("-", "_")] < 1_000_000:
                raise self._refuse(f"HEALTHCHECK --{name}={value} is below a millisecond")
        return HealthCheck(test=["CMD" if here.json else "CMD-SHELL", *here.words[1:]], **times)

    # ----------------------------------------------------------------- actions

    def _run(self) -> RunAction:
        here, config = self._is, self._before.config
        if here.flags.get("security", "sandbox") != "sandbox":
            raise self._refuse(
                f"RUN --security={here.flags['security']} is not supported", "sandboxes have one set of rights"
            )
        network = here.flags.get("network", "default")
        if network not in ("default", "none"):
            raise self._refuse(f"RUN --network={network} is not supported", "default and none are")
        mounts = mounts_of(here, self._word, config.workdir)
        scope = {**self._arguments.proxies, **self._before.scope}
        if agent := next((mount.target for mount in mounts if mount.kind == "ssh"), ""):
            scope.setdefault("SSH_AUTH_SOCK", agent)
        command, script, name = list(here.words), "", ""
        if here.documents:
            first = here.documents[0]
            if re.fullmatch(r"\d*<<-?\s*(\S+)", command[0].strip()):
                script, name = (first.content, first.name) if first.content.startswith("#!") else ("", "")
                command = [first.content]
            else:  # the shell reads them
                command = ["\n".join([command[0], *(f"{item.text}{item.name}" for item in here.documents)])]
        if not any(command):
            raise self._refuse("RUN needs a command")
        if not here.json:
            command = [*(config.shell or ("/bin/sh", "-c")), *command]
        return RunAction(tuple(command), scope, config.workdir, config.user, mounts, network, script, name)

    def _copy(self) -> CopyInstruction:
        here = self._is
        paths = [self._word(word) for word in here.words]
        target = _target(self._before.config.workdir, paths[-1])
        mode = self._word(here.flags.get("chmod", ""))
        if mode and (_MODE.fullmatch(mode) is None or (mode.isdigit() and int(mode, 8) > 0o7777)):
            raise self._refuse(f"{here.kind} --chmod={mode} is no mode", "octal such as 0644, or as chmod has it: u+x")
        made = CopyInstruction(
            tuple(path for path in paths[:-1] if not _is_remote(path)),
            target,
            origin=here.flags.get("from", ""),
            addresses=tuple(path for path in paths[:-1] if _is_remote(path) and not _GIT.fullmatch(path)),
            repositories=tuple(path for path in paths[:-1] if is_repository(path)),
            documents=tuple((item.name, self._filled(item)) for item in here.documents),
            owner=self._word(here.flags.get("chown", "")),
            mode=mode,
            parents=here.is_set("parents"),
            exclude=tuple(self._word(item) for item in here.lists.get("exclude", ())),
            unpack=here.is_set("unpack") if "unpack" in here.flags else None,
            checksum=self._word(here.flags.get("checksum", "")),
            keep_git=here.is_set("keep-git-dir"),
            add=here.kind == "ADD",
        )
        remote = [*made.addresses, *made.repositories]
        if remote and not made.add:
            raise self._refuse(f"COPY cannot fetch {remote[0]}", "ADD takes http://, https:// and git repositories")
        if any("://" in path for path in made.sources):
            wrong = next(path for path in made.sources if "://" in path)
            raise self._refuse(f"{here.kind} cannot fetch {wrong}", "ADD takes http://, https:// and git repositories")
        if made.checksum and (len(paths) != 2 or not remote):
            raise self._refuse("ADD --checksum goes with one address")
        if made.checksum and made.addresses and not _CHECKSUM.fullmatch(made.checksum):
            raise self._refuse("ADD --checksum=sha256:HEX goes with one address")
        if "$" in made.origin:
            raise self._refuse("COPY --from has no variables", "FROM the variable AS a name, and copy from that")
        return made

    def _filled(self, document: Document) -> str:
        if document.literal:
            return document.content
        try:
            return words.expand(document.content, self._before.scope, quotes=False)
        except ValueError as error:
            raise self._refuse(f"the here-document {document.name}: {error}") from None


def _is_remote(path: str) -> bool:
    return path.startswith(("http://", "https://")) or _GIT.fullmatch(path) is not None


def _joined(workdir: str, path: str) -> str:
    result = posixpath.normpath(posixpath.join("/", workdir, path))
    return result[1:] if result.startswith("//") else result


def _target(workdir: str, path: str) -> str:
    """Absolute, with a slash at the end where it is a directory."""
    slash = path.endswith("/") or posixpath.basename(path) in (".", "..", "")
    result = _joined(workdir, path)
    return result + "/" if slash and result != "/" else result


def _expand(text: str, scope: Mapping[str, str], escape: str, line: int) -> str:
    try:
        return words.expand(text, scope, escape=escape)
    except ValueError as error:
        raise Invalid(f"line {line}: {text!r}: {error}", hint="set the variable, or correct the expression") from None


def is_repository(address: str) -> bool:
    """Whether an address is that of a git repository.

    >>> is_repository("https://host/project.git#main:docker"), is_repository("./project.git")
    (True, False)
    """
    return _GIT.fullmatch(address) is not None


def _split(text: str, scope: Mapping[str, str], escape: str, line: int) -> list[str]:
    try:
        return words.split(text, scope, escape=escape)
    except ValueError as error:
        raise Invalid(f"line {line}: {text!r}: {error}", hint="set the variable, or correct the expression") from None


def _changed(config: ImageConfig, **changes: object) -> ImageConfig:
    return msgspec.structs.replace(config, **changes)
