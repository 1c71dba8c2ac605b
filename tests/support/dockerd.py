"""Debian's dockerd, started for a test or a bench: on folders and a socket of its own, without a network."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

from tests.support.programs import Program

PROGRAM = Path("/usr/sbin/dockerd")
READY = 120.0  # seconds


class Docker:
    """A dockerd below `root`, with these options besides its own."""

    def __init__(self, root: Path, *options: str) -> None:
        self.root = root
        self.socket = f"unix://{root}/docker.sock"
        places = [
            f"--data-root={root}/data",
            f"--exec-root={root}/exec",
            f"--pidfile={root}/pid",
            f"--host={self.socket}",
        ]
        bare = ["--bridge=none", "--iptables=false", "--ip6tables=false", "--storage-driver=overlay2"]
        with (root / "dockerd.log").open("wb") as log:
            self.process = Program([str(PROGRAM), *places, *bare, *options], stdout=log, stderr=log)
        try:
            self._await()
        except BaseException:
            self.close()
            raise

    def _await(self) -> None:
        deadline = time.monotonic() + READY
        while self.run("info").returncode:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.root / "dockerd.log").read_text(errors="replace")[-2000:])
            time.sleep(0.1)

    def run(self, *words: str, timeout: float = 300) -> subprocess.CompletedProcess[bytes]:
        command = ["/usr/bin/docker", "-H", self.socket, *words]
        return subprocess.run(command, capture_output=True, check=False, timeout=timeout)

    def bring(self, tree: Path, name: str) -> None:
        """An image of that name with this file tree, which is not copied: it is mounted over an empty layer, read-only
        so that nothing of it can be lost here."""
        command = ["/usr/bin/docker", "-H", self.socket, "import", "-", name]
        subprocess.run(command, input=bytes(10_240), check=True, stdout=subprocess.DEVNULL)
        layer = self.run("image", "inspect", "--format", "{{.GraphDriver.Data.UpperDir}}", name).stdout.decode().strip()
        assert Path(layer).is_relative_to(self.root), layer
        subprocess.run(["mount", "--bind", str(tree.resolve()), layer], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", layer], check=True)

    def close(self) -> None:
        """End it and remove what it made."""
        self.process.end()
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            if line.split()[1].startswith(str(self.root)):
                subprocess.run(["umount", "-l", line.split()[1]], check=False)
        shutil.rmtree(self.root, ignore_errors=True)
