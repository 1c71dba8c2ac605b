"""Try the package on real systems: ``python -m tests.hosts [SYSTEM ...] [--resume]``, or ``make test-hosts``.

For each system: a guest of Debian with Debian's own kernel is built (once) and booted, the package of ``dist/`` is
installed in it, its unit started, all acts are run, and what became of each is written to tests/hosts/results, however
the run ends: ``--resume`` runs only the acts that have no result there or failed. Then the table in docs/hosts.md is
written anew. Needs root, qemu, debootstrap, and `make package` before.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import hypothesis

from sandbox import paths
from tests.hosts import benches, chroot, container, machine, table
from tests.hosts.systems import SYSTEMS, System

TIMEOUT = 10800.0  # seconds for a system, in software emulation
STARTS = {
    "guest": """bash tree/tests/hosts/guest.sh "$@"
""",
    "chroot": """set -x
dpkg --force-unsafe-io -i pagurus.deb || exit 101
. tree/tests/hosts/package.sh
note_system
pagurus daemon --config /etc/pagurus/daemon.toml --pool-size 3GiB --stop-sandboxes >daemon.log 2>&1 &
daemon=$!
until pagurus ls || ! kill -0 $daemon; do sleep 1; done
run_acts --no-systemd "$@"
status=$?
kill $daemon; wait $daemon || status=$((status + 1))
exit $status
""",
    "container": """set -x
. tree/tests/hosts/package.sh
note_system
run_acts --no-systemd "$@"
""",
}
WAYS = {"chroot": "a root, no systemd", "container": "Docker, no systemd"}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("systems", nargs="*", choices=[*SYSTEMS, []], help="all without")
    parser.add_argument("--package", type=Path, help="default: the one in dist/")
    parser.add_argument("--only", default="", help="acts whose group and name hold this word; nothing is written")
    parser.add_argument("--resume", action="store_true", help="not those that passed or were absent in the last run")
    parser.add_argument("--benches", action="store_true", help="the short benches without KVM too, which takes hours")
    parser.add_argument("--log", type=Path, help="a directory that keeps what the guests wrote")
    arguments = parser.parse_args()
    package = arguments.package or next((paths.CHECKOUT / "dist").glob("pagurus_*.deb"), None)
    if package is None:
        raise SystemExit("error: there is no package in dist/\nhint: run `make package`")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a guest ends with this program
    failed = 0
    for name in arguments.systems or SYSTEMS:
        try:
            failed += try_one(SYSTEMS[name], package, arguments)
        finally:
            if not arguments.only:
                table.write()
    return min(failed, 100)


def try_one(system: System, package: Path, arguments: argparse.Namespace) -> int:
    """The number of acts that failed there."""
    only, log, resume = arguments.only, arguments.log, arguments.resume
    with tempfile.TemporaryDirectory(prefix="pagurus-hosts-") as directory:
        job = Path(directory, "job")
        (job / "tree/tests/support").mkdir(parents=True)
        shutil.copy(paths.CHECKOUT / "tests/support/programs.py", job / "tree/tests/support")
        shutil.copytree(paths.CHECKOUT / "tests/hosts", job / "tree/tests/hosts")
        shutil.copy(package, job / "pagurus.deb")
        done = table.done(system) if resume else []
        (job / "done").write_text("".join(f"{item}\n" for item in done))
        options = shlex.join(["--done", "/job/done", *(["--only", only] if only else [])])
        (job / "start").write_text(f"set -- {options}\n{STARTS[system.way]}")
        if system.way == "guest" and (arguments.benches or machine.accelerator_of(system) == "kvm"):
            copy_checkout(job / "checkout")
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

        way = WAYS.get(system.way) or f"qemu, {machine.accelerator_of(system)}, 2 processors"
        print(f"{system.name}: boot, {way}", flush=True)
        try:
            run = {"guest": machine.run, "chroot": chroot.run, "container": container.run}[system.way]
            status = run(system, job, timeout=TIMEOUT, watch=watch)
        finally:
            if not only and acts.exists():
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


def copy_checkout(into: Path) -> None:
    """What the benches are made of, and the libraries that they need beside those of the package."""
    ignored = shutil.ignore_patterns("__pycache__", "node_modules", "built")
    for name in benches.COPIED:
        shutil.copytree(paths.CHECKOUT / name, into / name, ignore=ignored)
    libraries = Path(hypothesis.__file__).parent.parent
    for path in (*(libraries / name for name in benches.LIBRARIES), *libraries.glob("_hypothesis_*.py")):
        (shutil.copytree if path.is_dir() else shutil.copy)(path, into / path.name)


if __name__ == "__main__":
    sys.exit(main())
