"""One sandbox against the real kernel: what it is, and what its limits hold."""

from __future__ import annotations

import asyncio
import os
import stat

import pytest

from sandbox.container import users
from sandbox.errors import Conflict
from sandbox.messages import Limits
from sandbox.tree import files
from tests.support.container_support import Maker, shell
from tests.support.daemon_host import ASLEEP

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


@pytest.mark.parametrize("no_new_privs", [False, True])
async def test_confinement_as_the_kernel_reports_it(maker: Maker, no_new_privs: bool) -> None:
    sb = await maker.create(no_new_privs=no_new_privs)
    for pid in ("1", "self"):
        status = dict(line.split(":\t", 1) for line in (await shell(sb, f"cat /proc/{pid}/status")).splitlines())
        for name in ("CapPrm", "CapEff", "CapBnd"):
            assert status[name] == DOCKER_CAPABILITIES
        assert status["CapInh"] == status["CapAmb"] == "0" * 16
        assert status["NoNewPrivs"] == str(int(no_new_privs))
        assert (status["Seccomp"], status["Seccomp_filters"].strip()) == ("2", "1")
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


async def test_mounts_are_the_overlay_and_the_kernels_own(maker: Maker) -> None:
    sb = await maker.create()
    mounts = [line.split() for line in (await shell(sb, "cat /proc/self/mountinfo")).splitlines()]
    kinds = {mount[mount.index("-") + 1] for mount in mounts}
    # On a host with v1 control groups their mount points lie in a directory of the run directory's file system.
    assert {"overlay", "proc", "devpts", "sysfs"} <= kinds
    alongside = {mount[4] for mount in mounts if mount[mount.index("-") + 1] not in ("overlay", "proc", "devpts")}
    assert all(point == "/sys" or point.startswith("/sys/fs/cgroup") for point in alongside)
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


async def test_usage_stands_still_while_nothing_runs(maker: Maker) -> None:
    sb = await maker.create()
    await shell(sb, f"sleep 1000 & {ASLEEP}")
    other = await maker.create()
    before = -1
    while before != sb.cgroup.cpu_usage_usec():  # until pid 1 has reaped what came to its end
        before = sb.cgroup.cpu_usage_usec()
        await shell(other, "sleep 0.1")
    await shell(other, "head -c 10000000 /dev/zero | sha256sum")
    assert sb.cgroup.cpu_usage_usec() == before


async def test_a_file_is_replaced_by_one_that_differs_in_its_content_alone(maker: Maker) -> None:
    container = await maker.create()
    base, inside = container.spec.uid_base, container.inside
    made = "cd /srv && echo old >f && chown 7:8 f && chmod 4751 f && ln -s f l && echo other >n && ln n m"
    assert (await container.exec(["sh", "-c", made])).exit_code == 0
    for path in ("/srv/f", "/srv/l", "/srv/n", "/srv/new"):
        await asyncio.to_thread(files.replace, inside, base, path, b"changed\n")
    shown = "cd /srv && stat -c '%n %u:%g %a' * && cat f l m n new"
    result = await container.exec(["sh", "-c", shown])
    # The link was followed: it changed /srv/f. /srv/m keeps what the other name had.
    listed = ["f 7:8 4751", "l 0:0 777", "m 0:0 644", "n 0:0 644", "new 0:0 644"]
    assert result.stdout.decode().splitlines() == [*listed, "changed", "changed", "other", "changed", "changed"]


async def test_a_user_is_added_once_and_what_lies_in_his_home_is_his(maker: Maker) -> None:
    sb = await maker.create()
    look = (
        "id -u user; stat -c %U /home/user /home/user/deep /home/user/deep/link; grep -c ^user: /etc/passwd /etc/group"
    )
    seen = ["1000", "user", "user", "user", "/etc/passwd:1", "/etc/group:1"]
    await shell(sb, "mkdir -p /home/user/deep && ln -s /etc/passwd /home/user/deep/link")
    for _ in range(2):
        users.add_login(sb.inside, sb.spec.uid_base)
        assert (await shell(sb, look)).split() == seen
    assert (await shell(sb, "stat -c %U /etc/passwd /etc/shadow")).split() == ["root", "root"]


async def test_a_user_who_cannot_be_added_is_refused(maker: Maker) -> None:
    sb = await maker.create()
    await shell(sb, "rm /etc/passwd && mkfifo /etc/passwd")
    with pytest.raises(Conflict, match="no user could be made"):
        users.add_login(sb.inside, sb.spec.uid_base)
