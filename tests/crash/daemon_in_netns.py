"""A daemon in a network namespace, as if it were a host of its own. `WHERE` names the namespace.

Whoever started it listens for its readiness in the namespace outside, so it is spoken to by a socket made there.
"""

import contextlib
import os
import socket
import sys

from pyroute2 import netns

WHERE = "PAGURUS_BENCH_NETNS"

if __name__ == "__main__":
    outside = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    outside.connect("\0" + os.environ.pop("NOTIFY_SOCKET")[1:])
    netns.setns(os.environ[WHERE])
    from daemon import app

    def notify(state: str) -> None:
        with contextlib.suppress(OSError):  # whoever listened has heard that it is ready, and is gone
            outside.send(state.encode())

    app.notify = notify  # type: ignore[attr-defined]
    sys.exit(app.main())
