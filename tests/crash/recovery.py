"""Is anything ever lost? Kills the sandbox, the daemon or the lot at random instants and looks at what comes back.

::

    pagurus bench recovery [--json] [--trials N] [--seed S] [--image NAME]

A daemon of its own runs one sandbox in which a server holds a number in memory. A trial sets the number there and in
a file; at a random instant something is killed: all processes of the sandbox, its shim, the daemon, or the lot (daemon,
shim and processes). The instant falls into the command, the judgement, the dump, the snapshot, the publication, the
packing; in some trials into a collection of checkpoints and pages, a restore or a fork that goes on at the same time. A
daemon is started again where it was killed; a dead sandbox is restored with verification. Then memory and file must
agree on this turn or the one before, whose capture was awaited.

`equal` counts trials that ended so; `killed` those in which the sandbox died; `without_checkpoint` those that died with
no checkpoint to go back to; `lost` those in which an older state, a mixture or nothing came back; `leaks` what is left
at the end of processes, groups, mounts, namespaces, subvolumes, images and loop devices; `under_way` in how many trials
the strike fell into which stages, as the daemon itself had noted.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

from bench.harness import aftermath, command
from bench.harness.own_daemon import IMAGE, BenchHost, Census, image, shims, tasks
from sandbox import Client, Retention
from sandbox.container.cgroup import Cgroup, hierarchy
from sandbox.errors import PagurusError
from sandbox.messages import SandboxState
from sandbox.sdk.handle import Sandbox
from tests.crash import staged_daemon

LONGEST = 0.15  # seconds from the begin of a turn to the strike, at most
SETTLE = 30.0  # seconds that a trial has to come to an agreement
ENDING = 50  # tenths of a second in which what was killed must be gone
KINDS = {"sandbox": 3, "shim": 1, "daemon": 1, "lot": 1}  # and how often each
ALONGSIDE = {"": 6, "collection": 2, "restore": 1, "fork": 1}  # what goes on at the same time
GONE = (PagurusError, aiohttp.ClientError, OSError)  # what a call gets whose daemon or sandbox is killed
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
NAMESPACES = ("pid", "mnt", "net", "user", "ipc", "uts", "cgroup")


class Trials:
    """The host, its sandbox, and what was found so far."""

    def __init__(self, host: BenchHost, chance: random.Random, notes: staged_daemon.Notes) -> None:
        self.host, self.chance, self.notes = host, chance, notes
        self.client: Client = host.client()
        self.name = ""
        self.state = 0  # the number that memory and file agree on
        self.namespaces: set[str] = set()  # of everything that ever ran in our sandboxes
        self.names: set[str] = set()
        self.counts: collections.Counter[str] = collections.Counter()
        self.by_kind: collections.Counter[str] = collections.Counter()
        self.hit: collections.Counter[str] = collections.Counter()  # what was under way at the strikes
        self.troubles: list[str] = []

    async def run(self, count: int) -> None:
        await self.renew(0)
        began = time.monotonic()
        for number in range(1, count + 1):
            kind = self.chance.choices(list(KINDS), list(KINDS.values()))[0]
            alongside = self.chance.choices(list(ALONGSIDE), list(ALONGSIDE.values()))[0]
            delay = self.chance.random() * LONGEST
            trouble = await self.trial(number, kind, alongside, delay)
            self.counts["trials"] += 1
            self.counts["equal"] += not trouble
            self.by_kind[f"{kind} in {alongside or 'a turn'}"] += 1
            if trouble:
                self.counts["lost"] += 1
                self.troubles.append(f"{number}: {kind} in {alongside or 'a turn'} after {delay:.3f} s: {trouble}")
                print(self.troubles[-1], *self.host.complaints()[-8:], sep="\n", file=sys.stderr)
                await self.renew(number)
            if number % 50 == 0:
                print(f"{number} trials, {time.monotonic() - began:.0f} s, {self.counts['lost']} lost", file=sys.stderr)
        await self.drop()

    async def trial(self, number: int, kind: str, alongside: str, delay: float) -> str:
        """One strike. Returns "" or what was wrong."""
        sandbox = await self.client.get(self.name)
        self.note_namespaces()
        before = self.state
        acts = [asyncio.ensure_future(self.act(sandbox, number, alongside))]
        if alongside in ("collection", "fork"):
            acts.append(asyncio.ensure_future(self.aside(alongside, sandbox)))
        await asyncio.sleep(delay)
        if kind in ("daemon", "lot"):
            await asyncio.to_thread(self.host.kill)
        self.hit.update(self.notes.under_way() or ["nothing"])
        if kind in ("sandbox", "lot"):
            with contextlib.suppress(OSError):
                Cgroup(self.name).kill()
        if kind in ("shim", "lot"):
            for pid in await asyncio.to_thread(shims, self.host.run):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if kind in ("daemon", "lot"):
            # Nothing answers any more: what was asked need not be waited for, nor asked again of the next daemon.
            await self.client.close()
        await asyncio.wait(acts[:1])
        for act in acts[1:]:
            act.cancel()
        await asyncio.gather(*acts, return_exceptions=True)
        if kind in ("daemon", "lot"):
            await asyncio.to_thread(self.host.start)
            self.client = self.host.client()
        await self.remove_children()
        return await self.finalized(before, before if alongside == "restore" else number)

    async def act(self, sandbox: Sandbox, number: int, alongside: str) -> None:
        """The turn of a trial, or a restore to where it stands."""
        if alongside == "restore":
            await sandbox.restore(verify=number % 2 == 0)
        else:
            await sandbox.exec(f"echo set {number} > /ask; head -n1 /answer; echo {number} > /number", timeout=SETTLE)

    async def aside(self, alongside: str, sandbox: Sandbox) -> None:
        if alongside == "collection":
            while True:
                await self.client.store.collect()
        await self.client.fork(sandbox.info.head or "", 2)

    async def finalized(self, before: int, number: int) -> str:
        """Bring the sandbox back if it died; compare memory and file with what may be."""
        sandbox = await self.client.get(self.name)
        began, died, result = time.monotonic(), False, "nothing"
        try:
            while time.monotonic() - began < SETTLE:
                try:
                    if (await sandbox.refresh()).state == SandboxState.DEAD:
                        died = True
                        await sandbox.restore(verify=True)
                    done = await sandbox.exec("echo get > /ask; head -n1 /answer; cat /number", timeout=10)
                    result = done.text
                    await sandbox.captured(done)  # the answer came at once; the next trial relies on what it shows
                except PagurusError as error:
                    result = str(error)
                    if error.code not in ("sandbox_dead", "conflict"):
                        return result
                    await asyncio.sleep(0.05)
                    continue
                for state in (before, number):
                    if result.split() == [str(state)] * 2:
                        self.state = state
                        return ""
                await asyncio.sleep(0.1)  # a daemon that was killed alone: the command goes on and has not ended yet
        finally:
            self.counts["killed"] += died
            self.note_namespaces()
        complete = [info for info in await sandbox.tree() if info.error is None]
        self.counts["without_checkpoint"] += died and not complete
        return f"turn {number} after {before}: found {result.split()}"

    # ----------------------------------------------------------------- the sandbox

    async def renew(self, number: int) -> None:
        """A sandbox whose server holds `number`."""
        if self.name:
            await self.drop()
        sandbox = await self.client.create(IMAGE, retention=Retention(last=4))
        self.name = sandbox.id
        self.names.add(sandbox.id)
        done = await sandbox.exec(START)
        if done.exit_code:
            raise RuntimeError(done.stderr.decode())
        done = await sandbox.exec(f"echo set {number} > /ask; head -n1 /answer; echo {number} > /number")
        await sandbox.captured(done)
        self.state = number

    async def drop(self) -> None:
        await self.remove_children()
        self.note_namespaces()
        with contextlib.suppress(*GONE):
            await (await self.client.get(self.name)).remove()
        self.name = ""

    async def remove_children(self) -> None:
        for info in await self.client.sandboxes():
            self.names.add(info.id)
            if info.id != self.name:
                with contextlib.suppress(*GONE):
                    await (await self.client.get(info.id)).remove()

    def note_namespaces(self) -> None:
        for pid in [*tasks(sorted(self.names)), *shims(self.host.run)]:
            self.namespaces |= _namespaces(pid)

    async def leaks(self, before: Census) -> list[str]:
        """What is left when everything was removed and collected and the daemon has stopped."""
        with contextlib.suppress(*GONE):
            await self.client.store.collect()
        await self.client.close()
        await asyncio.to_thread(self.host.stop)
        left = await asyncio.to_thread(before.leaks)
        for _ in range(ENDING):  # what was killed a moment ago may still be on its way out
            if not (more := await asyncio.to_thread(self.more_leaks)):
                break
            await asyncio.sleep(0.1)
        return left + more

    def more_leaks(self) -> list[str]:
        host, left = self.host, []
        for mounted in Path(hierarchy().unified).parent.rglob("pagurus/s-*"):
            left += [f"group {mounted}"] if mounted.name in self.names else []
        left += [f"packed {path.name}" for path in (host.state / "checkpoints").iterdir()]
        left += [f"raw images {path.name}" for path in (host.run / "captures").glob("[!.]*")]
        own = _namespaces(os.getpid())
        for pid in (entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()):
            shared = _namespaces(int(pid)) & (self.namespaces - own)
            if shared and not self.foreign(int(pid)):
                left.append(f"process {pid} in {', '.join(sorted(shared))}")
        devices = _losetup(host.state / "pool.btrfs")
        left += [f"loop devices {devices}"] if len(devices) > 1 else []  # the pool stays mounted when a daemon stops
        return left

    def foreign(self, pid: int) -> bool:
        """Whether a process belongs to a sandbox of another host: the kernel uses numbers of namespaces again."""
        while pid > 1:
            with contextlib.suppress(OSError):
                parts = [Path(f"/proc/{pid}/{name}").read_text(errors="replace") for name in ("cmdline", "cgroup")]
                words = "".join(parts)
                result = set(re.findall(r"/pagurus/([\w-]+)", words)) - {"_shims"}
                if result:
                    return not result & self.names
            pid = _parent(pid)
        return False


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0  # it ended meanwhile


def _namespaces(pid: int) -> set[str]:
    result = set()
    for kind in NAMESPACES:
        with contextlib.suppress(OSError):  # it ended meanwhile
            result.add(os.readlink(f"/proc/{pid}/ns/{kind}"))
    return result


def _losetup(file: Path) -> list[str]:
    done = subprocess.run(["losetup", "-j", str(file)], capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


async def everything(options: argparse.Namespace) -> dict[str, Any]:
    directory = aftermath.directory("pagurus-recovery-", "/var/tmp")
    host = BenchHost(directory, await asyncio.to_thread(image, options.image), module="tests.crash.staged_daemon")
    host.environment[staged_daemon.WHERE] = str(directory / "stages")
    before = Census(host)
    began = time.monotonic()
    try:
        await asyncio.to_thread(host.start)
        trials = Trials(host, random.Random(options.seed), staged_daemon.Notes(directory / "stages"))
        await trials.run(options.trials)
        leaks = await trials.leaks(before)
        host.process = None
    finally:
        await asyncio.to_thread(host.clean)
    if devices := await asyncio.to_thread(_losetup, host.state / "pool.btrfs"):
        leaks.append(f"loop devices after the pool was closed: {devices}")
    names = ("trials", "killed", "equal", "without_checkpoint", "lost")
    return {
        **{name: trials.counts[name] for name in names},
        "leaks": leaks,
        "troubles": trials.troubles,
        "strikes": dict(sorted(trials.by_kind.items())),
        "under_way": {stage: trials.hit[stage] for stage in (*staged_daemon.STAGES, "nothing")},
        "seed": options.seed,
        "seconds": round(time.monotonic() - began, 1),
    }


def main(arguments: list[str]) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--image", default="debian", help="an image of this host, with python3")
    options = parser.parse_args(arguments)
    result = asyncio.run(everything(options))
    command.show(result, options)
    return 1 if result["lost"] or result["leaks"] else 0
