"""``python -m coordinator.jobs.trainer_host NAME --at ADDRESS``: a machine with ranks of a job's trainer, tied to its
actor.

The first line of stdin says where the trainer is. Guarantee: the agent and its ranks end with the actor, and what they
wrote here is removed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from coordinator.jobs.tied import tie
from rollout.engine.keep import die_with_parent
from sandbox import private


def main(name: str, address: str) -> int:
    head = _first_line()
    directory = Path(tempfile.mkdtemp(prefix="pagurus-ranks-"))
    try:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        tie()  # from here on the end of stdin is a signal, which ends the agent
        join = directory / "hosts.json"
        private.file(join)
        join.write_bytes(head)
        argv = [sys.executable, "-m", "trainer.distributed.agent", "--join", str(join), "--directory", str(directory)]
        argv += ["--name", name, "--address", address]
        agent = subprocess.Popen(argv, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
        signal.signal(signal.SIGTERM, lambda *_: agent.terminate())  # to raise in `wait` could leave its lock taken
        return agent.wait()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _first_line() -> bytes:
    """Byte by byte: the end of what follows is waited for elsewhere."""
    result = b""
    while not result.endswith(b"\n"):
        if not (part := os.read(0, 1)):
            raise SystemExit(0)
        result += part
    return result.strip()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m coordinator.jobs.trainer_host")
    parser.add_argument("name")
    parser.add_argument("--at", required=True, help="address of this machine")
    options = parser.parse_args()
    raise SystemExit(main(options.name, options.at))
