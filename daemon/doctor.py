"""What this host can do, found out by doing it.

Guarantee: a capability reported as ``ok`` was exercised a moment ago; nothing is concluded from a version alone where
trying is possible. Probes leave nothing behind.

Levels: ``ok``; ``miss`` (required, Pagurus does not run without it); ``note`` (optional, says what is lost).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from sandbox import hints, paths
from sandbox.errors import PagurusError, Unsupported

Level = Literal["ok", "miss", "note"]


class DoctorFinding(msgspec.Struct, frozen=True):
    """doctor -> people and scripts."""

    name: str
    level: Level
    fact: str
    hint: str = ""


def examine() -> list[DoctorFinding]:
    """Run every probe. Takes a few seconds. Without the capabilities of the daemon, only the probes that need none."""
    first = _probe(*PROBES[0])
    if first.level == "ok":
        return [first, *(_probe(*row) for row in PROBES[1:])]
    return [first, *(_probe(*row) for row in PROBES[1:] if row[0] in UNPRIVILEGED)]


def sound(findings: list[DoctorFinding]) -> bool:
    """True when nothing required is missing."""
    return all(finding.level != "miss" for finding in findings)


def conclusion(findings: list[DoctorFinding]) -> str:
    """One line: ready, or what to do.

    >>> conclusion([DoctorFinding("root", "ok", ""), DoctorFinding("vllm", "note", "")])
    'ready: start the daemon with `pagurus daemon`'
    """
    missing = [finding for finding in findings if finding.level == "miss"]
    if not missing:
        return "ready: start the daemon with `pagurus daemon`"
    names = ", ".join(finding.name for finding in missing)
    first = next((finding.hint for finding in missing if finding.hint), "see above")
    if missing[0].name == "root":
        return f"not ready, {missing[0].fact}: {first}"
    return f"not ready, {names} missing: {first}, then `pagurus doctor` again"


def _probe(name: str, required: bool, work: Callable[[], str]) -> DoctorFinding:
    try:
        return DoctorFinding(name, "ok", work())
    except (OSError, PagurusError, subprocess.SubprocessError, ImportError, ValueError) as error:
        hint = getattr(error, "hint", "") or hints.parts()
        return DoctorFinding(name, "miss" if required else "note", getattr(error, "message", None) or str(error), hint)


# --------------------------------------------------------------------------- kernel


#: What the daemon needs (systemd/pagurus.service has the reason of each), by number. CAP_PERFMON, CAP_BPF and
#: CAP_CHECKPOINT_RESTORE are not among them: the kernel takes CAP_SYS_ADMIN for each, and Docker 20.10 gives no other.
CAPABILITIES = {
    21: "CAP_SYS_ADMIN",
    0: "CAP_CHOWN",
    1: "CAP_DAC_OVERRIDE",
    5: "CAP_KILL",
    6: "CAP_SETGID",
    7: "CAP_SETUID",
    8: "CAP_SETPCAP",
    12: "CAP_NET_ADMIN",
    18: "CAP_SYS_CHROOT",
    19: "CAP_SYS_PTRACE",
    27: "CAP_MKNOD",
    31: "CAP_SETFCAP",
}


def missing_capabilities(status: str) -> list[str]:
    """Those that the text of a ``/proc/PID/status`` lacks.

    >>> missing_capabilities("CapEff:\\t000001ffffdfffff\\n")
    ['CAP_SYS_ADMIN']
    >>> missing_capabilities("CapEff:\\t0000003ffeffffff\\n")  # `docker run --privileged` of Docker 20.10
    []
    """
    effective = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:"))
    return [name for number, name in CAPABILITIES.items() if not effective >> number & 1]


def check_root() -> str:
    """Whether this process may do what the daemon does. Raises Unsupported, with the way to start it."""
    missing = missing_capabilities(Path("/proc/self/status").read_text())
    if os.geteuid() != 0:
        raise Unsupported("not root", hint="run it as root or with sudo")
    if missing:
        others = f" and {len(missing) - 1} other capabilities" if missing[1:] else ""
        raise Unsupported(
            f"root without {missing[0]}{others}, as in a container without privileges",
            hint="start the container with `docker run --privileged`, or run Pagurus on the host (docs/hosts.md)",
        )
    return "running as root"


def _kernel() -> str:
    if platform.machine() != "x86_64":
        raise Unsupported(f"{platform.machine()}", hint="only x86-64 is supported")
    return f"Linux {platform.release()} on {platform.machine()}, {os.cpu_count()} cores"


def _cgroups() -> str:
    from sandbox.container.cgroup import hierarchy

    result = hierarchy()
    return "pure v2" if result.pure else "v1 controllers with a v2 hierarchy for accounting and events"


def _inspector() -> str:
    from ebpf.inspector import Inspector

    with Inspector.load() as inspector:
        lost = "; ".join(dict.fromkeys(inspector.missing.values()))
        return "loaded and attached" + (f" ({lost})" if lost else "")


# --------------------------------------------------------------------------- sandboxes


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """Where sandboxes will lie, if that is there: in a container /tmp is an overlay, which takes no part in another."""
    state = paths.state()
    directory = Path(tempfile.mkdtemp(prefix="pagurus-doctor-", dir=state if os.access(state, os.W_OK) else None))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _btrfs() -> str:
    from sandbox.tree import btrfs
    from sandbox.tree.pool import BtrfsPool

    with _scratch() as directory:
        pool = BtrfsPool(directory, size=1 << 28).ensure()
        try:
            pool.create_tree(pool.sandboxes / "probe")
            began = time.perf_counter()
            btrfs.snapshot(pool.sandboxes / "probe", pool.checkpoints / "probe", readonly=True)
            took = time.perf_counter() - began
            for item in (pool.checkpoints / "probe", pool.sandboxes / "probe"):
                btrfs.delete_subvolume(item)
        finally:
            pool.close()
    return f"a loop-mounted pool works; a snapshot took {took * 1e3:.1f} ms"


def _disk_limits() -> str:
    from sandbox.tree import btrfs
    from sandbox.tree.pool import BtrfsPool

    with _scratch() as directory:
        pool = BtrfsPool(directory, size=1 << 28).ensure()
        try:
            btrfs.enable_quota(pool.path)
        finally:
            pool.close()
    return "simple quotas of btrfs bound what a sandbox writes"


def _written_pages() -> str:
    from sandbox.criu.tracking import userfault

    if why := userfault.missing():
        raise Unsupported(why, hint="captures hold all memory: frozen time grows with it")
    return "written pages are known by userfaultfd"


def _sandbox() -> str:
    return asyncio.run(_start_one())


async def _start_one() -> str:
    """A sandbox of an empty image: its pid 1 comes from the runtime layer."""
    from sandbox.container import layer
    from sandbox.container.container import Container, ContainerSpec
    from sandbox.messages import Limits
    from sandbox.tree.pool import BtrfsPool

    await asyncio.to_thread(layer.ensure)
    with _scratch() as directory:
        pool = await asyncio.to_thread(BtrfsPool(directory, size=1 << 28).ensure)
        try:
            image, tree = directory / "image", pool.sandboxes / "probe"
            for name in ("dev", "proc", "sys", "tmp"):
                (image / name).mkdir(parents=True)
            pool.create_tree(tree)
            spec = ContainerSpec(
                id=f"doctor-{os.getpid()}",
                image=image,
                tree=tree,
                uid_base=1 << 20,
                hostname="doctor",
                limits=Limits(),
                run_dir=directory / "run",
            )
            began = time.perf_counter()
            container = await Container.create(spec)
            took = time.perf_counter() - began
            await container.destroy()
        finally:
            await asyncio.to_thread(pool.close)
    return f"user namespace, idmapped overlay, seccomp, cgroup limits: started in {took * 1e3:.0f} ms"


# --------------------------------------------------------------------------- CRIU


def _criu() -> str:
    from sandbox.criu import rpc

    done = subprocess.run([paths.criu(), "--version"], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise Unsupported(done.stderr.strip()[-200:], hint=hints.parts())
    version = done.stdout.split("Version:")[-1].split()[0]
    if tuple(int(part) for part in version.split(".")[:2]) < (4, 2):
        raise Unsupported(f"CRIU {version}", hint=f"4.2 or newer is needed: {hints.parts()}")
    rpc.messages()
    rpc.images()
    return f"CRIU {version}, with its message classes"


_LISTENER = """
import os, socket, sys
server = socket.socket(); server.bind(("127.0.0.1", 0)); server.listen()
os.write(1, str(server.getsockname()[1]).encode() + b"\\n")
null = os.open("/dev/null", os.O_RDWR); os.dup2(null, 1)
while True:
    peer, _ = server.accept(); peer.sendall(b"alive"); peer.close()
"""


def _criu_listener() -> str:
    """Dump a process that listens on TCP, which kills it; restore it; it must answer again."""
    environment = {"PATH": "/usr/bin:/bin"}
    with _scratch() as directory:
        listener = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LISTENER],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            env=environment,
        )
        assert listener.stdout is not None
        port = int(listener.stdout.readline())
        try:
            _run_criu(
                "dump", directory, "--tree", str(listener.pid), "--network-lock", "skip", "--manage-cgroups=ignore"
            )
        finally:
            listener.kill()
            listener.wait()
            listener.stdout.close()
        pidfile = directory / "restored.pid"
        _run_criu("restore", directory, "--restore-detached", "--manage-cgroups=ignore", "--pidfile", str(pidfile))
        pid = int(pidfile.read_text())
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as peer:
                answer = peer.recv(16)
        finally:
            os.kill(pid, 9)
    if answer != b"alive":
        raise Unsupported(f"the restored listener answered {answer!r}", hint=f"{hints.parts()}: CRIU 4.2 or newer")
    return "dumps and restores a TCP listener"


def _run_criu(verb: str, directory: Path, *arguments: str) -> None:
    command = [str(paths.criu()), verb, "--images-dir", str(directory), "--log-file", f"{verb}.log", *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        log = directory / f"{verb}.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else done.stderr.splitlines()
        said = [line for line in lines if "Error" in line] or lines[-1:]
        raise Unsupported(f"CRIU {verb} failed: {said[-1].strip() if said else done.returncode}", hint=hints.parts())


# --------------------------------------------------------------------------- around it


def _images() -> str:
    directory = paths.state() / "images"
    names = (
        sorted(entry.name for entry in directory.iterdir() if entry.is_dir() and entry.name[0] != ".")
        if directory.is_dir()
        else []
    )
    if not names:
        raise Unsupported("no image to start sandboxes from", hint=hints.image())
    return ", ".join(names)


def _space() -> str:
    directory = paths.state()
    while not directory.exists():
        directory = directory.parent
    free = shutil.disk_usage(directory).free
    if free < 2 << 30:
        raise Unsupported(
            f"{free >> 20} MiB free at {directory}", hint="free at least 2 GiB or set PAGURUS_STATE to another disk"
        )
    return f"{free >> 30} GiB free at {directory}"


def _pool() -> str:
    from sandbox.tree.pool import BtrfsPool

    pool, way = BtrfsPool(), "`pagurus daemon --pool-size` says another size"
    if not pool.state.is_dir():
        raise Unsupported("not made yet", hint=way)
    if not pool.mounted():
        return f"the first daemon makes one of {pool.planned() / (1 << 30):.0f} GiB; {way}"
    usage = pool.usage()
    return f"{usage.free / (1 << 30):.1f} of {usage.total / (1 << 30):.1f} GiB free; {way}"


def _network() -> str:
    from daemon.network import probe

    return probe.examine()


def _registries() -> str:
    if shutil.which("skopeo") is None:
        raise Unsupported("skopeo is missing", hint="apt-get install skopeo; needed by `pagurus image pull` only")
    done = subprocess.run(["skopeo", "--version"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "skopeo"


def _gpu() -> str:
    try:
        import torch
    except ModuleNotFoundError:
        raise Unsupported(
            "training is not installed here: no torch", hint=f"`{hints.training()}`, for `pagurus train`"
        ) from None
    if not torch.cuda.is_available():
        raise Unsupported("no GPU", hint="engine and trainer run on the CPU")
    return torch.cuda.get_device_name(0)


def _vllm() -> str:
    python = paths.CHECKOUT / ".venv-vllm" / "bin" / "python"
    if not python.exists():
        raise Unsupported("vLLM is not installed here", hint=f"{hints.vllm()}, for `--engine vllm`")
    result = next(python.parent.parent.glob("lib/python*/site-packages/vllm*.dist-info"), None)
    return result.name.removesuffix(".dist-info") if result else "vLLM's environment exists"


#: Probes that mean something without the capabilities of the daemon.
UNPRIVILEGED = {"kernel", "space", "cgroups", "images", "registries", "gpu", "vllm"}

PROBES: tuple[tuple[str, bool, Callable[[], str]], ...] = (
    ("root", True, check_root),
    ("kernel", True, _kernel),
    ("space", True, _space),
    ("pool", False, _pool),
    ("inspector", True, _inspector),
    ("cgroups", True, _cgroups),
    ("btrfs", True, _btrfs),
    ("disk limits", False, _disk_limits),
    ("sandbox", True, _sandbox),
    ("criu", True, _criu),
    ("criu tcp", True, _criu_listener),
    ("written pages", False, _written_pages),
    ("network", False, _network),
    ("images", True, _images),
    ("registries", False, _registries),
    ("gpu", False, _gpu),
    ("vllm", False, _vllm),
)
