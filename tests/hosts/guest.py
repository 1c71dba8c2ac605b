"""Run all acts on this host: ``python -m tests.hosts.guest REPORT [--no-systemd] [--only WORD] [--done FILE]``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.hosts import host_acts, package_acts, sandbox_acts
from tests.hosts.act import run_acts

WITH_ACTS = (sandbox_acts, host_acts, package_acts)  # importing them lists their acts


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("--no-systemd", action="store_true")
    parser.add_argument("--only", default="", help="acts whose group and name hold this word")
    parser.add_argument("--done", type=Path, help="names of acts, one a line, that are not run again")
    arguments = parser.parse_args()
    done = frozenset(arguments.done.read_text().splitlines()) if arguments.done else frozenset[str]()
    failed = run_acts(arguments.report, systemd=not arguments.no_systemd, only=arguments.only, done=done)
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main())
