"""Which signals ask a program of ours to end, however it was started.

Guarantee: SIGTERM always does. SIGINT and SIGHUP do unless who started the program had them ignored: a shell does so
with SIGINT for `&` in a script, and `nohup` with SIGHUP. Python then makes no KeyboardInterrupt, so nothing of ours may
turn one signal into another.
"""

from __future__ import annotations

import signal


def termination_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, and those of SIGINT and SIGHUP that are not ignored. To be called before handlers are set."""
    others = (signal.SIGINT, signal.SIGHUP)
    return (signal.SIGTERM, *(number for number in others if signal.getsignal(number) != signal.SIG_IGN))
