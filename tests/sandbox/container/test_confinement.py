"""What a sandbox's processes are held to, read from the kernel while they run, and compared with Docker's defaults.

The system-call filter is read out of the running process and evaluated here call by call: what counts is what the
kernel has, not what the source says.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox import Sandbox
from sandbox.container.container import Container
from sandbox.messages import Limits
from tests.support.container_support import Maker, shell
from tests.support.daemon_host import image_tree, tasks_of

#: Docker's default profile (moby/profiles, June 2026) refuses these to a container with the default capabilities on
#: x86-64; everything above the last number it refuses as well. Name and number of each.
# fmt: off
DOCKER_REFUSES = {
    "syslog": 103, "uselib": 134, "ustat": 136, "sysfs": 139, "vhangup": 153, "pivot_root": 155, "_sysctl": 156,
    "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot":
    169, "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173, "create_module": 174,
    "init_module": 175, "delete_module": 176, "get_kernel_syms": 177, "query_module": 178, "quotactl": 179,
    "nfsservctl": 180, "getpmsg": 181, "putpmsg": 182, "afs_syscall": 183, "tuxcall": 184, "security": 185,
    "lookup_dcookie": 212, "clock_settime": 227, "vserver": 236, "mbind": 237, "set_mempolicy": 238,
    "get_mempolicy": 239, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "migrate_pages":
    256, "unshare": 272, "move_pages": 279, "perf_event_open": 298, "fanotify_init": 300, "open_by_handle_at":
    304, "setns": 308, "kcmp": 312, "finit_module": 313, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "clone3": 435, "pidfd_getfd": 438,
    "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443, "set_mempolicy_home_node": 450,
    "lsm_get_self_attr": 459, "lsm_set_self_attr": 460, "lsm_list_modules": 461, "open_tree_attr": 467,
}
# fmt: on
LAST = 467
#: Allowed for some arguments only, by Docker and by us: (call, arguments that must be refused).
DOCKER_REFUSES_ARGUMENTS = [
    (41, (38, 5, 0)),  # socket(AF_ALG)
    (41, (40, 1, 0)),  # socket(AF_VSOCK)
    *((56, (flag | 17, 0, 0)) for flag in (1 << 17, 1 << 25, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30)),  # clone
    *((135, (value, 0, 0)) for value in (0x0040000, 0x0400000, 0x0080000, 1, 0x20001)),  # personality
]
DOCKER_CAPABILITIES = 0xA80425FB
ALLOWED, ERRNO, KILLED = 0x7FFF0000, 0x00050000, 0x80000000
X86_64, I386 = 0xC000003E, 0x40000003


# ------------------------------------------------------------------ the filter, as the kernel has it


def filters_of(pid: int) -> list[bytes]:
    """The programs that a process is held to, latest first. Stops it for a moment."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]

    def ptrace(request: int, address: int, data: object) -> int:
        result = int(libc.ptrace(request, pid, address, data))
        if result < 0:
            raise OSError(ctypes.get_errno(), f"ptrace {request:#x}")
        return result

    ptrace(0x4206, 0, None)  # PTRACE_SEIZE
    try:
        ptrace(0x4207, 0, None)  # PTRACE_INTERRUPT
        os.waitpid(pid, 0x40000000)
        collected: list[bytes] = []
        with contextlib.suppress(FileNotFoundError):  # no more of them
            while status(pid)["Seccomp"].strip() == "2":
                size = ptrace(0x420C, len(collected), None)  # PTRACE_SECCOMP_GET_FILTER
                program = ctypes.create_string_buffer(8 * size)
                ptrace(0x420C, len(collected), ctypes.addressof(program))
                collected.append(program.raw)
        return collected
    finally:
        ptrace(17, 0, None)  # PTRACE_DETACH


def verdict(program: bytes, number: int, arguments: tuple[int, ...] = (), architecture: int = X86_64) -> int:
    """What a classic BPF program says of a system call."""
    padded = (*arguments, *(0 for _ in range(6 - len(arguments))))
    data = struct.pack("=IIQ6Q", number, architecture, 0, *padded)
    instructions = list(struct.iter_unpack("=HBBI", program))
    at = accumulator = 0
    while True:
        code, yes, no, value = instructions[at]
        at += 1
        match code:
            case 0x20:  # ld [k]
                (accumulator,) = struct.unpack_from("=I", data, value)
            case 0x05:  # ja
                at += value
            case 0x15 | 0x25 | 0x35 | 0x45:  # jeq, jgt, jge, jset
                met = {
                    0x15: accumulator == value,
                    0x25: accumulator > value,
                    0x35: accumulator >= value,
                    0x45: bool(accumulator & value),
                }
                at += yes if met[code] else no
            case 0x06:  # ret
                return int(value)
            case _:
                raise AssertionError(f"an instruction that this test does not know: {code:#x}")


def lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def present(*names: str) -> list[str]:
    """Those of /proc that this kernel has."""
    return [f"/proc/{name}" for name in names if Path(f"/proc/{name}").exists()]


def status(pid: int) -> dict[str, str]:
    return dict(line.split(":\t", 1) for line in lines(f"/proc/{pid}/status") if ":\t" in line)


@contextlib.contextmanager
def processes(container: Container) -> Iterator[list[int]]:
    """pid 1, and commands of the sandbox's root and of a user."""
    yield [pid for pid in container.tasks() if status(pid).get("State", "Z")[0] != "Z"]


async def started(maker: Maker) -> Container:
    container = await maker.create()
    await shell(container, "sleep 1000 </dev/null >/dev/null 2>&1 & true")
    await shell(container, "sleep 1000 </dev/null >/dev/null 2>&1 & true", uid=1000)
    return container


async def test_no_call_is_allowed_that_docker_refuses(maker: Maker) -> None:
    container = await started(maker)
    with processes(container) as pids:
        assert len(pids) >= 3
        for pid in pids:
            program, *more = filters_of(pid)
            assert not more
            for name, number in DOCKER_REFUSES.items():
                assert verdict(program, number) != ALLOWED, name
            for number, arguments in DOCKER_REFUSES_ARGUMENTS:
                assert verdict(program, number, arguments) != ALLOWED, (number, arguments)
            for number in (*range(LAST + 1, 700), 0x40000000 + 39, 0xFFFFFFFF):
                assert verdict(program, number) != ALLOWED, number
            for number in range(400):
                assert verdict(program, number, architecture=I386) == KILLED


async def test_the_evaluation_can_tell(maker: Maker) -> None:
    """A control: what a program needs is allowed, and the values that Docker allows are."""
    container = await maker.create()
    assert container.init_pid is not None
    (program,) = filters_of(container.init_pid)
    allowed = [(0, ()), (1, ()), (59, ()), (41, (2, 1, 0)), (41, (1, 1, 0)), (56, (17, 0, 0)), (135, (8, 0, 0))]
    assert {verdict(program, number, arguments) for number, arguments in allowed} == {ALLOWED}
    assert verdict(program, 435) == ERRNO | 38, "clone3 does not exist, so libraries use clone"
    assert verdict(program, 165) == ERRNO | 1


async def test_ids_capabilities_and_privileges(maker: Maker) -> None:
    container = await started(maker)
    base = container.spec.uid_base
    with processes(container) as pids:
        for pid in pids:
            held = status(pid)
            assert held["NoNewPrivs"] == "0" and held["Seccomp"] == "2"
            assert int(held["CapBnd"], 16) == DOCKER_CAPABILITIES
            for kind in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
                assert int(held[kind], 16) & ~DOCKER_CAPABILITIES == 0, kind
            for kind in ("Uid", "Gid"):
                assert all(base <= int(item) < base + 65_536 for item in held[kind].split()), kind
            assert held["Groups"].strip() == ""
            for item in ("uid_map", "gid_map"):
                assert lines(f"/proc/{pid}/{item}")[0].split() == ["0", str(base), "65536"]
            for kind in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup"):
                assert os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}"), kind


GAIN = """
cp "$(command -v id)" /tmp/rootid && chmod 4755 /tmp/rootid
cp "$(command -v cat)" /tmp/capable
python3 -c 'import os, struct
os.setxattr("/tmp/capable", "security.capability", struct.pack("<IIIII", 0x02000001, 1 << 13, 0, 0, 0))'
"""


async def test_set_user_id_and_file_capabilities_give_what_root_of_the_sandbox_has(maker: Maker) -> None:
    container = await maker.create()
    await shell(container, GAIN)
    assert await shell(container, "/tmp/rootid -u", uid=1000) == "0\n"
    assert "CapEff:\t0000000000002000" in await shell(container, "/tmp/capable /proc/self/status", uid=1000)


async def test_with_no_new_privs_they_give_nothing(maker: Maker) -> None:
    container = await maker.create(no_new_privs=True)
    await shell(container, GAIN)
    await shell(container, "sleep 1000 </dev/null >/dev/null 2>&1 & true")
    with processes(container) as pids:
        assert {status(pid)["NoNewPrivs"] for pid in pids} == {"1"}
    assert await shell(container, "/tmp/rootid -u", uid=1000) == "1000\n"
    assert "CapEff:\t0000000000000000" in await shell(container, "/tmp/capable /proc/self/status", uid=1000)


async def test_mounts_masks_and_devices(maker: Maker) -> None:
    container = await maker.create()
    mounts = [line.split() for line in (await shell(container, "cat /proc/self/mounts")).splitlines()]
    kinds = {(target, kind) for _, target, kind, *_ in mounts}
    assert {item for item in kinds if not item[0].startswith(("/proc/", "/sys/"))} == {
        ("/", "overlay"),
        ("/proc", "proc"),
        ("/dev/pts", "devpts"),
        ("/sys", "sysfs"),
    }
    masked = {target for _, target, _, options, *_ in mounts if target.startswith("/proc/")}
    for path in present("acpi", "kcore", "keys", "timer_list", "bus", "fs", "irq", "sys", "sysrq-trigger"):
        assert path in masked, path
    read_only = [options.split(",")[0] for _, target, _, options, *_ in mounts if target.startswith("/proc/")]
    assert set(read_only) == {"ro"}
    result = await shell(container, "find / -xdev \\( -type b -o -type c \\) -exec stat -c '%n %t:%T' {} +")
    nodes = result.splitlines()
    assert sorted(nodes) == [
        "/dev/full 1:7",
        "/dev/null 1:3",
        "/dev/random 1:8",
        "/dev/tty 5:0",
        "/dev/urandom 1:9",
        "/dev/zero 1:5",
    ]
    assert (await shell(container, "cat /etc/resolv.conf")).startswith("nameserver 127.0.0.53\n")


async def test_limits_hold_in_the_kernel(maker: Maker) -> None:
    limits = Limits(cpus=0.5, memory="64MiB", processes=40, open_files=128, disk="32MiB")
    container = await maker.create(limits=limits)
    assert container.init_pid is not None
    held = dict((line[:26].strip(), line[26:].split()[:2]) for line in lines(f"/proc/{container.init_pid}/limits")[1:])
    assert held["Max open files"] == ["128", "128"]
    assert held["Max core file size"] == ["1", "1"], "a core_pattern program on the host is never started"
    retained = (
        "from resource import *; import os\nsetrlimit(RLIMIT_CORE, (0, 0)); prlimit(1, RLIMIT_CPU)\n"
        "try: prlimit(0, RLIMIT_CORE, (0, 1))\nexcept PermissionError: print(getrlimit(RLIMIT_CORE))"
    )
    done = await container.exec(["python3", "-c", retained])
    assert done.stdout == b"(1, 1)\n", "with 0 it would be started after all"
    done = await container.exec(["python3", "-c", "x = bytearray(1 << 30)"], timeout=240)
    assert done.oom_killed and done.exit_code == 137
    done = await container.exec(["python3", "-c", "import os, signal\nfor _ in range(99): os.fork() or signal.pause()"])
    assert done.exit_code == 1 and b"BlockingIOError" in done.stderr


async def test_what_starts_after_a_restore_lives_beside_what_was_restored(sb: Sandbox) -> None:
    """CRIU gives a restored pid 1 a time namespace; a command outside of it could not be restored with the rest."""
    background = "sleep 1000 </dev/null >/dev/null 2>&1 & until grep -q '(sleep)' /proc/$!/stat; do :; done"
    for round in range(1, 4):
        await sb.exec(background)
        await sb.restore(await sb.checkpoint(f"round {round}"))
        await sb.exec(background)
        spaces = {os.readlink(f"/proc/{pid}/ns/time") for pid in sleepers(sb.id)}
        assert len(sleepers(sb.id)) == 2 * round and len(spaces) == 1


def sleepers(sandbox: str) -> list[int]:
    """Host pids of the sandbox's background processes."""
    result = []
    for pid in tasks_of(sandbox):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
            if Path(f"/proc/{pid}/comm").read_text() == "sleep\n":
                result.append(pid)
    return result


def test_a_filter_is_read_from_a_process_without_one() -> None:
    """A control: this process has none."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    try:
        assert filters_of(pid) == []
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def test_a_daemon_that_may_not_raise_the_core_limit_starts_sandboxes(tmp_path: Path) -> None:
    """sudo starts programs with a core limit of 0. Where no program of the host takes cores, that is as good as 1."""
    if Path("/proc/sys/kernel/core_pattern").read_text().startswith("|"):
        pytest.skip("a program of this host takes core dumps")
    program = """
import asyncio, resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
from bench.harness.own_daemon import IMAGE, BenchHost
async def main():
    async with host.client() as client, client.create(IMAGE) as sb:
        print((await sb.exec("ulimit -Hc")).text.strip())
host = BenchHost(Path(sys.argv[1]), Path(sys.argv[2]))
try:
    host.start("--pool-size", "2GiB")
    asyncio.run(main())
finally:
    host.clean()
"""
    command = [sys.executable, "-c", program, str(tmp_path / "host"), str(image_tree())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and done.stdout.strip() in ("0", "1"), done.stderr
