"""A dockerd with today's BuildKit, out of the directory that `make test-images` fills, for tests that compare with it.

Guarantee: all that it writes lies below `root`, and nothing is mounted outside its namespace; it has no network.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.programs import Program

TREE = os.environ.get("PAGURUS_REFERENCE_DOCKER", "")
START_TIMEOUT = 120.0  # seconds
BUILD_TIMEOUT = 300.0
INSIDE = "/mnt"  # where `root` is in the namespace
_START = f"""set -e
mount --bind "$0" "$0"; cd "$0"
mount -t proc proc proc; mount --rbind /sys sys; mount --rbind /dev dev; mount --bind "$1" .{INSIDE}
mount -t tmpfs tmpfs run; mkdir -p run/lock
exec chroot "$0" dockerd --data-root={INSIDE}/data --exec-root=/run/exec --pidfile=/run/docker.pid \
    --host=unix:///run/docker.sock --bridge=none --iptables=false --ip6tables=false --storage-driver=overlay2
"""


class ReferenceDocker:
    """`root` is the caller's own, empty directory; it is gone after `close`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "work").mkdir()
        start = ["unshare", "--mount", "--propagation=private", "bash", "-c", _START, TREE, str(root)]
        with (root / "dockerd.log").open("wb") as log:
            self._process = Program(start, stdout=log, stderr=log)
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while (said := self.run("info")).returncode:
            text = f"{said.stderr.decode()}\n{(self.root / 'dockerd.log').read_text()[-2000:]}"
            assert self._process.poll() is None and time.monotonic() < deadline, text
            time.sleep(0.1)

    def run(self, *words: str, data: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
        """A command of the docker program; paths are those of :meth:`inside`."""
        enter = ["nsenter", f"--mount=/proc/{self._process.pid}/ns/mnt", "chroot", TREE]
        setting = ["env", "-i", "PATH=/usr/sbin:/usr/bin", f"HOME={INSIDE}/home", "DOCKER_HOST=unix:///run/docker.sock"]
        command = [*enter, *setting, "docker", *words]
        return subprocess.run(command, input=data, capture_output=True, check=False, timeout=BUILD_TIMEOUT)

    def inside(self, path: Path) -> str:
        """What a path below `root` is called there."""
        return f"{INSIDE}/{path.relative_to(self.root)}"

    def bring(self, archive: Path, name: str) -> None:
        """An image out of the archive of a root file system."""
        done = self.run("import", "-", name, data=archive.read_bytes())
        assert done.returncode == 0, done.stderr

    def build(self, context: Path, name: str, *options: str) -> str:
        """Build the Dockerfile of a directory below `root`; why it was refused, "" if it was not."""
        done = self.run("build", "--network=none", "--progress=plain", "-t", name, *options, self.inside(context))
        return "" if done.returncode == 0 else done.stderr.decode("utf-8", "replace")[-1500:]

    def inspect(self, name: str) -> dict[str, Any]:
        done = self.run("image", "inspect", name)
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)[0]
        return result

    @contextmanager
    def tree(self, name: str) -> Iterator[Path]:
        """The file tree of an image as it lies on the disk, read-only."""
        data = self.inspect(name)["GraphDriver"]["Data"]
        layers = [data["UpperDir"], *data.get("LowerDir", "").split(":")] if data else []
        directories = [f"{self.root}{item.removeprefix(INSIDE)}" for item in layers if item]
        place, *empty = (self.root / name for name in ("tree", "empty1", "empty2"))  # an overlay has two at least
        for item in (place, *empty):
            item.mkdir(exist_ok=True)
        options = f"ro,lowerdir={':'.join([*directories, *map(str, empty)])}"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(place)], check=True)
        try:
            yield place
        finally:
            subprocess.run(["umount", str(place)], check=True)

    def close(self) -> None:
        try:
            self._process.end()
        finally:
            shutil.rmtree(self.root)
