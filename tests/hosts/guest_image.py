"""The disk of a guest: debootstrap, Debian's kernels, what the package depends on, and a unit that runs a job.

No compiler is installed in it and no Python beyond Debian's own: what is tried in it is the package, on a machine like
a user's. The packages of a compiler lie in :data:`COMPILER`, for the benches that run after that.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sandbox import paths
from tests.hosts.systems import BACKPORTS

CACHE = Path(os.environ.get("PAGURUS_HOSTS_CACHE", "/var/cache/pagurus-hosts"))
SIZE = "10G"  # of the disk; the file is sparse
COMPILER = "/var/cache/compiler"  # in the guest; gcc, the C library's headers, and what they need
ESSENTIAL = "systemd-sysv,dbus,udev,kmod,apparmor,ca-certificates,procps,iproute2,zstd,initramfs-tools"
SOURCE = Path(__file__).read_text()  # now: who edits it during a run changes the next run's images
JOB_UNIT = """[Unit]
Description=Runs what the machine that started this guest asks for
After=multi-user.target
[Service]
Type=exec
ExecStart=/usr/local/sbin/job
StandardOutput=journal+console
StandardError=journal+console
[Install]
WantedBy=multi-user.target
"""
# An address, and a way out that leads nowhere: what a sandbox may not reach is refused by rules, not for want of a way.
JOB = """#!/bin/bash
mkdir -p /job
mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144 job /job
modprobe dummy
ip link add way-out type dummy && ip address add 192.0.2.1/24 dev way-out && ip link set way-out up
ip route add default via 192.0.2.2
cd /job && bash ./start >/job/log 2>&1
echo $? >/job/status
sync
systemctl poweroff
"""


def directory(suite: str) -> Path:
    """Of the finished image of a suite: disk.img and boot/."""
    return CACHE / f"{suite}-{fingerprint()}"


def fingerprint() -> str:
    """Of what an image is made of, as far as this tree says it."""
    control = (paths.CHECKOUT / "packaging" / "debian" / "control").read_text()
    made_of = SOURCE + _depends(control) + str((paths.state() / "images" / "debian").resolve())
    return hashlib.sha256(made_of.encode()).hexdigest()[:12]


def _depends(control: str) -> str:
    """The packages that ours depends on, with the first of alternatives left to apt."""
    result = re.search(r"^Depends: (.*(?:\n .*)*)", control, re.MULTILINE)
    assert result is not None
    return " ".join(result[1].split())


def ensure(suite: str) -> Path:
    """Build the image unless it is there. Returns its directory."""
    made = directory(suite)
    with _alone():
        if not (made / "disk.img").exists():
            _build(suite, made)
    return made


def base(suite: str) -> Path:
    """Build, unless it is there, the smallest system of a suite. Returns the file of its tree, a tar."""
    made = CACHE / f"base-{suite}.tar"
    with _alone():
        if not made.exists():
            tree = made.with_suffix("")
            shutil.rmtree(tree, ignore_errors=True)
            _bootstrap(suite, tree)
            # As images of Docker have it: dpkg need not wait for the disk after each file.
            (tree / "etc/dpkg/dpkg.cfg.d/unsafe-io").write_text("force-unsafe-io\n")
            _run("tar", "-C", tree, "-cf", made.with_suffix(".new"), ".")
            shutil.rmtree(tree)
            made.with_suffix(".new").rename(made)
    return made


@contextmanager
def _alone() -> Iterator[None]:
    """Let no other program build in the cache."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _bootstrap(suite: str, tree: Path, *options: str) -> None:
    if shutil.which("debootstrap") is None or os.geteuid() != 0:
        raise SystemExit("error: a guest is built by debootstrap as root\nhint: apt-get install debootstrap, sudo")
    _run("debootstrap", "--variant=minbase", *options, suite, tree, _mirror())


def _build(suite: str, made: Path) -> None:
    tree = made / "tree"
    shutil.rmtree(made, ignore_errors=True)
    _bootstrap(suite, tree, f"--include={ESSENTIAL}")
    _configure(tree, suite, _mirror())
    with _mounted(tree):
        _install(tree, suite)
    shutil.copytree(tree / "boot", made / "boot")
    add_base_image(tree / "var/lib/pagurus/images")
    _run("mkfs.ext4", "-q", "-d", tree, made / "disk.new", SIZE)
    shutil.rmtree(tree)
    (made / "disk.new").rename(made / "disk.img")


def add_base_image(images: Path, *options: str) -> None:
    """The image "debian" of this machine, as its store has it, without the others; `options`: of ``cp``."""
    name = Path(os.readlink(paths.state() / "images" / "debian"))
    for path in (images.parent, images, images / name.parts[0]):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    (images / "debian").symlink_to(name)
    _run("cp", "-aT", *options, paths.state() / "images" / name.parent, images / name.parent)


def kernels(suite: str) -> list[Path]:
    """The kernels of an image, the oldest first."""

    def age(path: Path) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", path.name.partition("-")[2])[:3]]

    return sorted((directory(suite) / "boot").glob("vmlinuz-*"), key=age)


def _mirror() -> str:
    result = subprocess.run(
        ["bash", "-c", f". {paths.CHECKOUT}/scripts/debs.sh ''; mirror"], capture_output=True, text=True, check=True
    )
    return result.stdout.strip()


def _configure(tree: Path, suite: str, mirror: str) -> None:
    lines = [f"deb {mirror} {item} main" for item in (suite, BACKPORTS.get(suite)) if item]
    (tree / "etc/apt/sources.list").write_text("\n".join(lines) + "\n")
    (tree / "etc/apt/apt.conf.d/00hosts").write_text(
        'Acquire::Check-Valid-Until "false";\nAPT::Install-Recommends "false";\n'
    )
    (tree / "etc/initramfs-tools/initramfs.conf").write_text("MODULES=most\nCOMPRESS=zstd\nBUSYBOX=n\nNFSROOT=auto\n")
    (tree / "etc/hostname").write_text(f"{suite}\n")
    (tree / "etc/hosts").write_text(f"127.0.0.1 localhost {suite}\n")
    (tree / "etc/fstab").write_text("/dev/vda / ext4 rw,noatime 0 0\n")
    (tree / "etc/systemd/system/job.service").write_text(JOB_UNIT)
    (tree / "usr/local/sbin/job").write_text(JOB)
    (tree / "usr/local/sbin/job").chmod(0o755)


def _install(tree: Path, suite: str) -> None:
    depends = _depends((paths.CHECKOUT / "packaging" / "debian" / "control").read_text())
    names = [re.sub(r"\(.*?\)", "", item).strip() for item in depends.split(",")]
    chroot = ("chroot", tree, "env", "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C.UTF-8")
    _run(*chroot, "apt-get", "update")
    _run(*chroot, "apt-get", "install", "-y", "linux-image-amd64")
    if suite in BACKPORTS:
        _run(*chroot, "apt-get", "install", "-y", "-t", BACKPORTS[suite], "linux-image-amd64")
    for name in names:
        choices = [item.strip() for item in name.split("|")]
        existing = [item for item in choices if _existing(chroot, item)]
        _run(*chroot, "apt-get", "install", "-y", existing[0] if existing else choices[0])
    _run(*chroot, "apt-get", "clean")
    (tree / COMPILER.lstrip("/") / "partial").mkdir(parents=True)
    download = ("-o", f"Dir::Cache::archives={COMPILER}", "install", "-y", "--download-only")
    _run(*chroot, "apt-get", *download, "gcc", "libc6-dev")
    _run(*chroot, "systemctl", "enable", "job.service")
    masked = ("apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "fstrim.timer", "e2scrub_all.timer")
    _run(*chroot, "systemctl", "mask", *masked)


def _existing(chroot: tuple[object, ...], package: str) -> bool:
    """Whether apt can install it under this name."""
    command = [str(item) for item in (*chroot, "apt-cache", "show", package)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@contextmanager
def _mounted(tree: Path) -> Iterator[None]:
    _run("mount", "-t", "proc", "proc", tree / "proc")
    try:
        yield
    finally:
        _run("umount", tree / "proc")


def _run(*command: object) -> None:
    with (CACHE / "build.log").open("a") as log:
        words = [str(item) for item in command]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(words[:6])} failed\nhint: see {CACHE / 'build.log'}")
