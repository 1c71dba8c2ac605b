"""The package on the kernel of this machine: in a root of the guests' image, without systemd.

Acts that need systemd are absent there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sandbox import paths
from tests.hosts import guest_image, machine
from tests.hosts.systems import System
from tests.support.programs import Program

# The image is mounted read-only below what the package writes. The daemon's file systems end with the mount namespace.
ENTER = """set -e
mount --make-rprivate /
mkdir -p {top}/image {top}/upper {top}/work {top}/root
mount -o loop,ro {image} {top}/image
mount -t overlay -o lowerdir={top}/image,upperdir={top}/upper,workdir={top}/work job {top}/root
for each in dev sys; do mount --rbind /$each {top}/root/$each; done
mount -t proc proc {top}/root/proc
mount -t tmpfs run {top}/root/run
# Layers of sandboxes cannot lie on an overlay themselves: the state is a directory of this machine's file system.
mkdir -p -m 700 {top}/state
cp -al {images} {top}/state/
mount --bind {top}/state {top}/root/var/lib/pagurus
mkdir -p {top}/root/job
mount --bind {job} {top}/root/job
# A root by pivot_root: where the root is not that of the mount namespace, the kernel makes no user namespaces.
mkdir -p {top}/root/old
cd {top}/root
pivot_root . old
exec chroot . env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root bash -c '
umount -l /old; cd /job; bash ./start >log 2>&1; echo $? >status'
"""


def run(system: System, job: Path, *, timeout: float, watch: Callable[[], None]) -> int:
    """As :func:`tests.hosts.machine.run`, without a guest."""
    image = guest_image.ensure(system.suite) / "disk.img"
    script = ENTER.format(top=job.parent, image=image, job=job, images=paths.state() / "images")
    with Program(["unshare", "--mount", "bash", "-c", script]) as entered:
        machine.watch_until_end(entered, timeout, watch)
    return int((job / "status").read_text())
