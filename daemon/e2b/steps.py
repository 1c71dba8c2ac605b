"""The steps of an E2B template as a Dockerfile. Pure: no I/O.

Guarantee: no text of a step becomes an instruction of its own, and none is expanded: what a client sends is quoted, or
refused.

Commands run as ``user`` in /home/user, as with E2B, until a step says otherwise; both are made where an image has none.
What COPY takes was uploaded as an archive: each is a stage of its own, so that it is unpacked by the rules of ADD.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from sandbox.errors import Invalid, Unsupported

START, TEMPLATE, CPUS, MEMORY = "e2b.start", "e2b.template", "e2b.cpus", "e2b.memory"  # labels of the image
USER, HOME = "user", "/home/user"
BASES = ("e2bdev/base", "e2bdev/code-interpreter")  # images of E2B that clients name unasked
SHELL = 'if [ -x /bin/bash ]; then exec /bin/bash -l -c "$0"; else exec /bin/sh -c "$0"; fi'
MAKE_USER = (
    "id user >/dev/null 2>&1 || useradd -m -s /bin/bash user || adduser -D -h /home/user user; "
    "mkdir -p /home/user && chown user: /home/user; "
    "if [ -d /etc/sudoers.d ]; then echo 'user ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/user; fi"
)
Value = Any  # of a field that is refused by its name, whatever it holds
FilesHash = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class Step(msgspec.Struct, kw_only=True):
    type: Literal["RUN", "COPY", "ENV", "WORKDIR", "USER"]
    args: list[str] = []
    force: bool = False
    filesHash: FilesHash | None = None


class BuildBody(msgspec.Struct, kw_only=True):
    """Client -> daemon: POST /v2/templates/{template}/builds/{build}"""

    fromImage: str | None = None
    fromTemplate: str | None = None
    fromImageRegistry: Value = None
    force: bool = False
    steps: Annotated[list[Step], msgspec.Meta(max_length=500)] = []
    startCmd: str | None = None
    readyCmd: str | None = None


@dataclass(frozen=True, kw_only=True)
class StartState:
    """What runs in sandboxes of a template from their beginning."""

    command: str
    ready: str = ""

    @property
    def label(self) -> str:
        raw = json.dumps([self.command, self.ready]).encode()
        return base64.urlsafe_b64encode(raw).decode()

    @classmethod
    def of(cls, labels: Mapping[str, str]) -> StartState | None:
        """Raises Invalid for a label of another form: an image may be anybody's.

        >>> StartState.of({START: StartState(command="sleep 1").label})
        StartState(command='sleep 1', ready='')
        """
        if START not in labels:
            return None
        try:
            command, ready = msgspec.json.decode(base64.urlsafe_b64decode(labels[START]), type=tuple[str, str])
        except ValueError as error:
            raise Invalid(f"the image's label {START} is none of a template: {error}", hint="build it again") from None
        return cls(command=command, ready=ready)


@dataclass(frozen=True)
class BuildText:
    text: str
    first_lines: list[int]  # of each step, the line with which it begins
    hashes: list[str]  # of the archives that it needs


def written(
    build: BuildBody, *, base: str, user: str = "", workdir: str = "/", labels: Mapping[str, str] | None = None
) -> BuildText:
    """The Dockerfile of a build. `user`, `workdir`: of a template that it begins with; "": it begins with an image."""
    if build.fromImageRegistry:
        raise Unsupported("fromImageRegistry: not served here", hint="pull the image by `pagurus image pull` first")
    hashes = list(dict.fromkeys(_hash(step) for step in build.steps if step.type == "COPY"))
    lines = [line for number in hashes for line in (f"FROM scratch AS f{number}", f"ADD {number} /")]
    lines.append(f"FROM {_plain(base)}")
    if not user:
        lines += ["USER root", f"RUN {json.dumps(['/bin/sh', '-c', MAKE_USER])}"]
        user, workdir = USER, HOME
    lines += [f"USER {_plain(user)}", f"WORKDIR {_line(workdir)}"]
    first_lines = []
    for step in build.steps:
        first_lines.append(len(lines) + 1)
        made, user = _written(step, user)
        lines += made
    start = StartState(command=build.startCmd, ready=build.readyCmd or "") if build.startCmd else None
    reported = {**(labels or {}), TEMPLATE: "yes", START: start.label if start else ""}
    lines += [f"LABEL {name}={_quoted(value)}" for name, value in reported.items() if value]
    return BuildText("\n".join(lines) + "\n", first_lines, hashes)


def _hash(step: Step) -> str:
    if step.filesHash is None:
        raise Invalid("a COPY without filesHash", hint="build with the client of E2B, which uploads the files first")
    return step.filesHash


def _written(step: Step, user: str) -> tuple[list[str], str]:
    """The lines of a step, and who the next one runs as."""
    args = step.args
    if step.type == "RUN" and len(args) in (1, 2):
        who = args[1] if len(args) == 2 and args[1] else user
        return [f"USER {_plain(who)}", f"RUN {json.dumps(['/bin/sh', '-c', SHELL, args[0]])}", f"USER {user}"], user
    if step.type == "COPY" and len(args) >= 2:
        owner = args[2] if len(args) > 2 and args[2] else user
        mode = f"--chmod={_plain(args[3])} " if len(args) > 3 and args[3] else ""
        source = "/" + args[0].removeprefix("./").strip("/")
        paths = json.dumps([_line(source if source != "/." else "/"), _line(args[1])])
        return [f"COPY --from=f{_hash(step)} --chown={_plain(owner)} {mode}{paths}"], user
    if step.type == "ENV" and args and len(args) % 2 == 0:
        pairs = zip(args[::2], args[1::2], strict=True)
        return [f"ENV {_plain(name)}={_quoted(value)}" for name, value in pairs], user
    if step.type == "WORKDIR" and len(args) == 1:
        return [f"WORKDIR {_line(args[0])}"], user
    if step.type == "USER" and len(args) == 1:
        return [f"USER {_plain(args[0])}"], args[0]
    raise Invalid(f"{step.type} with {len(args)} arguments", hint="see GET /e2b/openapi.json")


def _plain(word: str) -> str:
    """A word in which nothing means anything to a Dockerfile."""
    if not word or not all(character.isalnum() or character in "._-:/@+" for character in word):
        raise Invalid(f"{word[:100]!r} cannot be taken here", hint="letters, digits and ._-:/@+")
    return word


def _line(text: str) -> str:
    """The rest of a line, of which nothing is expanded."""
    if not text or any(ord(character) < 32 for character in text):
        raise Invalid(f"{text[:100]!r} cannot be taken as a path", hint="name a path below the directory of the build")
    return text.replace("\\", "\\\\").replace("$", "\\$")


def _quoted(text: str) -> str:
    """
    >>> _quoted('a "b" $c')
    '"a \\\\"b\\\\" \\\\$c"'
    """
    if any(ord(character) < 32 and character != "\t" for character in text):
        raise Invalid(f"a value of several lines: {text[:100]!r}", hint="write it into a file by COPY")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$") + '"'
