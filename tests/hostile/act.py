"""Hostile acts: what a sandbox's root may try against the host, its neighbours and its own keepers.

Guarantee: an act counts as contained only if it was really tried: its program must report each attempt.

A program is Python, run as the sandbox's root with `ATTEMPT` before it. It prints ``tried`` for each attempt and
``BREACH ...`` for each that worked.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from bench.harness.own_internet import Internet
from daemon.network.networks import Networks
from sandbox.container.container import Container
from sandbox.messages import ExecResult, Limits, Network

ATTEMPT = """
import ctypes, errno, os, socket, struct, sys, mmap, resource, signal, time
REFUSALS = ("EPERM", "EACCES", "ENOSYS", "EAFNOSUPPORT")
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def syscall(what, number, *args):
    ctypes.set_errno(0)
    r = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    e = errno.errorcode.get(ctypes.get_errno(), 0)
    print("tried", what, e, flush=True)
    if r >= 0 or e not in REFUSALS: print("BREACH", what, r, e, flush=True)
def attempt(what, function, *args, **named):
    try: r = function(*args, **named)
    except (OSError, PermissionError, ValueError) as e: print("tried", what, type(e).__name__, e, flush=True)
    else: print("tried", what, flush=True); print("BREACH", what, repr(r)[:80], flush=True)
def write(path, text="1"):
    with open(path, "w") as f: f.write(text)
def read(path, mode="rb"):
    with open(path, mode) as f: return f.read(64)
"""


@dataclass
class Scene:
    """Where an act takes place."""

    attacker: Container
    neighbour: Container
    host_port: int  # a TCP listener on every address of the host and, by the same number, its abstract Unix socket
    secret: Path  # a file of the host
    place: Place | None = None  # of acts with a network
    travel: Callable[[], Awaitable[None]] | None = None  # checkpoint, kill and restore the attacker
    fork: Callable[[], Awaitable[None]] | None = None  # checkpoint the attacker, and make a sandbox of that


@dataclass
class Place:
    """Where attacker and neighbour have their networks."""

    networks: Networks
    internet: Internet
    attacker: str  # addresses
    neighbour: str


Check = Callable[[Scene], Awaitable[str]]  # "" when contained, else what went wrong


MODEST = Limits(memory="256MiB", processes=64, cpus=1)


@dataclass(frozen=True)
class Act:
    name: str
    check: Check
    limits: Limits = MODEST
    network: Network | None = None  # the attacker's; the neighbour's is then open


ACTS: list[Act] = []


def judge(done: ExecResult, *, tried: int = 1) -> str:
    """What a finished program says about its attempts."""
    out = done.stdout.decode("utf-8", "replace")
    breaches = [line for line in out.splitlines() if line.startswith("BREACH")]
    if breaches:
        return "; ".join(breaches)[:300]
    if out.count("tried") < tried:
        return f"was not tried: exit {done.exit_code}, {done.stderr[-200:]!r}"
    return ""


def program(
    name: str,
    code: str,
    *,
    uid: int = 0,
    limits: Limits = MODEST,
    network: Network | None = None,
    then: Check | None = None,
) -> None:
    """An act that is one Python program; `then` looks at the world afterwards.

    ``{neighbour}``, ``{me}`` and ``{port}`` in the code of an act with a network stand for what they say.
    """

    async def check(scene: Scene) -> str:
        done = await run(scene, code, timeout=20, uid=uid)
        return judge(done) or (await then(scene) if then is not None else "")

    ACTS.append(Act(name, check, limits, network))


def act(name: str, limits: Limits = MODEST, network: Network | None = None) -> Callable[[Check], Check]:
    """An act that needs more than one program."""

    def register(check: Check) -> Check:
        ACTS.append(Act(name, check, limits, network))
        return check

    return register


async def unharmed(scene: Scene) -> str:
    """The neighbour still works, and so does a new command in the attacker once it is killed and started."""
    done = await scene.neighbour.exec(["echo", "well"], timeout=10)
    if done.stdout != b"well\n":
        return f"the neighbour was harmed: {done}"
    await scene.attacker.kill()
    if scene.attacker.tasks():
        return "processes survived the kill"
    return ""


async def run(scene: Scene, code: str, timeout: float = 5, uid: int = 0) -> ExecResult:
    """Run a program as the attacker, with `ATTEMPT` before it."""
    if scene.place is not None:
        for name, value in (("neighbour", scene.place.neighbour), ("me", scene.place.attacker)):
            code = code.replace("{" + name + "}", value)
        code = code.replace("{port}", str(scene.host_port))
    return await scene.attacker.exec(["python3", "-c", ATTEMPT + code], timeout=timeout, uid=uid)


def host_socket() -> tuple[list[socket.socket], int]:
    """A TCP listener on all of the host's addresses and an abstract Unix socket, as targets."""
    tcp = socket.create_server(("0.0.0.0", 0))
    port = tcp.getsockname()[1]
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0pagurus-{port}")
    abstract.listen()
    return [tcp, abstract], port
