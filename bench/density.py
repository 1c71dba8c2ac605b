"""Many sandboxes on one host, paced like real agents: what do checkpoints cost them?

::

    pagurus bench density [--json] [--sandboxes N] [--traces FILE] [--minutes M] [--rounds R] [--turns T]

Two crowds of N sandboxes live on one daemon. Both run the same turns of real commands (git, python, pytest, gcc,
sqlite, background servers) with the same pauses in between, in which a model would think. One is checkpointed at every
turn, the other never. They run in alternation, a round of T turns each (with, without, without, with, ...), so that
what else the machine does falls on both.

The pace comes from a file of recorded agents (`--traces`: one JSON object a line, ``turns`` with ``llm_wait_s`` and
``guess``), or else from a synthetic distribution of the same shape; `pace` in the output says which. Pauses are divided
by `speedup`, so that a run ends in about M minutes; commands run at their own speed. Faster than life is harder.

`overhead_ratio`: time of all trajectories with checkpoints over without, pauses included, divided as they were.
`overhead_ratio_at_life`: the same with the pauses as long as recorded. `exposed_ms`: time that a command waited for the
checkpoint of the turn before. `skipped_share`: turns that needed no checkpoint. `bytes_stored`: what all checkpoints
added to the disk since the sandboxes were made; `bytes_full_every_turn`: what a full dump every turn would have added.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench._host import IMAGE, BenchHost, image
from daemon.engine import quantile
from sandbox import Client, ExecResult, Limits, Sandbox
from sandbox.image import ImageStore
from sandbox.pool import Pool

NAME = "bench-density"
PACKAGES = "python3,procps,iproute2,git,gcc,libc6-dev,make,sqlite3,python3-pytest".split(",")
SERVED = 0.5  # share of sandboxes in which a server runs from the start
# Without recordings: a log-normal pause, and shares of what commands do.
PAUSE_MEDIAN, PAUSE_SIGMA = 4.5, 1.0
SHARES = {"read_only": 0.30, "write": 0.36, "run": 0.20, "install": 0.10, "bg": 0.02, "unknown": 0.02}

SETUP = r"""
set -e; mkdir -p /work/src /work/tests; cd /work; export HOME=/root
cat > src/calc.py <<'E'
def add(a, b):
    return a + b
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)
if __name__ == "__main__":
    print(fib(18))
