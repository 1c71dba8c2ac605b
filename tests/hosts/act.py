"""What an act on a host is: a function that raises when the host does not do what it should.

Runs where Pagurus is installed, with its public interface and the standard library alone, as a program of a stranger
would.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from sandbox import PagurusError
from sandbox.sync import Client, Sandbox

IMAGE = "debian"
TIMEOUT = 900.0  # seconds for what takes one on a machine: emulated ones are fifty times as slow


class Absent(Exception):
    """This host lacks a capability, and said so as documented."""


@dataclass(frozen=True)
class Host:
    """What an act works on."""

    client: Client
    sandbox: Sandbox  # of all acts of a group
    systemd: bool

    def need_systemd(self) -> None:
        """Raises Absent in a container, where no systemd runs the daemon."""
        if not self.systemd:
            raise Absent("no systemd here")


Work = Callable[[Host], None]
ACTS: dict[str, dict[str, Work]] = {}  # by group and name, in order


def act(group: str, name: str) -> Callable[[Work], Work]:
    """The act `name` of `group`, such as ``act("limits", "memory")``."""

    def add(work: Work) -> Work:
        if name in ACTS.setdefault(group, {}):
            raise ValueError(f"{group}: {name} is listed twice")
        ACTS[group][name] = work
        return work

    return add


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Return once `condition` holds."""
    until = time.monotonic() + TIMEOUT
    while not condition():
        if time.monotonic() > until:
            raise AssertionError(f"timed out waiting for {what}")
        time.sleep(0.2)


def output(*command: str) -> str:
    """What a program of the host prints. Raises when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, f"{command[0]} exited with {done.returncode}: {(done.stderr or done.stdout)[-400:]}"
    return done.stdout


def run_acts(report: Path, *, systemd: bool, only: str = "", done: Collection[str] = ()) -> int:
    """Run all acts but those named in `done`, each line of `report` being the result of one. How many failed."""
    failed = 0
    with report.open("a") as lines:
        for group, acts in ACTS.items():
            target = {
                name: work for name, work in acts.items() if only in (full := f"{group}: {name}") and full not in done
            }
            if not target:
                continue
            with Client() as client, client.create(IMAGE) as sandbox:
                for name, work in target.items():
                    result = _run(group, name, work, Host(client, sandbox, systemd))
                    failed += result["result"] == "failed"
                    print(
                        f"{result['result']:7} {result['seconds']:6} s  {group}: {name}  {result['note']}", flush=True
                    )
                    lines.write(json.dumps(result) + "\n")
                    lines.flush()
    return failed


def _run(group: str, name: str, work: Work, host: Host) -> dict[str, object]:
    began = time.monotonic()
    result, note = "passed", ""
    try:
        work(host)
    except Absent as absence:
        result, note = "absent", str(absence)
    except (AssertionError, PagurusError, OSError, subprocess.SubprocessError, LookupError, ValueError) as error:
        result, note = "failed", f"{type(error).__name__}: {error}".splitlines()[0][:300]
        traceback.print_exc(limit=-3, file=sys.stderr)
    seconds = round(time.monotonic() - began, 1)
    return {"group": group, "act": name, "result": result, "note": note, "seconds": seconds}
