"""Try the package on real systems: ``python -m tests.hosts [SYSTEM ...] [--resume]``, or ``make test-hosts``.

For each system: a guest of Debian with Debian's own kernel is built (once) and booted, the package of ``dist/`` is
installed in it, its unit started, all acts are run, and what became of each is written to tests/hosts/results, however
the run ends: ``--resume`` runs only the acts that have no result there or failed. Then the table in docs/hosts.md is
written anew. Needs root, qemu, debootstrap, and `make package` before.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from sandbox import paths
from tests.hosts import chroot, machine, table
from tests.hosts.systems import SYSTEMS, System

TIMEOUT = 10800.0  # seconds for a system, in software emulation
START = """set -x
dpkg --force-unsafe-io -i pagurus.deb || exit 101
mkdir -p /run/systemd/system/pagurus.service.d
printf '[Service]\nTimeoutStartSec=3600\nWatchdogSec=600\n' >/run/systemd/system/pagurus.service.d/slow.conf
systemctl daemon-reload
systemctl start pagurus || { journalctl -u pagurus | tail -n 30; exit 102; }
uname -r >kernel; . /etc/os-release; echo "$PRETTY_NAME" >os; cat /sys/kernel/security/lsm >lsm
command -v gcc clang cc && exit 103
cd tree && /opt/pagurus/bin/python3.11 -B -m tests.hosts.guest /job/acts.jsonl %s
status=$?
dpkg --purge pagurus
left=$(ls -d /var/lib/pagurus /run/pagurus /etc/pagurus 2>/dev/null; pgrep pagurus-shim; grep pagurus /proc/self/mounts)
left=$(echo $left | tr '"' ' ')
[ -z "$left" ] && result=passed || result=failed
printf '{"group": "package", "act": "purged, it leaves nothing", "result": "%%s", "note": "%%s", "seconds": 0}\n' \
    $result "$left" >>/job/acts.jsonl
[ $result = passed ] || status=$((status + 1))
journalctl -u pagurus --output=cat >/job/daemon.log
exit $status
"""
START_IN_CHROOT = """set -x
dpkg --force-unsafe-io -i pagurus.deb || exit 101
uname -r >kernel; . /etc/os-release; echo "$PRETTY_NAME" >os; cat /sys/kernel/security/lsm >lsm
pagurus daemon --config /etc/pagurus/daemon.toml --pool-size 3GiB --stop-sandboxes >daemon.log 2>&1 &
daemon=$!
until pagurus ls || ! kill -0 $daemon; do sleep 1; done
cd tree && /opt/pagurus/bin/python3.11 -B -m tests.hosts.guest /job/acts.jsonl --no-systemd %s
status=$?
kill $daemon; wait $daemon || status=$((status + 1))
exit $status
"""
ACCELERATED = "qemu, {}, 2 processors"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("systems", nargs="*", choices=[*SYSTEMS, []], help="all without")
    parser.add_argument("--package", type=Path, help="default: the one in dist/")
    parser.add_argument("--only", default="", help="acts whose group and name hold this word; nothing is written")
    parser.add_argument("--resume", action="store_true", help="not those that passed or were absent in the last run")
    parser.add_argument("--log", type=Path, help="a directory that keeps what the guests wrote")
    arguments = parser.parse_args()
    package = arguments.package or next((paths.CHECKOUT / "dist").glob("pagurus_*.deb"), None)
    if package is None:
        raise SystemExit("error: there is no package in dist/\nhint: run `make package`")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a guest ends with this program
    failed = 0
    for name in arguments.systems or SYSTEMS:
        try:
            failed += try_one(SYSTEMS[name], package, arguments.only, arguments.log, resume=arguments.resume)
        finally:
            if not arguments.only:
                table.write()
    return min(failed, 100)


def try_one(system: System, package: Path, only: str, log: Path | None, *, resume: bool = False) -> int:
    """The number of acts that failed there."""
    with tempfile.TemporaryDirectory(prefix="pagurus-hosts-") as directory:
        job = Path(directory, "job")
        (job / "tree/tests/support").mkdir(parents=True)
        shutil.copy(paths.CHECKOUT / "tests/support/programs.py", job / "tree/tests/support")
        shutil.copytree(paths.CHECKOUT / "tests/hosts", job / "tree/tests/hosts")
        shutil.copy(package, job / "pagurus.deb")
        script = START_IN_CHROOT if system.chroot else START
        done = table.done(system) if resume else []
        (job / "done").write_text("".join(f"{item}\n" for item in done))
        (job / "start").write_text(script % ("--done /job/done" + (f" --only '{only}'" if only else "")))
        acts, shown = job / "acts.jsonl", 0

        def watch() -> None:
            nonlocal shown
            lines = acts.read_text().splitlines() if acts.exists() else []
            for line in lines[shown:]:
                result = json.loads(line)
                print(
                    f"{system.name}: {result['result']:7} {result['group']}: {result['act']} {result['note']}",
                    flush=True,
                )
            shown = len(lines)

        print(f"{system.name}: boot", flush=True)
        try:
            if system.chroot:
                status = chroot.run(job, timeout=TIMEOUT, watch=watch)
            else:
                status = machine.run(system, job, timeout=TIMEOUT, watch=watch)
        finally:
            if not only and acts.exists():
                way = "a root, no systemd" if system.chroot else ACCELERATED.format(machine.accelerator())
                table.record(system, job, way, resume=resume)
            if log is not None:
                (log / system.name).mkdir(parents=True, exist_ok=True)
                for path in (*job.iterdir(), job.parent / "serial.log"):
                    if path.is_file() and path.suffix != ".deb":  # beside them lie disks, and roots with devices
                        shutil.copy(path, log / system.name)
        if status > 100:
            raise SystemExit(
                f"error: the package does not install or start on {system.name}\n{(job / 'log').read_text()}"
            )
        return status


if __name__ == "__main__":
    sys.exit(main())
