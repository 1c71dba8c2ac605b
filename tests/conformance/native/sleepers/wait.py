"""usage: wait.py SECONDS RESULTS: waits as Python does, and tells how long it took; see ../waits.c"""

import asyncio
import os
import queue
import select
import signal
import socket
import sys
import threading
import time

SECONDS, RESULTS = float(sys.argv[1]), sys.argv[2]


def received() -> bool:
    one, other = socket.socketpair()
    one.settimeout(SECONDS)
    try:
        one.recv(1)
    except TimeoutError:
        return other.fileno() >= 0
    return False


def queued() -> bool:
    try:
        queue.Queue().get(timeout=SECONDS)
    except queue.Empty:
        return True
    return False


def slept() -> bool:
    time.sleep(SECONDS)
    return True


def polled() -> bool:
    poller = select.epoll()
    return poller.poll(SECONDS) == []


WAITS = {
    "python_sleep": slept,
    "python_select": lambda: select.select([], [], [], SECONDS) == ([], [], []),
    "python_epoll": polled,
    "python_event": lambda: threading.Event().wait(SECONDS) is False,
    "python_queue": queued,
    "python_recv": received,
    "python_sigtimedwait": lambda: signal.sigtimedwait([signal.SIGUSR1], SECONDS) is None,
    "python_asyncio": lambda: asyncio.run(asyncio.sleep(SECONDS)) is None,
}


def report(name: str, place: str) -> None:
    began = time.monotonic()
    good = WAITS[name]()
    lasted = int(1e6 * (time.monotonic() - began))
    file = os.open(RESULTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(file, f"{name} {place} {int(good)} 0 {lasted}\n".encode())


for one in WAITS:
    for place in ("main", "thread"):
        if os.fork() == 0:
            if place == "main":
                report(one, place)
            else:
                other = threading.Thread(target=report, args=(one, place))
                other.start()
                other.join()
            os._exit(0)
try:
    while True:
        os.wait()
except ChildProcessError:
    pass
