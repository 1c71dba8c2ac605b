"""Programs that tests start: each ends with its test, within a bound, whatever became of the test.

`subprocess.Popen` waits without limit at the end of a `with` block, so that not even pytest-timeout can end a test
whose program does not end. tests/test_layering.py holds tests to this module.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any

END_TIMEOUT = 60.0  # seconds; a machine on which everything takes ten times as long must not be taken for a hang


class Program(subprocess.Popen[Any]):
    """A process that a `with` block ends by SIGTERM. One that ignores it is killed, and the test fails."""

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        ignored = False
        if self.poll() is None:
            self.terminate()
            try:
                self.wait(END_TIMEOUT)
            except subprocess.TimeoutExpired:
                ignored = True
                self.destroy()
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        assert not ignored, f"SIGTERM does not end {self.args!r}"

    def destroy(self) -> None:
        """kill -9: no chance to tidy up."""
        self.kill()
        self.wait(END_TIMEOUT)


def in_foreground(argv: Sequence[str]) -> list[str]:
    """The command line as a terminal starts it, also where the tests themselves were started in the background."""
    return ["env", "--default-signal=INT,HUP", *argv]


def in_background(argv: Sequence[str]) -> list[str]:
    """The command line as a script's `nohup PROGRAM &` starts it: SIGINT and SIGHUP are ignored from the beginning."""
    return ["sh", "-c", 'trap \'\' INT HUP; exec "$0" "$@"', *argv]
