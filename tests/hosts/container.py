"""The package in a container on the kernel of this machine, built and started as docs/hosts.md says.

Owns: a dockerd and a container of its own, and the image that packaging/Containerfile makes of the package on a base
that debootstrap makes: there may be no registry. Does not own: the acts. The container has a network namespace of its
own with a way out that leads nowhere, as guests have: other daemons of this machine keep theirs.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from sandbox import paths
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
JOB = """cd /job
ip link add way-out type veth peer name nowhere && ip address add 192.0.2.1/24 dev way-out
ip link set nowhere up && ip link set way-out up && ip route add default via 192.0.2.2
bash ./start >log 2>&1; echo $? >status
"""


def run(system: System, job: Path, *, timeout: float, watch: Callable[[], None]) -> int:
    """As :func:`tests.hosts.machine.run`, in a container."""
    (job.parent / "docker").mkdir()
    docker = Docker(job.parent / "docker")
    try:
        _build(docker, system, job)
        state, sockets = job.parent / "state", job.parent / "run"
        (state / "images").mkdir(mode=0o700, parents=True)
        guest_image.add_base_image(state / "images", "--link")
        sockets.mkdir(mode=0o711)
        options = [item.format(state=state, run=sockets, job=job) for item in RUN]
        _checked(docker, "run", "--detach", "--name", NAME, *options, NAME, *DAEMON)
        try:
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
