"""Does a coding agent's afternoon on a C++ project go in a sandbox as in Docker?

::

    pagurus bench afternoon [--json] [--tree FOLDER]

The commands of COMMANDS, one after another, as a user with passwordless sudo: in one of Docker's default containers
(dockerd is started here), in a sandbox whose every turn is captured, and in one that is also killed and restored to its
last turn after every fourth. `make test-parity` makes the tree.

Of each way: `seconds`, `captured` turns, `restores`, and `differs`: commands with another exit code or output than in
Docker, with both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from bench.harness import aftermath, command
from bench.harness.own_daemon import IMAGE, BenchHost, tasks
from sandbox import Client, Limits, Sandbox
from tests.support.dockerd import Docker

TREE = Path("/var/lib/pagurus/parity/tree")
LIMITS = Limits(memory="2GiB", processes=1000)
TIMEOUT = 300.0
USER = "dev"
KILLED_AFTER = 4  # turns
PREPARE = f"useradd -m -s /bin/bash {USER} && echo '{USER} ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/{USER}"

_PROJECT = """cat > CMakeLists.txt <<'E'
cmake_minimum_required(VERSION 3.10)
project(ring CXX)
set(CMAKE_CXX_STANDARD 17)
add_executable(check check.cpp ring.cpp)
E
cat > ring.hpp <<'E'
#pragma once
#include <cstddef>
struct Ring { explicit Ring(std::size_t size); void push(int value); int pop(); std::size_t count = 0;
    private: int *data; std::size_t size, head = 0, tail = 0; };
E
cat > ring.cpp <<'E'
#include "ring.hpp"
#include <stdexcept>
Ring::Ring(std::size_t size) : data(new int[size]), size(size) {}
void Ring::push(int value) { data[tail] = value; tail = (tail + 1) % (size + 1); count++; }
int Ring::pop() { if (!count) throw std::out_of_range("empty"); int v = data[head]; head = (head + 1) % (size + 1);
    count--; return v; }
E
cat > check.cpp <<'E'
#include "ring.hpp"
#include <cassert>
#include <cstdio>
int main() { Ring r(4); for (int i = 0; i < 40; i++) { r.push(i); assert(r.pop() == i); } std::puts("good"); }
E
"""

#: As typed into a shell.
_TYPED = (
    """mkdir -p ~/ring && git -C ~/ring init -q && git config --global user.name dev
git config --global user.email dev@localhost""",
    _PROJECT + "git add -A && git commit -qm begin && git log --format=%s",
    "cmake -S . -B build -DCMAKE_CXX_COMPILER_LAUNCHER=ccache > log 2>&1; tail -n 1 log | cut -c 1-20",
    "cmake --build build -j2 2>&1 | grep -c 'Built target'",
    "cmake -S . -B asan -DCMAKE_CXX_FLAGS='-g -fsanitize=address' > log && cmake --build asan | tail -n 1",
    "./asan/check 2>&1 | grep -oE 'heap-buffer-overflow|in Ring::push[^ ]*'; echo ${PIPESTATUS[0]}",
    """g++ -g -O0 check.cpp ring.cpp -o plain
gdb -q -batch -ex 'break Ring::push' -ex run -ex bt ./plain 2>/dev/null | grep -oE '^#0  Ring::push|in main'""",
    r"sed -i 's/new int\[size\]/new int[size + 1]/' ring.cpp && git diff --stat | tail -n 1",
    "cmake --build asan | grep -c Building; ./asan/check 2>&1 | grep -oE '^good|LeakSanitizer: detected'",
    "sed -i 's/explicit Ring(std::size_t size);/& ~Ring() { delete[] data; }/' ring.hpp && git diff --stat | tail -n 1",
    "cmake --build asan > log && ./asan/check; echo $?",
    "cmake --build build > log && ccache -s | grep -c -i hits && ./build/check",
    "valgrind -q --error-exitcode=7 ./build/check; echo $?",
    "strace -f -o t -e trace=execve ./build/check && grep -c execve t",
    "cmake -S . -B tsan -DCMAKE_CXX_FLAGS=-fsanitize=thread > log && cmake --build tsan | tail -n 1",
    "./tsan/check; echo $?",
    r"""mkdir -p ~/deb/DEBIAN ~/deb/usr/local/bin && cp build/check ~/deb/usr/local/bin/ring-check
printf 'Package: ring\nVersion: 1\nArchitecture: amd64\nMaintainer: d <d@l>\nDescription: r\n' > ~/deb/DEBIAN/control
dpkg-deb -b ~/deb /tmp/ring.deb | cut -d' ' -f 1-3""",
    "sudo apt-get install -y /tmp/ring.deb 2>/dev/null | grep -E 'newly|Setting up'; ring-check",
    "sudo -n whoami; sudo sh -c 'echo 1 > /etc/ring.conf' && stat -c '%U %a' /etc/ring.conf",
    """(python3 -m http.server 8000 > /dev/null 2>&1 & echo $! > /tmp/pid)
until python3 -c 'import urllib.request as u
print(u.urlopen("http://127.0.0.1:8000/ring.hpp").read()[:12])' 2>/dev/null; do sleep 0.2; done""",
    """python3 -c 'import urllib.request as u; print(u.urlopen("http://127.0.0.1:8000/ring.cpp").status)'
kill $(cat /tmp/pid)""",
    "git add ring.cpp ring.hpp && git commit -qm 'mend the ring' && git log --format=%s && git status -s | wc -l",
    "sudo apt-get remove -y ring 2>/dev/null | grep -E '^Removing'; which ring-check; echo $?",
)
COMMANDS = tuple(f"cd ~/ring 2>/dev/null\n{typed}" for typed in _TYPED)


class Course:
    """What one way came to."""

    def __init__(self) -> None:
        self.outcomes: list[tuple[int, str]] = []
        self.captured = self.restores = 0
        self.began = time.monotonic()
        self.seconds = 0.0

    def metrics(self, target: list[tuple[int, str]]) -> dict[str, Any]:
        return {
            "seconds": round(self.seconds),
            "captured": self.captured,
            "restores": self.restores,
            "differs": [
                {"command": typed[:80], "docker": there, "here": here}
                for typed, there, here in zip(_TYPED, target, self.outcomes, strict=True)
                if there != here
            ],
        }


def in_docker(docker: Docker) -> Course:
    course = Course()
    options = ("--network", "none", "--memory", "2g", "--name", USER)
    docker.run("run", "-d", *options, IMAGE, "sleep", "infinity")
    docker.run("exec", USER, "bash", "-c", PREPARE)
    for line in COMMANDS:
        done = docker.run("exec", "-u", USER, USER, "bash", "-c", line, timeout=TIMEOUT)
        course.outcomes.append((done.returncode, done.stdout.decode()))
    docker.run("rm", "-f", USER)
    course.seconds = time.monotonic() - course.began
    return course


async def in_sandbox(client: Client, *, killed: bool) -> Course:
    course = Course()
    async with client.create(IMAGE, limits=LIMITS) as sandbox:
        await sandbox.exec(PREPARE)
        for number, line in enumerate(COMMANDS, 1):
            done = await sandbox.exec(["bash", "-c", line], user=USER, timeout=TIMEOUT)
            course.outcomes.append((done.exit_code, done.text))
            if done.checkpoint:
                await sandbox.captured(done)
                course.captured += 1
            if killed and number % KILLED_AFTER == 0:
                await _kill(sandbox)
                await sandbox.restore(verify=True)
                course.restores += 1
    course.seconds = time.monotonic() - course.began
    return course


async def _kill(sandbox: Sandbox) -> None:
    for pid in await asyncio.to_thread(tasks, [sandbox.id]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def everything(options: argparse.Namespace) -> dict[str, Any]:
    docker = Docker(aftermath.directory("pagurus-docker-", "/var/tmp"))
    try:
        await asyncio.to_thread(docker.bring, options.tree, IMAGE)
        courses = {"docker": await asyncio.to_thread(in_docker, docker)}
    finally:
        await asyncio.to_thread(docker.close)
    host = BenchHost(aftermath.directory("pagurus-afternoon-", "/var/tmp"), options.tree)
    try:
        await asyncio.to_thread(host.start)
        async with host.client() as client:
            courses["sandbox"] = await in_sandbox(client, killed=False)
            courses["killed"] = await in_sandbox(client, killed=True)
    finally:
        await asyncio.to_thread(host.clean)
    target = courses["docker"].outcomes
    return {
        "commands": len(COMMANDS),
        **{way: course.metrics(target) for way, course in courses.items()},
        "outcomes": [[code, text[:200]] for code, text in target],
    }


def main(arguments: list[str]) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--tree", type=Path, default=TREE, help="file tree with the programs")
    options = parser.parse_args(arguments)
    result = asyncio.run(everything(options))
    command.show(result, options)
    return 1 if result["sandbox"]["differs"] or result["killed"]["differs"] else 0
