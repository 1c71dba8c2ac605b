"""Do other people's tests pass in a sandbox as in Docker, also while it is checkpointed, killed and restored?

::

    pagurus bench suites [--json] [--suite cpython|stress-ng|programs] [--only WORD,...] [--tree FOLDER]
                         [--ways docker,sandbox,checkpoints,kills] [--pace N] [--life N]

Each suite runs whole in each way: in Docker's default container (dockerd is started here), in a sandbox, in one that is
checkpointed every --pace seconds, and in one that is also killed and restored from its last checkpoint every --life
seconds. `make test-parity` makes the tree with the suites.

Of each way: `passed`, `failed` and `skipped` tests, `seconds`, `checkpoints`, `restores`, `refused` (checkpoints, by
their reasons) and `differs`: tests with another outcome than in the first way, and both outcomes.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import re
import shlex
import signal
import sys
import time
import xml.etree.ElementTree
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness import aftermath, command
from bench.harness.own_daemon import IMAGE, BenchHost, tasks
from sandbox import Client, Limits, Sandbox
from sandbox.errors import PagurusError
from tests.conformance.parity_programs import DIFFERENCES, PROGRAMS
from tests.support.dockerd import Docker

TREE = Path("/var/lib/pagurus/parity/tree")
WAYS = ("docker", "sandbox", "checkpoints", "kills")
OUTCOMES, DONE = "/tmp/outcomes", "/tmp/done"
LIMITS = Limits(memory="2GiB", processes=4000)
TIMEOUT = 7200.0
MAX_NAMED = 200  # differences in the result

#: Modules of CPython's tests about the operating system: processes, files, signals, sockets, threads, terminals.
CPYTHON = """
    test_asyncgen test_builtin test_cmd_line test_compileall test_epoll test_eintr test_fcntl test_file test_fileio
    test_fileinput test_float test_fork1 test_ftplib test_futures test_gc test_glob test_grp test_httplib
    test_imaplib test_io test_ioctl test_json test_kqueue test_largefile test_logging test_mailbox test_mmap
    test_multiprocessing_main_handling test_openpty test_os test_pathlib test_pipes test_poll test_popen test_posix
    test_posixpath test_pty test_pwd test_queue test_random test_readline test_resource test_sched test_select
    test_selectors test_shelve test_shutil test_signal test_smtplib test_socket test_socketserver test_sqlite3
    test_stat test_structseq test_subprocess test_sys test_syslog test_tarfile test_tempfile test_thread
    test_threadedtempfile test_threading test_threading_local test_threadsignals test_time test_timeout test_tty
    test_unittest test_urllib2_localnet test_uuid test_venv test_wait3 test_wait4 test_wsgiref test_xmlrpc
    test_zipfile
"""
STRESSORS = """
    access af-alg affinity aio alarm bad-altstack branch brk bsearch cache cap chdir chmod chown chroot clock clone
    close context copy-file cpu daemon dentry dev-shm dir dirdeep dup dynlib enosys env epoll eventfd exec
    exit-group fallocate fault fcntl fiemap fifo file-ioctl flock fork fp-error fstat full funccall funcret futex
    get getdent getrandom handle hdd hrtimers inode-flags inotify io iomix itimer kcmp key kill landlock lease link
    locka lockf lockofd longjmp malloc mcontend membarrier memcpy memfd memhotplug mincore misaligned mknod mlock
    mmap mmapaddr mmapfork mprotect mq mremap msg msync munmap mutex nanosleep netdev nice null open pageswap pci
    personality pidfd ping-sock pipe pipeherd pkey poll prctl prefetch procfs pthread ptrace pty qsort radixsort
    rawsock readahead reboot regs remap rename resched resources revio rlimit rmap rseq rtc schedpolicy seal seccomp
    seek sem sem-sysv sendfile session set shm shm-sysv sigabrt sigchld sigfd sigfpe sigio signal signest sigpending
    sigpipe sigq sigrt sigsegv sigsuspend sigtrap sleep sock sockabuse sockdiag sockfd sockmany sockpair softlockup
    splice stack str switch symlink sync-file syncload sysbadaddr sysfs sysinfo sysinval tee timer timerfd
    tlb-shootdown tmpfs touch tsc tun udp udp-flood uname unshare userfaultfd utime vdso vecmath vfork vforkmany vm
    vm-rw vm-splice wait wcs xattr yield zero zlib zombie
"""


def _cpython(names: list[str]) -> str:
    return (
        "cd /tmp && LANG=C.UTF-8 python3 -m test -j2 --timeout 900 --junit-xml /tmp/junit.xml"
        f" {' '.join(names)} > /tmp/log 2>&1; cp /tmp/junit.xml {OUTCOMES}; touch {DONE}"
    )


def _read_junit(text: str) -> dict[str, str]:
    result = {}
    for case in xml.etree.ElementTree.fromstring(text).iter("testcase"):
        kinds = {child.tag for child in case} & {"skipped", "failure", "error"}
        name = case.get("name", "")
        result[name.removeprefix("test.")] = (
            "skipped" if "skipped" in kinds or case.get("result") == "skipped" else "failed" if kinds else "passed"
        )
    return result


def _programs(names: list[str]) -> str:
    """The lines of `make test-parity`, one behind another: exit code and output of each."""
    one = "timeout 240 sh -c {line} > /tmp/said 2>/dev/null; echo {name} $? $(head -c 400 /tmp/said | base64 -w 0)"
    lines = [one.format(name=_word(name), line=shlex.quote(PROGRAMS[name])) for name in names]
    return "".join(f"{line} >> {OUTCOMES}\n" for line in lines) + f"touch {DONE}"


def _read_programs(text: str) -> dict[str, str]:
    result = {}
    for name, code, *said in (line.split() for line in text.splitlines()):
        output = base64.b64decode("".join(said)).decode(errors="replace")
        result[name] = f"{'passed' if code == '0' else f'exit {code}'} {output!r}"
    return result


def _word(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_,-]", "-", name)


def _stress(names: list[str]) -> str:
    one = "stress-ng --$s 2 --timeout 3s --no-rand-seed --temp-path /tmp/s >/dev/null 2>&1"
    return (
        f"mkdir -p /tmp/s; for s in {' '.join(names)}; do {one}; echo $s $? >> {OUTCOMES};"
        f" rm -rf /tmp/s/*; done; touch {DONE}"
    )


def _read_stress(text: str) -> dict[str, str]:
    """stress-ng exits with 0: successful, 2: failed, 3: no resources, 4: not implemented, 5: killed by a signal."""
    codes = dict(line.split() for line in text.splitlines())
    existing = {"0": "passed", "3": "skipped", "4": "skipped"}
    return {name: existing.get(code, f"exit {code}") for name, code in codes.items()}


@dataclass(frozen=True)
class Suite:
    """Tests of somebody else: which, the line that runs them, and what their outcomes file says of each."""

    names: list[str]
    line: Callable[[list[str]], str]
    read: Callable[[str], dict[str, str]]


SUITES = {
    "cpython": Suite(CPYTHON.split(), _cpython, _read_junit),
    "programs": Suite([name for name in PROGRAMS if name not in DIFFERENCES], _programs, _read_programs),
    "stress-ng": Suite(STRESSORS.split(), _stress, _read_stress),
}


@dataclass
class Course:
    """One way of a suite."""

    outcomes: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    checkpoints: int = 0
    restores: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def metrics(self, first: dict[str, str]) -> dict[str, Any]:
        kinds = [outcome.partition(" ")[0] for outcome in self.outcomes.values()]
        counts = Counter(kind if kind in ("passed", "skipped") else "failed" for kind in kinds)
        differs = {
            name: [first.get(name, "missing"), self.outcomes.get(name, "missing")]
            for name in sorted(first.keys() | self.outcomes.keys())
            if first.get(name) != self.outcomes.get(name)
        }
        return {
            **{name: counts[name] for name in ("passed", "failed", "skipped")},
            "seconds": round(self.seconds),
            "checkpoints": self.checkpoints,
            "restores": self.restores,
            "refused": dict(self.refused),
            "different": len(differs),
            "differs": dict(list(differs.items())[:MAX_NAMED]),
        }


def in_docker(docker: Docker, suite: Suite, names: list[str]) -> Course:
    began = time.monotonic()
    line = f"{suite.line(names)}; cat {OUTCOMES}"
    done = docker.run("run", "--rm", "--network", "none", "--memory", "2g", IMAGE, "sh", "-c", line, timeout=TIMEOUT)
    return Course(suite.read(done.stdout.decode()), time.monotonic() - began)


async def in_sandbox(client: Client, suite: Suite, names: list[str], way: str, pace: float, life: float) -> Course:
    course, began = Course(), time.monotonic()
    async with client.create(IMAGE, limits=LIMITS) as sandbox:
        await sandbox.processes.start(["sh", "-c", suite.line(names)])
        last, until = None, time.monotonic() + life
        while (await sandbox.exec(f"test -e {DONE}", ends_turn=False)).exit_code:
            if time.monotonic() - began > TIMEOUT:
                break
            await asyncio.sleep(pace)
            if way == "sandbox":
                continue
            try:
                last = await sandbox.checkpoint()
                course.checkpoints += 1
            except PagurusError as error:
                course.refused[error.message[:80]] += 1
            if way == "kills" and last is not None and time.monotonic() > until:
                await _kill(sandbox)
                await sandbox.restore(last)
                course.restores += 1
                until = time.monotonic() + life
        reported = await sandbox.exec(f"cat {OUTCOMES}", ends_turn=False)
    course.outcomes, course.seconds = suite.read(reported.stdout.decode()), time.monotonic() - began
    return course


async def _kill(sandbox: Sandbox) -> None:
    """All of its processes, as if memory had run out on the host."""
    for pid in await asyncio.to_thread(tasks, [sandbox.id]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def everything(options: argparse.Namespace) -> dict[str, Any]:
    suite = SUITES[options.suite]
    words = options.only.split(",") if options.only else [""]
    names = [name for name in suite.names if any(word in name for word in words)]
    courses: dict[str, Course] = {}
    if "docker" in options.ways:
        docker = Docker(aftermath.directory("pagurus-docker-", "/var/tmp"))
        try:
            await asyncio.to_thread(docker.bring, options.tree, IMAGE)
            courses["docker"] = await asyncio.to_thread(in_docker, docker, suite, names)
        finally:
            await asyncio.to_thread(docker.close)
    host = BenchHost(aftermath.directory("pagurus-suites-", "/var/tmp"), options.tree)
    try:
        await asyncio.to_thread(host.start)
        async with host.client() as client:
            for way in (way for way in options.ways if way != "docker"):
                courses[way] = await in_sandbox(client, suite, names, way, options.pace, options.life)
                print(json.dumps(_metrics(options, names, courses)), file=sys.stderr, flush=True)
    finally:
        await asyncio.to_thread(host.clean)
    return _metrics(options, names, courses)


def _metrics(options: argparse.Namespace, names: list[str], courses: dict[str, Course]) -> dict[str, Any]:
    first = next(iter(courses.values())).outcomes
    return {
        "suite": options.suite,
        "modules": len(names),
        **{way: course.metrics(first) for way, course in courses.items()},
        "cores": os.cpu_count(),
    }


def main(arguments: list[str]) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--suite", choices=SUITES, default="cpython")
    parser.add_argument("--only", default="", help="modules whose name holds one of these words (commas between)")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS), help="commas between")
    parser.add_argument("--pace", type=float, default=2.0, help="seconds from one checkpoint to the next")
    parser.add_argument("--life", type=float, default=20.0, help="seconds from one kill to the next")
    parser.add_argument("--tree", type=Path, default=TREE, help="file tree with the suites")
    options = parser.parse_args(arguments)
    command.show(asyncio.run(everything(options)), options)
    return 0
