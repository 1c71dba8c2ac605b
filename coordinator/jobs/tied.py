"""A process that ends with the one that started it, however that ends: it holds the writing end of our stdin.

Needs nothing of training: the coordinator imports it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from typing import IO


def begin(argv: Sequence[str], out: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """Start a process that calls `tie`."""
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True)


def tie() -> None:
    """End by SIGTERM when who started us is gone. Unblocks what ends us, here and for what we start: threads of Ray's
    workers have SIGINT and SIGTERM blocked."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM])

    def wait() -> None:
        while os.read(0, 1 << 12):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True, name="ends with its parent").start()
