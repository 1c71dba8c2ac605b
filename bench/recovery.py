"""Is anything ever lost? Kills the sandbox, the daemon or both at random instants and looks at what comes back.

::

    pagurus bench recovery [--json] [--trials N] [--seed S] [--image DIR]

A daemon of its own runs one sandbox in which a server holds a number in memory. Each turn sets the number there and in
a file; at a random instant of the turn (the command, the judgement, the dump, the snapshot, the publication, the
packing) something is killed: all processes of the sandbox, the daemon, or the lot. A daemon is started again where it
was killed; a dead sandbox is restored with verification. Then memory and file must agree on this turn or the one
before, whose capture was awaited.

`equal` counts trials that ended so; `killed` those in which the sandbox died; `lost` those in which an older state, a
mixture or nothing came back; `leaks` what is left of processes, groups, mounts and subvolumes at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from sandbox import Client, Sandbox, paths
from sandbox.cgroup import Cgroup, hierarchy
from sandbox.errors import PagurusError
from sandbox.messages import SandboxState

LONGEST = 0.15  # seconds from the begin of a turn to the strike, at most
KINDS = ("sandbox", "daemon", "lot")
SERVER = """
import os
os.mkfifo('/ask'); os.mkfifo('/answer')
ask, answer, number = os.open('/ask', os.O_RDWR), os.open('/answer', os.O_RDWR), b'0'
open('/number', 'wb').write(number)
open('/ready', 'w').close()
while True:
    try:
        word = os.read(ask, 64).split()
    except InterruptedError:
        continue
    if word[0] == b'set': number = word[1]
    os.write(answer, number + b'\\n')
"""
START = f"cat > /server.py <<'E'\n{SERVER}E\nsetsid python3 /server.py & while [ ! -e /ready ]; do sleep 0.05; done"


class Host:
    """A daemon over directories of its own."""

    def __init__(self, directory: Path, image: Path):
        self.directory = directory
        self.state, self.run = directory / "state", directory / "run"
        (self.state / "images").mkdir(parents=True)
        (self.state / "images" / "bench").symlink_to(image)
        self.process: subprocess.Popen[bytes] | None = None
        self.client = Client(self.run / "pagurus.sock")

    async def start(self) -> None:
        environment = {**os.environ, "PAGURUS_STATE": str(self.state), "PAGURUS_RUN": str(self.run)}
        self.process = await asyncio.to_thread(self._spawn, environment)
        began = time.monotonic()
        self.client = Client(self.run / "pagurus.sock")
        while True:
            try:
                await self.client.health()
                return
            except (PagurusError, aiohttp.ClientError, OSError):
                if self.process.poll() is not None or time.monotonic() - began > 60:
                    log_text = (self.directory / "daemon.log").read_text()[-3000:]
                    raise RuntimeError(f"the daemon does not start:\n{log_text}") from None
                await asyncio.sleep(0.02)

    def _spawn(self, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with open(self.directory / "daemon.log", "ab") as log:
            return subprocess.Popen([sys.executable, "-m", "daemon"], env=environment, stdout=log, stderr=log)

    def complaints(self) -> str:
        """The latest warnings and errors of the daemon's log."""
        lines = (self.directory / "daemon.log").read_text(errors="replace").splitlines()
        return "\n".join([line for line in lines if '"level": "info"' not in line][-8:])

    async def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            await asyncio.to_thread(self.process.wait)
            self.process = None
        await self.client.close()


async def trial(host: Host, name: str, before: int, number: int, kind: str, delay: float) -> tuple[bool, int, str]:
    """One turn with a strike. Returns whether the sandbox died, its state now, and "" or what was wrong."""
    sandbox = await host.client.get(name)
    turn = asyncio.ensure_future(sandbox.exec(f"echo set {number} > /ask; head -n1 /answer; echo {number} > /number"))
    await asyncio.sleep(delay)
    if kind in ("daemon", "lot"):
        await host.kill()
    if kind in ("sandbox", "lot"):
        Cgroup(name).kill()
    with contextlib.suppress(PagurusError, aiohttp.ClientError, OSError):
        await turn
    if kind in ("daemon", "lot"):
        await host.start()
    return await settled(host, name, before, number)


async def settled(host: Host, name: str, before: int, number: int) -> tuple[bool, int, str]:
    """Bring the sandbox back if it died; compare memory and file with what may be."""
    sandbox = await host.client.get(name)
    began = time.monotonic()
    died, found = False, ""
    while time.monotonic() - began < 20:
        try:
            if (await sandbox.refresh()).state == SandboxState.DEAD:
                died = True
                await sandbox.restore(verify=True)
            done = await sandbox.exec("echo get > /ask; head -n1 /answer; cat /number", timeout=10)
            found = done.text
            await sandbox.captured(done)  # the answer came at once; the next trial relies on what it shows
        except PagurusError as error:
            found = str(error)
            if error.code not in ("sandbox_dead", "conflict"):
                return died, before, found
            await asyncio.sleep(0.05)
            continue
        for state in (before, number):
            if found.split() == [str(state)] * 2:
                return died, state, ""
        await asyncio.sleep(0.1)  # a daemon that was killed alone: the command goes on and has not ended yet
    return died, before, f"turn {number} after {before}: found {found.split()}"


async def everything(options: argparse.Namespace) -> dict[str, Any]:
    directory = Path(tempfile.mkdtemp(prefix="pagurus-recovery-", dir="/var/tmp"))
    host = Host(directory, options.image)
    chance = random.Random(options.seed)
    result: dict[str, Any] = {"trials": 0, "killed": 0, "equal": 0, "without_checkpoint": 0, "lost": 0, "troubles": []}
    try:
        await host.start()
        sandbox = await host.client.create("bench")
        await start(sandbox)
        state = 0
        for number in range(1, options.trials + 1):
            kind = chance.choices(KINDS, (3, 1, 1))[0]
            delay = chance.random() * LONGEST
            died, state, trouble = await trial(host, sandbox.id, state, number, kind, delay)
            result["trials"] += 1
            result["killed"] += died
            result["equal"] += not trouble
            if trouble:
                result["lost"] += 1
                result["troubles"].append(f"{kind}: {trouble}")
                print(kind, trouble, file=sys.stderr)
                print(await asyncio.to_thread(host.complaints), file=sys.stderr)
                await (await host.client.get(sandbox.id)).remove()
                sandbox = await host.client.create("bench")
                await start(sandbox, number)
                state = number
        await (await host.client.get(sandbox.id)).remove()
        await host.kill(signal.SIGTERM)
        result["leaks"] = await asyncio.to_thread(leaks, host)
    finally:
        await host.kill()
        await asyncio.to_thread(clean, host)
    return result


async def start(sandbox: Sandbox, number: int = 0) -> None:
    done = await sandbox.exec(START)
    if done.exit_code:
        raise RuntimeError(done.stderr.decode())
    done = await sandbox.exec(f"echo set {number} > /ask; head -n1 /answer; echo {number} > /number")
    await sandbox.captured(done)


def leaks(host: Host) -> list[str]:
    """What is left after the sandbox was removed and the daemon stopped. Groups of others are not looked at."""
    left = []
    known = {path.name for path in (host.run / "sandboxes").iterdir()} if (host.run / "sandboxes").exists() else set()
    for name in known:
        left += [f"group {name}"] if (hierarchy().unified / "pagurus" / name).exists() else []
    left += [f"run directory {name}" for name in known]
    left += [f"tree {path.name}" for path in (host.state / "pool/sandboxes").iterdir()]
    listed = subprocess.run(["pgrep", "-fa", str(host.directory)], capture_output=True, text=True, check=False).stdout
    left += [f"process {line}" for line in listed.splitlines() if "bench" not in line]
    for line in Path("/proc/mounts").read_text().splitlines():
        point = line.split()[1]
        if str(host.directory) in point and "/run/sandboxes/" in point:
            left.append(f"mount {point}")
    return left


def clean(host: Host) -> None:
    for line in reversed(Path("/proc/mounts").read_text().splitlines()):
        point = line.split()[1]
        if str(host.directory) in point:
            subprocess.run(["umount", "-q", point], check=False)
    shutil.rmtree(host.directory, ignore_errors=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="pagurus bench recovery", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--image", type=Path, default=paths.state() / "images" / "debian")
    options = parser.parse_args(arguments)
    result = asyncio.run(everything(options))
    if options.json:
        print(json.dumps(result))
    else:
        print(*(f"{key} {value}" for key, value in result.items()))
    return 1 if result["lost"] or result["leaks"] else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
