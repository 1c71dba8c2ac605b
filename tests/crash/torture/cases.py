"""Cases: which operations run, before the mark and after it, by whom and where.

A case of the matrix is a call with an outcome (native/matrix_*.h says which), an actor and a place. Calls that act on
processes have no place.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.crash.torture.enter import NATIVE, WAYS, compiled

SCRATCH = "/bind"  # where a sandbox has a scratch mount, if it has one


@dataclass(frozen=True)
class Place:
    """A directory in which cases act, and what is mounted there.

    `kind`: "" nothing, it is the sandbox's own tree; "scratch" and "read-only" what the daemon mounts for its users
    (daemon/host/mounts.py); "tmpfs" and "bind" (of the tree) what the host mounts from inside, as a sandbox itself may
    not.
    """

    name: str
    path: str
    kind: str = ""
    thorough: bool = True  # every actor makes every call there; else only `setns`, of which no filter refuses any

    @property
    def made_at(self) -> str:
        """Where the state is made that cases start from: what is read-only here can be written there."""
        return SCRATCH if self.kind == "read-only" else self.path


WORK = Place("overlay upper", "/work")
SHARED = "/dev/shm"  # a directory of the runtime layer: what a sandbox writes there lies in its upper
PLACES = {
    place.name: place
    for place in (
        WORK,
        Place("tmpfs", "/tmpfs", "tmpfs"),
        Place("bind mount", SCRATCH, "scratch"),
        Place("/dev/shm", SHARED),
        Place("bind of the tree", "/bound", "bind"),
        Place("tmpfs at /dev/shm", SHARED, "tmpfs", thorough=False),
        Place("read-only bind", "/data", "read-only", thorough=False),
    )
}
# Who makes the call: (way into the sandbox, part of the program).
ACTORS = {
    "main": ("exec", "main"),
    "child": ("exec", "child"),
    "thread": ("exec", "thread"),
    "child cgroup": ("nested", "main"),
    "setns": ("setns", "main"),
}
_MOVING = {"directory_time": "full", "fifo_time": "fifo"}  # parts of operations' names, and what they act on
_LEAVING_NONE = (".failed", ".zero", ".orphan")


@dataclass(frozen=True)
class Case:
    """Operations before the mark, and after it."""

    name: str
    program: tuple[str, ...]
    setup: tuple[str, ...] = ()
    way: str = "exec"  # exec: by the daemon's own way; or one of _torture_enter.WAYS
    place: Place = WORK
    group: int = -1  # of the random programs of one series, between which nothing is reset; -1: none

    @property
    def sets_times(self) -> bool:
        """Whether it sets modification times on purpose, of what stays."""
        return any("time" in word and not word.endswith(_LEAVING_NONE) and "fail_" not in word for word in self.program)

    @property
    def sets_moving_times(self) -> tuple[str, ...]:
        """Names whose times it sets, where such times also move by themselves."""
        return tuple(name for word, name in _MOVING.items() if any(word in item for item in self.program))

    @property
    def sets_back(self) -> bool:
        """Whether it undoes a change of something that was there before."""
        return any(word.endswith(".restored") for word in self.program)


def build(directory: Path) -> Path:
    """An image with nothing but the static generator and some files to copy up."""
    image = directory / "image"
    places = [place.path[1:] for place in PLACES.values()]
    for name in (*places, "lower/d", "proc", "dev", "tmp", "root", "etc", "sys"):
        (image / name).mkdir(parents=True, exist_ok=True)
    for name in ("file", "two", "three", "gone", "moved", "d/x"):
        (image / "lower" / name).write_text("a line of the image\n")
    (image / "lower" / "page").write_bytes(b"P" * 4096)
    compiled("effects.c", image / "effects")
    return image


def operations() -> dict[str, list[str]]:
    """Names of all operations, by the section of operations.h that they stand in."""
    sections: dict[str, list[str]] = {}
    for line in (NATIVE / "operations.h").read_text().splitlines():
        if line.startswith("/* --- "):
            current = sections.setdefault(line[7:].partition(":")[0].partition(" */")[0].partition(",")[0], [])
        elif line.startswith("OP(") and sections:
            current.append(line[3:].partition(",")[0])
    return sections


# --------------------------------------------------------------------------- operations alone

_SETUPS = {
    "kill_survivor": ["start_survivor", "start_server"],
    "stop_survivor": ["start_survivor"],
    "signal_survivor": ["start_survivor", "start_signal_taker", "start_signal_blocker"],
    "signal_survivor_0": ["start_survivor"],
    "write_survivor_memory": ["start_survivor"],
    "write_survivor_mem_file": ["start_survivor"],
    "renice_survivor": ["start_survivor"],
    "limit_survivor": ["start_survivor"],
    "pin_survivor": ["start_survivor"],
    "read_survivor": ["start_survivor"],
    "read_survivor_memory": ["start_survivor"],
    "fill_fifo": ["start_fifo_holder", "start_fifo_reader", "start_mapper"],
    "connect_server": ["start_server"],
    "connect_deaf_server": ["start_deaf_server"],
    "remove_ipc": ["store_shm_segment", "make_semaphores", "send_message"],
    "store_shm_segment": ["store_shm_segment"],
    "make_semaphores": ["make_semaphores"],
    "send_message": ["send_message"],
}


def cases() -> Iterator[Case]:
    """Every operation, by the main thread, a child and a second thread; alone and beside a survivor."""
    sections = operations()
    for section in ("nothing", "failures", "made and gone again", "content", "names", "metadata"):
        for name in sections[section]:
            for who in ("main", "child", "thread"):
                yield Case(f"{section}: {name} by {who}", (f"{who}:{name}",))
            if section in ("nothing", "made and gone again"):
                yield Case(f"{section}: {name} beside a survivor", (name,), ("start_survivor",))
    for name in sections["processes"]:
        if name in ("kill_all",):
            continue
        yield Case(f"processes: {name}", (name,))
        for setup in _SETUPS.get(name, ()):
            yield Case(f"processes: {name} after {setup}", (name,), (setup,))
    yield Case("content: aio_write_nocow to a file that was there", ("aio_write_nocow",), ("make_nocow",))
    yield Case("processes: nothing beside a spinner", ("nothing",), ("start_spinner",))
    yield Case("processes: nothing beside a mapper", ("nothing",), ("start_mapper",))
    yield Case("processes: kill all", ("kill_all",), ("start_survivor", "survive_quietly"))


# --------------------------------------------------------------------------- the matrix


@dataclass(frozen=True)
class Call:
    """A line of `effects --list`."""

    family: str
    name: str
    outcome: str
    setup: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        return f"{self.name}.{self.outcome}"


def calls(image: Path) -> list[Call]:
    """All calls of the generator, by outcome."""
    done = subprocess.run([str(image / "effects"), "--list"], capture_output=True, text=True, check=True)
    result = []
    for line in done.stdout.splitlines():
        family, name, outcome, *setup = line.split()
        result.append(Call(family, name, outcome, tuple(setup)))
    return result


def matrix(result: list[Call]) -> Iterator[Case]:
    """Each call x outcome x actor x place, and mappings that are older than the mark in each place.

    Sorted by place, because all cases of a place run in the same sandbox.
    """
    yield from _process_cases(result)
    for place in PLACES.values():
        for call in result:
            if call.family == "processes" or (call.family == "shared" and place.path != SHARED):
                continue
            for actor in ACTORS if place.thorough else ("setns",):
                way, part = ACTORS[actor]
                yield Case(f"{call.word} by {actor} in {place.name}", (f"{part}:{call.word}",), (), way, place)
        if place.kind != "read-only":
            for way in ("exec", *WAYS):
                name = f"store through a mapping made before the mark, by {way}, in {place.name}"
                yield Case(name, ("fill_fifo",), ("start_mapper",), way, place)
        yield from other_kinds(place)
    for call in result:
        if call.family not in ("processes", "shared") and call.outcome in ("created", "changed"):
            yield Case(f"{call.word} by a moved process in overlay upper", ("--wait", call.word), (), "moved")


def other_kinds(place: Place) -> Iterator[Case]:
    """Metadata of directories, FIFOs and symbolic links by each actor; and files that lost their names."""
    for word in operations()["metadata of other kinds"]:
        for actor, (way, part) in ACTORS.items():
            yield Case(f"{word} by {actor} in {place.name}", (f"{part}:{word}",), (), way, place)
    if place is WORK or place.kind == "read-only":
        return
    for call in ("kept_file_write", "kept_file_truncate", "kept_file_store"):
        yield Case(f"{call} in {place.name}", (f"main:{call}.changed",), ("start_keeper",), "setns", place)


def _process_cases(result: list[Call]) -> Iterator[Case]:
    for call in result:
        if call.family == "processes":
            for actor, (way, part) in ACTORS.items():
                yield Case(f"{call.word} by {actor}", (f"{part}:{call.word}",), call.setup, way)
