"""Container programs that checkpoint by CRIU, too: the same workload over the same image in each of them."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from bench.harness import aftermath, redis
from sandbox import paths

HOLD = ["sleep", "1000000"]  # what pid 1 is


class Peer:
    """A container. All methods block, and raise RuntimeError with the program's own words."""

    program = ""
    starting = ("run", "exec", "restore")  # verbs that start a process in the container

    def __init__(self, directory: Path, image: Path):
        self.name = f"{self.program}-{secrets.token_hex(4)}"
        self.bundle = directory / self.name
        self.root = self.bundle / "rootfs"
        for part in ("rootfs", "upper", "work"):
            (self.bundle / part).mkdir(parents=True)
        layers = f"lowerdir={image},upperdir={self.bundle / 'upper'},workdir={self.bundle / 'work'}"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, str(self.root)], check=True)

    def call(self, *arguments: str) -> None:
        environment = {**os.environ, "PATH": f"{paths.criu().parent}:{os.environ['PATH']}"}
        log = self.bundle / "log"
        with log.open("wb") as words:
            # Containers keep the descriptors that the program was given: none of ours may be among them.
            kept = subprocess.DEVNULL if arguments[0] in self.starting else words
            done = subprocess.run(
                [self.program, *self.options(), *arguments], cwd=self.bundle, env=environment, check=False,
                stdin=subprocess.DEVNULL, stdout=kept, stderr=kept,
            )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{self.program} {arguments[0]} failed: {log.read_text(errors='replace')[-800:]}")

    def options(self) -> list[str]:
        """Those that stand before the verb."""
        return []

    def start(self, script: str, extra: Path | None = None) -> None:
        """A container in which `script` has run; `extra` is what the image lacks."""
        if extra is not None:
            shutil.copytree(extra, self.bundle / "upper" / redis.PLACE)
        self.create()
        self.run(["setsid", "/bin/sh", "-c", script])

    def create(self) -> None:
        raise NotImplementedError

    def run(self, command: Sequence[str]) -> None:
        self.call("exec", self.name, *command)

    def checkpoint(self, images: Path) -> None:
        """Leave it running."""
        raise NotImplementedError

    def kill(self) -> None:
        """What was checkpointed, so that it can be restored."""
        raise NotImplementedError

    def restore(self, images: Path) -> None:
        raise NotImplementedError

    def close(self) -> None:
        subprocess.run(["umount", "-q", str(self.root)], check=False)
        shutil.rmtree(self.bundle, ignore_errors=True)


class Runc(Peer):
    """The reference runtime, without an engine above it."""

    program = "runc"

    def __init__(self, directory: Path, image: Path):
        super().__init__(directory, image)
        subprocess.run(["runc", "spec"], cwd=self.bundle, check=True)
        config = json.loads((self.bundle / "config.json").read_text())
        config["process"]["terminal"] = False
        config["process"]["args"] = HOLD
        config["root"]["readonly"] = False
        (self.bundle / "config.json").write_text(json.dumps(config))

    def create(self) -> None:
        self.call("run", "-d", self.name)

    def checkpoint(self, images: Path) -> None:
        self.call("checkpoint", "--leave-running", "--image-path", str(images), "--work-path", str(images), self.name)

    def kill(self) -> None:
        subprocess.run(["runc", "delete", "-f", self.name], check=False, capture_output=True)

    def restore(self, images: Path) -> None:
        self.call("restore", "-d", "--image-path", str(images), "--work-path", str(images), self.name)

    def close(self) -> None:
        self.kill()
        super().close()


class Podman(Peer):
    """An engine over runc. It keeps its images where it keeps the container."""

    program = "podman"

    def __init__(self, directory: Path, image: Path):
        super().__init__(directory, image)
        self.run_root = aftermath.directory("podman-", "/run")  # its path may have 50 characters

    def options(self) -> list[str]:
        store, run = self.bundle / "store", self.run_root
        return ["--runtime", "runc", "--cgroup-manager", "cgroupfs", "--root", str(store), "--runroot", str(run)]

    def create(self) -> None:
        self.call("run", "-d", "--name", self.name, "--network", "none", "--rootfs", str(self.root), *HOLD)

    def checkpoint(self, images: Path) -> None:
        self.call("container", "checkpoint", "--keep", "--leave-running", self.name)

    def kill(self) -> None:
        self.call("kill", self.name)
        self.call("wait", self.name)

    def restore(self, images: Path) -> None:
        self.call("container", "restore", "--keep", self.name)

    def close(self) -> None:
        self.call("rm", "-f", "-t", "0", self.name)
        for mount in ("store/overlay", "store"):
            subprocess.run(["umount", "-q", str(self.bundle / mount)], check=False)
        shutil.rmtree(self.run_root, ignore_errors=True)
        super().close()


PEERS: dict[str, type[Peer]] = {peer.program: peer for peer in (Runc, Podman)}
