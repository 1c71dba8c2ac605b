"""The package in a container on the kernel of this machine, built and started as docs/hosts.md says.

The container has a network namespace of its own with a way out that leads nowhere, as guests have: other daemons of
this machine keep theirs.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from sandbox import paths, procfs
from tests.hosts import guest_image, machine
from tests.hosts.systems import System
from tests.support.dockerd import Docker
from tests.support.programs import Program

NAME = "pagurus"
# What docs/hosts.md says, below directories of the job.
RUN = [
    *("--privileged", "--cgroupns=host", "--pid=host", "--network=none", "-v", "/sys/fs/cgroup:/sys/fs/cgroup"),
    *("-v", "/dev:/dev", "-v", "/lib/modules:/lib/modules:ro", "-v", "{state}:/var/lib/pagurus"),
    *("-v", "{run}:/run/pagurus", "-v", "{job}:/job"),
]
DAEMON = ["--config", "/etc/pagurus/daemon.toml", "--pool-size", "3GiB", "--stop-sandboxes"]
SYS_RESOURCE = 24  # the number of the capability
RUNTIME = """
import json, os, sys
from pathlib import Path
words = dict(zip(sys.argv, sys.argv[1:]))
for path in (Path(words.get("--bundle", "/none"), "config.json"), Path(words.get("--process", "/none"))):
    if path.is_file():
        config = json.loads(path.read_text())
        for names in config.get("process", config).get("capabilities", {}).values():
            names[:] = [name for name in names if name != "CAP_SYS_RESOURCE"]
        path.write_text(json.dumps(config))
os.execv("/usr/bin/runc", ["runc", *sys.argv[1:]])
"""
JOB = """cd /job
ip link add way-out type veth peer name nowhere && ip address add 192.0.2.1/24 dev way-out
ip link set nowhere up && ip link set way-out up && ip route add default via 192.0.2.2
bash ./start >log 2>&1; echo $? >status
"""


def run(system: System, job: Path, *, timeout: float, watch: Callable[[], None]) -> int:
    """As :func:`tests.hosts.machine.run`, in a container."""
    (job.parent / "docker").mkdir()
    docker = Docker(job.parent / "docker", *_runtime(job.parent / "runtime"))
    try:
        _build(docker, system, job)
        state, sockets = job.parent / "state", job.parent / "run"
        (state / "images").mkdir(mode=0o700, parents=True)
        guest_image.add_base_image(state / "images", "--link")
        sockets.mkdir(mode=0o711)
        options = [item.format(state=state, run=sockets, job=job) for item in RUN]
        _checked(docker, "run", "--detach", "--name", NAME, *options, NAME, *DAEMON)
        try:
            _await_daemon(docker)
            client = ["/usr/bin/docker", "-H", docker.socket, "exec", NAME, "bash", "-c", JOB]
            with Program(client) as acts:
                machine.watch_until_end(acts, timeout, watch)
        finally:
            (job / "daemon.log").write_bytes(docker.run("logs", NAME).stderr)
            docker.run("stop", "--time", "120", NAME)
            code = docker.run("inspect", "--format", "{{.State.ExitCode}}", NAME).stdout.decode().strip()
            docker.run("rm", "--force", NAME)
    finally:
        docker.close()
    return int((job / "status").read_text()) + (code != "0")


def _await_daemon(docker: Docker) -> None:
    """Raises RuntimeError with its log if it ended instead."""
    while docker.run("exec", NAME, "pagurus", "ls").returncode:
        if docker.run("inspect", "--format", "{{.State.Running}}", NAME).stdout.strip() != b"true":
            raise RuntimeError(f"the daemon ended: {docker.run('logs', NAME).stderr.decode(errors='replace')[-2000:]}")
        time.sleep(0.5)


def _runtime(program: Path) -> list[str]:
    """Options for a runc that gives `--privileged` the capabilities that there are: it fails for one that is not."""
    bounding = int(procfs.status(os.getpid(), "CapBnd") or "0", 16)
    if bounding & 1 << SYS_RESOURCE:
        return []
    program.write_text(f"#!{sys.executable}\n{RUNTIME}")
    program.chmod(0o755)
    return [f"--add-runtime=present={program}", "--default-runtime=present"]


def _build(docker: Docker, system: System, job: Path) -> None:
    """The image of packaging/Containerfile, from a context that holds the package alone."""
    context = job.parent / "context"
    _checked(docker, "import", str(guest_image.base(system.suite)), "base")
    (context / "dist").mkdir(parents=True)
    shutil.copy(job / "pagurus.deb", context / "dist" / "pagurus_0_amd64.deb")
    recipe = paths.CHECKOUT / "packaging" / "Containerfile"
    arguments = ["--network=host", "--build-arg", "BASE=base", "--file", str(recipe), "--tag", NAME, str(context)]
    _checked(docker, "build", *arguments)


def _checked(docker: Docker, *words: str) -> None:
    done = docker.run(*words, timeout=3600)
    if done.returncode:
        raise RuntimeError(f"docker {words[0]} failed: {done.stderr.decode(errors='replace')[-2000:]}")
