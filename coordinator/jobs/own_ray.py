"""A cluster of Ray on this machine alone, for jobs of a coordinator that was given no other.

It listens on the loopback.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from rollout.engine import adopted
from rollout.engine.adopted import RoleRecord

NAME = "ray"
TIMEOUT = 60.0  # seconds for it to end


def start(directory: Path) -> str:
    """The address of the one that runs, or of a new one; it may take a while until it answers."""
    existing = adopted.read(directory, NAME)
    descriptor = None if existing is None else adopted.hold(existing)
    if existing is not None and descriptor is not None:
        os.close(descriptor)
        return existing.url
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = directory / "ray.log"
    with log.open("ab") as out:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
                *("--node-ip-address=127.0.0.1", f"--port={port}", "--include-dashboard=false"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    address = f"127.0.0.1:{port}"
    at = adopted.started(process.pid) or 0
    adopted.write(
        directory, RoleRecord(name=NAME, pid=process.pid, started=at, at=time.time(), url=address, log=str(log))
    )
    return address


def stop(directory: Path) -> None:
    """End it, with all its processes. Idempotent."""
    existing = adopted.read(directory, NAME)
    descriptor = None if existing is None else adopted.hold(existing)
    if descriptor is None:
        return
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)
            if select.select([descriptor], [], [], TIMEOUT)[0]:
                return
    finally:
        os.close(descriptor)
