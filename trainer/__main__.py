"""``python -m trainer RUN``: the process of a run, which goes on where the folder says. `pagurus train` starts it."""

from __future__ import annotations

import sys
from pathlib import Path

from trainer.run import Config, main

if __name__ == "__main__":
    raise SystemExit(main(Config(task=Path(), resume=Path(sys.argv[1]))))
