"""A guest in qemu: boot, run one job, power off.

A guest has no network. With KVM where it works, else by software, which is some fifty times slower: time-outs are set
for that.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.hosts import guest_image
from tests.hosts.systems import System
from tests.support.programs import Program

MEMORY = 4096  # MiB
# For an emulated machine on a busy one: a kernel gives up when ticks come late, and services when they take long.
# What guards a processor against speculation guards nothing there, and costs time.
PATIENT = "no_timer_check mitigations=off systemd.default_timeout_start_sec=900 systemd.default_device_timeout_sec=900"


PROBE_TIMEOUT = 60.0  # seconds for a kernel to say its first words, where a processor runs at full speed
NO_ROOT = "Unable to mount root fs"  # a kernel's last words where it has started and finds no disk


def kernel_of(system: System) -> Path:
    """The kernel that `system` boots; its image is built unless it is there."""
    guest_image.ensure(system.suite)
    return guest_image.kernels(system.suite)[-1 if system.backports else 0]


def accelerator_of(system: System) -> str:
    """What runs its processors: ``kvm`` or ``tcg``."""
    return _accelerator(kernel_of(system))


@functools.cache
def _accelerator(kernel: Path) -> str:
    """``kvm`` where this machine starts this kernel with it, else ``tcg``: a /dev/kvm for paravirtual guests (kvm-pvm)
    interprets the instructions of ordinary kernels, slower than qemu does.

    PAGURUS_HOSTS_ACCELERATOR names one instead.
    """
    return os.environ.get("PAGURUS_HOSTS_ACCELERATOR") or ("kvm" if _starts_with_kvm(kernel) else "tcg")


def _starts_with_kvm(kernel: Path) -> bool:
    """Boot the kernel without a disk, until it says that there is none."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return False
    with tempfile.NamedTemporaryFile("r", errors="replace") as said:
        command = [*_processor("kvm"), "-m", "512", "-display", "none", "-no-reboot", "-nic", "none"]
        command += ["-kernel", str(kernel), "-append", "console=ttyS0 panic=-1", "-serial", f"file:{said.name}"]
        with Program(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as probe:
            try:
                probe.wait(PROBE_TIMEOUT)
            except subprocess.TimeoutExpired:
                return False
        return NO_ROOT in said.read()


def _processor(name: str) -> list[str]:
    """qemu with this accelerator and two processors.

    qemu 7.2 emulates AVX2 wrongly: ``numpy.argsort`` of 9 to 16 integers returns another order, and digests of files
    that were whole read as damaged. With AVX apt's transports in Debian 12 end with SIGILL. A KVM inside a virtual
    machine may refuse the register of arch-capabilities.
    """
    if name == "kvm":
        return ["qemu-system-x86_64", "-accel", "kvm", "-cpu", "max,arch-capabilities=off", "-smp", "2"]
    accelerator = f"{name},thread=multi,tb-size=512"
    return ["qemu-system-x86_64", "-accel", accelerator, "-cpu", "max,avx=off,avx2=off", "-smp", "2"]


def watch_until_end(program: Program, timeout: float, watch: Callable[[], None]) -> None:
    """Call `watch` every second until the program has ended. Raises TimeoutError."""
    ends = time.monotonic() + timeout
    while program.poll() is None:
        watch()
        if time.monotonic() > ends:
            raise TimeoutError(f"no end after {timeout:.0f} s")
        time.sleep(1)
    watch()


def run(system: System, job: Path, *, timeout: float, watch: Callable[[], None]) -> int:
    """Boot `system` with the directory `job` at /job, which has a script `start`; its exit status.

    `watch` is called every second. Raises TimeoutError; the guest is gone in any case.
    """
    for program in ("qemu-system-x86_64", "qemu-img"):
        if shutil.which(program) is None:
            raise SystemExit(f"error: {program} is missing\nhint: apt-get install qemu-system-x86 qemu-utils")
    image, kernel = guest_image.ensure(system.suite), kernel_of(system)
    disk = job.parent / "disk.qcow2"
    base = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", str(image / "disk.img"), str(disk)]
    subprocess.run(base, check=True)
    command = [
        *_processor(accelerator_of(system)),
        *("-m", str(MEMORY), "-display", "none", "-no-reboot", "-nic", "none"),
        *("-drive", f"file={disk},if=virtio,cache=unsafe", "-kernel", str(kernel)),
        *("-initrd", str(kernel.with_name(kernel.name.replace("vmlinuz-", "initrd.img-")))),
        *("-append", f"root=/dev/vda rw console=ttyS0 panic=-1 systemd.show_status=0 {PATIENT}"),
        *("-virtfs", f"local,path={job},mount_tag=job,security_model=none"),
        *("-serial", f"file:{job.parent / 'serial.log'}"),
    ]
    status = job / "status"
    with Program(["nice", "-n", "12", *command]) as qemu:
        watch_until_end(qemu, timeout, watch)
    if not status.exists():
        tail = (job.parent / "serial.log").read_text(errors="replace")[-600:]
        raise RuntimeError(f"{system.name}: it ended without a result; its console says:\n{tail}")
    return int(status.read_text())
