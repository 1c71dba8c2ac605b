"""One sandbox against the real kernel: what it is, what runs in it, how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import stat
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox import cgroup
from sandbox.cgroup import Hierarchy, hierarchy
from sandbox.container import Container, ContainerSpec
from sandbox.errors import CommandNotFound, Conflict, Invalid, SandboxDead, Unsupported
from sandbox.messages import Limits
from sandbox.process import pidfd_tells_exit
from sandbox.shim import Refused
from tests.container_support import Maker, maker, pool, shell

__all__ = ["maker", "pool"]  # fixtures

DOCKER_CAPABILITIES = "00000000a80425fb"


async def test_looks_like_a_machine_of_its_own(maker: Maker) -> None:
    sb = await maker.create(hostname="pagurus-1")
    assert (await shell(sb, "hostname")).strip() == "pagurus-1"
    assert (await shell(sb, "id -u; id -g")).split() == ["0", "0"]
    processes = (await shell(sb, "ls /proc | grep '^[0-9]' | wc -l; cat /proc/1/comm")).split()
    assert int(processes[0]) <= 6
    assert processes[1] == "init"
    assert str(os.getpid()) not in (await shell(sb, "ls /proc")).split()
    assert (await shell(sb, "cat /proc/self/uid_map")).split() == ["0", str(sb.spec.uid_base), "65536"]


async def test_confinement_as_the_kernel_reports_it(maker: Maker) -> None:
    sb = await maker.create()
    for pid in ("1", "self"):
        status = dict(line.split(":\t", 1) for line in (await shell(sb, f"cat /proc/{pid}/status")).splitlines())
        for name in ("CapPrm", "CapEff", "CapBnd"):
            assert status[name] == DOCKER_CAPABILITIES
        assert status["CapInh"] == status["CapAmb"] == "0" * 16
        assert (status["NoNewPrivs"], status["Seccomp"], status["Seccomp_filters"].strip()) == ("1", "2", "1")
    user = await shell(sb, "grep -E '^(Uid|Cap(Eff|Prm))' /proc/self/status", uid=1000)
    assert user.split() == ["Uid:", *["1000"] * 4, "CapPrm:", "0" * 16, "CapEff:", "0" * 16]


async def test_environment_is_clean(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGURUS_SECRET", "of the host")
    sb = await maker.create()
    assert await shell(sb, "cat /proc/1/environ") == ""
    names = {line.split("=")[0] for line in (await shell(sb, "env", env={"A": "1"})).splitlines()}
    assert names == {"PATH", "HOME", "A", "PWD"}


async def test_no_descriptor_of_the_host(maker: Maker) -> None:
    sb = await maker.create()
    listing = await shell(sb, "ls /proc/1/fd; ls -l /proc/self/fd")
    targets = [line.split(" -> ")[1] for line in listing.splitlines() if " -> " in line]
    assert targets[0] == "/dev/null"
    assert all(t.startswith(("pipe:", "/proc/")) for t in targets[1:])
    assert listing.splitlines()[0].startswith("total")  # pid 1 has none


async def test_mounts_are_the_overlay_proc_and_devpts(maker: Maker) -> None:
    sb = await maker.create()
    mounts = [line.split() for line in (await shell(sb, "cat /proc/self/mountinfo")).splitlines()]
    kinds = {mount[mount.index("-") + 1] for mount in mounts}
    assert kinds == {"overlay", "proc", "devpts"}
    points = {mount[4] for mount in mounts}
    assert {"/", "/proc", "/dev/pts", "/proc/sys", "/proc/keys"} <= points


async def test_root_writes_its_files_with_its_own_ids(maker: Maker) -> None:
    sb = await maker.create()
    await shell(sb, "echo hi > /root/new; chown 1000:1000 /root/new; chmod 4755 /root/new; echo x >> /etc/passwd")
    on_disk = (sb.tree / "upper/root/new").stat()
    assert (on_disk.st_uid, on_disk.st_gid, stat.S_IMODE(on_disk.st_mode)) == (1000, 1000, 0o4755)
    assert (sb.tree / "upper/etc/passwd").stat().st_uid == 0
    assert not (sb.spec.image / "root/new").exists()


async def test_files_of_both_layers_have_distinct_numbers(maker: Maker) -> None:
    sb = await maker.create()
    await shell(sb, "mkdir /many; cd /many; for i in $(seq 500); do : > f$i; done")
    numbers = (await shell(sb, "find / -xdev ! -type d -printf '%D:%i\\n' | sort | uniq -d | wc -l")).strip()
    links = (await shell(sb, "find / -xdev ! -type d -links +1 | wc -l")).strip()
    assert int(numbers) <= int(links)


async def test_loopback_and_nothing_else(maker: Maker) -> None:
    sb = await maker.create()
    script = (
        "import socket\n"
        "s=socket.create_server(('127.0.0.1',80)); c=socket.create_connection(('127.0.0.1',80))\n"
        "c.sendall(b'over loopback'); print(s.accept()[0].recv(64).decode())\n"
        "print(sorted(n for _,n in socket.if_nameindex()))\n"
        "try: socket.create_connection(('1.1.1.1',53),timeout=2)\n"
        "except OSError as e: print(e.errno)\n"
    )
    out = (await shell(sb, f'python3 -c "{script}"')).splitlines()
    assert out == ["over loopback", "['lo']", "101"]


async def test_exit_codes(maker: Maker) -> None:
    sb = await maker.create()
    for code in (0, 1, 7, 255):
        assert (await sb.exec(["sh", "-c", f"exit {code}"])).exit_code == code
    assert (await sb.exec(["sh", "-c", "kill -9 $$"])).exit_code == 137
    assert (await sb.exec(["sh", "-c", "kill -SEGV $$"])).exit_code == 139


async def test_exit_codes_where_pidfds_do_not_tell(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox.container._pidfd_tells_exit", lambda: False)
    sb = await maker.create()
    done = await sb.exec(["sh", "-c", "echo $PPID; (sleep 100 &) ; exit 7"])
    assert (done.exit_code, done.stdout) == (7, b"0\n")
    assert len(sb.tasks()) == 2
    assert (await sb.exec(["sh", "-c", "kill -9 $$"])).exit_code == 137


async def test_command_is_adopted_by_pid_1(maker: Maker) -> None:
    if not pidfd_tells_exit():
        pytest.skip("this kernel's pidfds do not tell exit codes (needs 6.15)")
    sb = await maker.create()
    pid, parent, session = (await shell(sb, "exec sh -c 'cut -d\" \" -f1,4,6 /proc/$$/stat'")).split()
    assert (parent, session) == ("1", pid)


@pytest.mark.parametrize(
    ("argv", "options", "error", "says"),
    [
        (["no-such-program"], {}, CommandNotFound, "no-such-program: no such program"),
        (["/etc/passwd"], {}, CommandNotFound, "cannot be executed"),
        (["/etc"], {}, CommandNotFound, "cannot be executed"),
        ([], {}, Invalid, "empty command"),
        (["true"], {"cwd": "/no/such"}, Invalid, "working directory /no/such"),
        (["true"], {"cwd": "/etc/passwd"}, Invalid, "working directory /etc/passwd"),
        (["true"], {"uid": 65_536}, Invalid, "no such user"),
        (["true", "a\0b"], {}, Invalid, "NUL"),
        (["true", "x" * (1 << 20)], {}, Invalid, "too long"),
        (["true", "x" * (140 << 10)], {}, Invalid, "too long"),
    ],
)
async def test_what_cannot_start(maker: Maker, argv: list[str], options: dict, error: type, says: str) -> None:
    sb = await maker.create()
    with pytest.raises(error, match=says):
        await sb.exec(argv, **options)
    assert await shell(sb, "echo still here") == "still here\n"
    assert sb.tasks() == [sb.init_pid]


async def test_stdin_and_binary_output(maker: Maker) -> None:
    sb = await maker.create()
    data = bytes(range(256)) * 4000
    assert (await sb.exec(["cat"], stdin=data, output_limit=1 << 21)).stdout == data
    assert (await sb.exec(["true"], stdin=data)).exit_code == 0  # nobody reads it
    assert (await sb.exec(["cat"])).stdout == b""  # no stdin is an empty one


async def test_huge_output_is_counted_not_kept(maker: Maker) -> None:
    sb = await maker.create()
    done = await sb.exec(["head", "-c", "100000000", "/dev/zero"], output_limit=1000)
    assert (done.exit_code, done.stdout, done.stdout_dropped) == (0, bytes(1000), 99_999_000)


async def test_output_comes_as_it_is_written(maker: Maker) -> None:
    sb = await maker.create()
    await shell(sb, "mkfifo /go")
    seen: list[tuple[str, bytes]] = []
    first = asyncio.Event()

    def take(name: str, data: bytes) -> None:
        seen.append((name, data))
        first.set()

    running = asyncio.create_task(sb.exec(["sh", "-c", "echo one; read x < /go; echo two >&2"], on_output=take))
    await first.wait()
    assert seen == [("stdout", b"one\n")]
    await shell(sb, "echo > /go")
    assert (await running).stderr == b"two\n"
    assert seen[-1] == ("stderr", b"two\n")


async def test_background_process_neither_delays_nor_dies(maker: Maker) -> None:
    sb = await maker.create()
    await shell(sb, "mkfifo /in /out")
    loop = "while read x < /in; do echo got $x; echo error $x >&2; echo $x > /out; done"
    assert await shell(sb, f"({loop}) & echo started") == "started\n"
    for word in ("a", "b", "c"):  # each writes to the pipes that exec has given up
        assert await shell(sb, f"echo {word} > /in; cat /out") == f"{word}\n"
    assert len(sb.tasks()) == 2


async def test_background_output_without_end_is_drained(maker: Maker) -> None:
    sb = await maker.create(limits=Limits(cpus=0.2))
    await shell(sb, "mkfifo /out; (head -c 20000000 /dev/zero; echo done > /out) & true")
    assert await shell(sb, "cat /out") == "done\n"


async def test_timeout_kills_what_was_started(maker: Maker) -> None:
    sb = await maker.create()
    await shell(sb, "sleep 1000 & true")
    before = set(sb.tasks())
    done = await sb.exec(["sh", "-c", "echo begun; (sleep 1001; true) & setsid sleep 1002 & sleep 1003"], timeout=0.3)
    assert (done.timed_out, done.exit_code, done.stdout) == (True, 143, b"begun\n")
    assert await _settled(sb, before) == before


async def test_cancelled_command_is_killed(maker: Maker) -> None:
    sb = await maker.create()
    begun = asyncio.Event()
    task = asyncio.create_task(sb.exec(["sh", "-c", "echo x; sleep 1000"], on_output=lambda *_: begun.set()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await _settled(sb, {sb.init_pid}) == {sb.init_pid}
    assert await shell(sb, "echo on") == "on\n"


async def test_many_at_once(maker: Maker) -> None:
    sb = await maker.create()
    done = await asyncio.gather(*(sb.exec(["sh", "-c", f"echo {n}; exit {n}"]) for n in range(40)))
    assert [(d.exit_code, d.stdout) for d in done] == [(n, b"%d\n" % n) for n in range(40)]


async def test_memory_limit_holds_and_is_reported(maker: Maker) -> None:
    sb = await maker.create(limits=Limits(memory="64MiB"))
    done = await sb.exec(["python3", "-c", "x = bytearray(200 << 20)"])
    assert (done.exit_code, done.oom_killed) == (137, True)
    assert not (await sb.exec(["true"])).oom_killed
    assert sb.alive


async def test_process_limit_holds(maker: Maker) -> None:
    sb = await maker.create(limits=Limits(processes=20))
    await sb.exec(["sh", "-c", "for i in $(seq 40); do sleep 1000 & done"])
    assert 15 < len(sb.tasks()) <= 20
    with pytest.raises(Conflict, match="all 20 are in use"):
        await sb.exec(["true"])
    await sb.kill()
    await sb.start()
    assert await shell(sb, "echo again") == "again\n"


async def test_cpu_limit_holds(maker: Maker) -> None:
    sb = await maker.create(limits=Limits(cpus=0.2))
    before = sb.cgroup.cpu_usage_usec()
    done = await sb.exec(["sh", "-c", "while :; do :; done"], timeout=1.0)
    assert done.timed_out
    assert sb.cgroup.cpu_usage_usec() - before < 0.45 * done.duration * 1e6


async def test_open_files_limit_holds(maker: Maker) -> None:
    sb = await maker.create(limits=Limits(open_files=64))
    assert (await shell(sb, "ulimit -Sn; ulimit -Hn; ulimit -n 128 || echo refused")).split() == ["64", "64", "refused"]


async def test_usage_stands_still_while_nothing_runs(maker: Maker) -> None:
    sb = await maker.create()
    await shell(sb, "sleep 1000 & true")
    other = await maker.create()
    for _ in range(20):  # until the background process has come to rest
        before = sb.cgroup.cpu_usage_usec()
        await shell(other, "true")
        if sb.cgroup.cpu_usage_usec() == before:
            break
    await shell(other, "head -c 10000000 /dev/zero | sha256sum")
    assert sb.cgroup.cpu_usage_usec() == before


async def test_dead_pid_1_is_noticed(maker: Maker) -> None:
    sb = await maker.create()
    await shell(sb, "sleep 1000 & true")
    waiting = asyncio.create_task(sb.wait_dead())
    os.kill(sb.init_pid or 0, 9)
    await waiting
    assert not sb.alive
    with pytest.raises(SandboxDead, match="pagurus restore"):
        await sb.exec(["true"])


async def test_kill_remount_start(maker: Maker) -> None:
    sb = await maker.create()
    await shell(sb, "echo first > /mark; sleep 1000 & true")
    await sb.kill()
    assert (sb.alive, sb.tasks(), sb.init_pid) == (False, [], None)
    await sb.remount(maker.tree(f"{sb.spec.id}-2"))
    await sb.start()
    assert await shell(sb, "cat /mark 2>&1 || true") == "cat: /mark: No such file or directory\n"
    await sb.kill()
    await sb.kill()  # nothing left: nothing to do


async def test_adoption_after_the_daemon_died(maker: Maker) -> None:
    sb = await maker.create()
    await shell(sb, "mkfifo /in /out; (while read x < /in; do echo to nobody; echo $x > /out; done) & true")
    assert sb._shim is not None
    sb._shim.close()  # what a killed daemon looks like to the shim
    adopted = await Container.adopt(sb.spec)
    maker.made.append(adopted)
    assert adopted.init_pid == sb.init_pid
    assert await shell(adopted, "echo word > /in; cat /out") == "word\n"
    await adopted.destroy()
    with pytest.raises(SandboxDead):
        await Container.adopt(sb.spec)


async def _settled(sb: Container, wanted: set[int | None]) -> set[int | None]:
    """The sandbox's processes, once they are `wanted`: a killed one takes a moment to die, and pid 1 to reap it."""
    deadline = time.monotonic() + 20
    while True:
        seen: set[int | None] = {pid for pid in sb.tasks() if not _zombie(pid)}
        if seen == wanted or time.monotonic() > deadline:
            return seen
        await asyncio.sleep(0.01)


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture(params=["as it is", "pure v2"])
def either_hierarchy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The host's hierarchy, and the same host seen as pure v2 (its controllers, here in v1, then do nothing)."""
    if request.param == "pure v2" and not hierarchy().pure:
        pure = Hierarchy(hierarchy().unified)
        monkeypatch.setattr(cgroup, "hierarchy", lambda: pure)
        monkeypatch.setattr(cgroup, "V2_CONTROLLERS", ())
        monkeypatch.setattr(cgroup.Cgroup, "apply", lambda self, limits: None)
        monkeypatch.setattr(cgroup.Cgroup, "oom_kills", lambda self: 0)
        cgroup.prepare_host.cache_clear()
    yield request.param
    cgroup.prepare_host.cache_clear()


async def _host_output(sb: Container, argv: list[str], **options: object) -> str:
    reading, writing = os.pipe()
    try:
        pid = await sb.spawn_host(argv, stderr=writing, **options)  # type: ignore[arg-type]
        assert await sb.host_exited(pid) == 0
    finally:
        os.close(writing)
        text = _read_all(reading)
    return text


def _read_all(fd: int) -> str:
    with open(fd) as file:
        return file.read()


async def test_host_program_outside_the_groups(maker: Maker, either_hierarchy: str) -> None:
    sb = await maker.create()
    script = "cat /proc/self/cgroup; readlink /proc/self/ns/net /proc/self/ns/ipc /proc/self/ns/pid; ls /proc/self/fd"
    out = await _host_output(sb, ["/bin/sh", "-c", script], in_cgroup=False, join=("net", "ipc"))
    assert sb.spec.id not in out
    for name, same in (("net", True), ("ipc", True), ("pid", False)):
        assert (os.readlink(f"/proc/{sb.init_pid}/ns/{name}") in out) is same
    assert "memory:/pagurus\n" in out or hierarchy().pure or either_hierarchy == "pure v2"
    assert await shell(sb, "echo well") == "well\n"


async def test_host_program_inside_the_groups(maker: Maker, either_hierarchy: str) -> None:
    sb = await maker.create()
    script = "hostname; readlink /proc/self/ns/ipc /proc/self/ns/uts; cat /proc/self/cgroup"
    out = await _host_output(sb, ["/bin/sh", "-c", script], in_cgroup=True)
    assert out.startswith("crab\n")
    assert not any(
        os.readlink(f"/proc/{pid}/ns/{name}") in out for pid in ("self", sb.init_pid) for name in ("ipc", "uts")
    )
    assert f"0::/pagurus/{sb.spec.id}\n" in out
    if not hierarchy().pure and either_hierarchy == "as it is":
        assert f"memory:/pagurus/{sb.spec.id}\n" in out


async def test_host_program_gets_its_descriptors(maker: Maker, tmp_path: Path) -> None:
    sb = await maker.create()
    (tmp_path / "a").write_text("first")
    (tmp_path / "b").write_text("second")
    fds = [os.open(tmp_path / name, os.O_RDONLY) for name in ("a", "b")]
    try:
        script = "cat <&3; cat <&4; ls /proc/self/fd"
        out = await _host_output(sb, ["/bin/sh", "-c", script], in_cgroup=False, fds=fds)
    finally:
        for fd in fds:
            os.close(fd)
    assert out.startswith("firstsecond")
    assert set(out.removeprefix("firstsecond").split()) == {"0", "1", "2", "3", "4", "5"}  # 5: ls itself
    with pytest.raises(Refused, match="exec"):
        await sb.spawn_host(["/no/such/program"], in_cgroup=False)


async def test_sink_swallows(maker: Maker) -> None:
    sb = await maker.create()
    fd = await sb.sink()
    try:
        for _ in range(100):
            await asyncio.to_thread(os.write, fd, bytes(1 << 16))
    finally:
        os.close(fd)


_DAEMON = """
import asyncio, pickle, sys
from sandbox.container import Container
async def main():
    sb = await Container.adopt(pickle.loads(sys.stdin.buffer.read()))
    print("adopted", flush=True)
    script = "head -c 3000000 /dev/zero; echo > /half; cat /go; head -c 3000000 /dev/zero; echo survived > /out"
    await sb.exec(["sh", "-c", script])
asyncio.run(main())
"""


async def test_commands_outlive_a_killed_daemon(maker: Maker) -> None:
    sb = await maker.create()
    await shell(sb, "mkfifo /half /go /out")
    assert sb._shim is not None
    sb._shim.close()
    daemon = await asyncio.create_subprocess_exec(sys.executable, "-c", _DAEMON, stdin=PIPE, stdout=PIPE)
    assert daemon.stdin is not None and daemon.stdout is not None
    daemon.stdin.write(pickle.dumps(sb.spec))
    daemon.stdin.close()
    assert await daemon.stdout.readline() == b"adopted\n"
    assert sb.init_pid is not None
    half = Path(f"/proc/{sb.init_pid}/root/half")
    assert await asyncio.to_thread(half.read_bytes) == b"\n"
    daemon.kill()
    await daemon.wait()
    adopted = await Container.adopt(sb.spec)
    maker.made.append(adopted)
    assert await shell(adopted, "echo > /go; cat /out") == "survived\n"


def _traces(name: str, run_dir: Path) -> list[str]:
    """Whatever a sandbox could leave behind on the host."""
    host = hierarchy()
    found = [str(m / "pagurus" / name) for m in (host.unified, *host.v1.values()) if (m / "pagurus" / name).exists()]
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if name in line]
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and not _zombie(int(entry.name)):
            with contextlib.suppress(OSError):
                if name in Path(entry.path, "cgroup").read_text() or name in Path(entry.path, "mountinfo").read_text():
                    found.append(entry.path)
    return found + ([str(run_dir)] if run_dir.exists() else [])


async def test_destroy_leaves_nothing(maker: Maker) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    sb = await maker.create()
    await shell(sb, "sleep 1000 & setsid sleep 1001 & true")
    assert _traces(sb.spec.id, sb.spec.run_dir)
    await sb.destroy()
    assert _traces(sb.spec.id, sb.spec.run_dir) == []
    await sb.destroy()
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("broken", ["image", "tree", "uid_base", "run_dir"])
async def test_create_is_all_or_nothing(maker: Maker, tmp_path: Path, broken: str) -> None:
    spec = maker.spec()
    fields = {name: getattr(spec, name) for name in spec.__dataclass_fields__}
    fields[broken] = {"image": Path("/no/image"), "tree": tmp_path, "uid_base": 0, "run_dir": Path("/proc/no")}[broken]
    bad = ContainerSpec(**fields)
    with pytest.raises((Unsupported, Invalid, OSError)):
        await Container.create(bad)
    assert _traces(bad.id, bad.run_dir) == []
    good = await Container.create(spec)
    maker.made.append(good)
    with pytest.raises(Conflict):
        await Container.create(spec)
    assert await shell(good, "echo unharmed") == "unharmed\n"


async def test_killed_shim_is_cleaned_up(maker: Maker) -> None:
    sb = await maker.create()
    await shell(sb, "sleep 1000 & true")
    os.kill(sb._shim_pid, 9)
    await sb.destroy()
    assert _traces(sb.spec.id, sb.spec.run_dir) == []


async def test_disk_limit_holds(maker: Maker) -> None:
    sb = await maker.create(limits=Limits(disk="20MiB"))
    done = await sb.exec(["sh", "-c", "head -c 60000000 /dev/urandom > /big; sync; stat -c %s /big; echo more > /x"])
    assert b"Disk quota exceeded" in done.stderr
    assert int(done.stdout) <= 20 << 20
    other = await maker.create()
    assert await shell(other, "head -c 40000000 /dev/urandom > /big; stat -c %s /big") == "40000000\n"
    await sb.kill()
    await sb.remount(maker.tree(f"{sb.spec.id}-2"))
    await sb.start()
    done = await sb.exec(["sh", "-c", "head -c 60000000 /dev/urandom > /big"])
    assert b"Disk quota exceeded" in done.stderr


async def test_command_cancelled_while_it_starts_is_killed(maker: Maker) -> None:
    sb = await maker.create()
    for _ in range(5):
        task = asyncio.create_task(sb.exec(["sleep", "1000"]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await _settled(sb, {sb.init_pid}) == {sb.init_pid}


async def test_unreachable_shim_is_cleaned_up(maker: Maker, either_hierarchy: str) -> None:
    sb = await maker.create()
    await shell(sb, "sleep 1000 & true")
    shim_pid = sb._shim_pid
    assert sb._shim is not None
    sb._shim.close()
    (sb.spec.run_dir / "shim.sock").unlink()
    lost = Container(sb.spec)
    await lost.destroy()
    assert _zombie(shim_pid)
    assert _traces(sb.spec.id, sb.spec.run_dir) == []
