"""Threads that decode a struct for the first time at the same moment: a crash of the process, unless it was learnt."""

from __future__ import annotations

import subprocess
import sys

STORM = """
import sys, threading
import msgspec
from sandbox import structs

sys.setswitchinterval(1e-6)
for round in range(300):
    inner = msgspec.defstruct("Inner", [(f"a{n}", "int | str | None") for n in range(30)], module="sandbox.here")
    outer = msgspec.defstruct("Outer", [(f"f{n}", list[inner]) for n in range(20)], module="sandbox.here")
    structs.learn()
    data = msgspec.msgpack.encode({f"f{n}": [{f"a{k}": k for k in range(30)}] for n in range(20)})
    together = threading.Barrier(4)

    def decode():
        together.wait()
        msgspec.msgpack.decode(data, type=outer)

    threads = [threading.Thread(target=decode) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
print("whole")
"""


def test_threads_decode_the_same_struct_for_the_first_time() -> None:
    done = subprocess.run([sys.executable, "-c", STORM], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr
