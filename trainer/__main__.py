"""``python -m trainer RUN``: the trainer's process of a run, which continues where the directory says.

`pagurus train` starts it, together with the rollout (``python -m rollout RUN``). A rollout on another host is named by
its URL; its token and its certificate (or the fingerprint of that) come from the environment: PAGURUS_ROLLOUT_TOKEN and
PAGURUS_ROLLOUT_CA.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rollout.service.client import RolloutClient
from trainer.config import TrainConfig
from trainer.run import main, warm


def client(url: str) -> RolloutClient:
    environment = os.environ
    return RolloutClient(url, token=environment.get("PAGURUS_ROLLOUT_TOKEN"), ca=environment.get("PAGURUS_ROLLOUT_CA"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m trainer", description="The trainer's process of a run.")
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("--wait", action="store_true", help="begin when a line comes on stdin, not at all at its end")
    parser.add_argument("--rollout", help="https://HOST:PORT of a rollout elsewhere; else the run directory's own")
    parser.add_argument("--elsewhere", action="store_true", help="the rollout is where the run directory says")
    parser.add_argument("--at", default="", help="address of this machine, for others that have ranks")
    options = parser.parse_args()
    if options.wait:
        warm()
        if not sys.stdin.buffer.readline():
            raise SystemExit(0)
    away = client(options.rollout) if options.rollout else None
    if options.elsewhere:
        away = RolloutClient.elsewhere(options.run)
    raise SystemExit(main(TrainConfig(task=Path(), resume=options.run), client=away, address=options.at))
