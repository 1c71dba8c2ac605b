"""Do other people's tests pass in a sandbox as in Docker, also while it is checkpointed, killed and restored?

::

    pagurus bench suites [--json] [--suite cpython|regrtest|stress-ng|go|glib|programs] [--only WORD,...]
                         [--tree FOLDER] [--ways docker,docker,sandbox,checkpoints,kills] [--pace N] [--life N]
                         [--record FOLDER]

Each suite runs whole in each way: in Docker's default container (dockerd is started here), in a sandbox, in one that is
checkpointed every --pace seconds, and in one that is also killed and restored from its last checkpoint every --life
seconds. Docker runs as often as it is named: a test that ends now so, now so in Docker itself may end either way here.
`make test-parity` makes the tree with the suites. A way whose outcomes lie in --record is not run again.

Of each way: `passed`, `failed` and `skipped` tests, `seconds`, `checkpoints`, `restores`, `refused` (checkpoints, by
their reasons) and `differs`: tests with an outcome that no run in Docker (or else of the first way) had, and the
outcomes of both.
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
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.harness import aftermath, command
from bench.harness.own_daemon import IMAGE, BenchHost, tasks
from sandbox import Client, Limits, Retention, Sandbox
from sandbox.errors import NotFound, PagurusError
from tests.conformance.parity_programs import DIFFERENCES, PROGRAMS
from tests.support.dockerd import Docker

TREE = Path("/var/lib/pagurus/parity/tree")
WAYS = ("docker", "docker", "sandbox", "checkpoints", "kills")
OUTCOMES, DONE = "/tmp/outcomes", "/tmp/done"
GLIB = "/usr/share/installed-tests/glib"
LIMITS = Limits(memory="2GiB", processes=4000)
RETENTION = Retention(last=4)  # what older checkpoints hold of removed files would count against the disk limit
#: No network, but a host name that resolves, as with Docker's default network.
NAME = "parity"
DOCKER = [
    "--network",
    "none",
    "--memory",
    "2g",
    "--pids-limit",
    "4000",
    "--hostname",
    NAME,
    "--add-host",
    f"{NAME}:127.0.0.1",
]
DISK = 6 << 30  # bytes for Docker
TIMEOUT = 6 * 3600.0
MAX_NAMED = 200  # differences in the result
MISSING = "missing"

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
#: Packages of Go's standard library about the operating system.
GO = """
    archive/tar archive/zip bufio compress/gzip context crypto/rand database/sql debug/elf embed expvar flag
    internal/fuzz internal/poll internal/testenv io io/fs io/ioutil log log/syslog mime/multipart net net/http/cgi
    net/http/fcgi net/http/httptest net/http/httputil net/netip net/rpc net/smtp net/textproto os os/exec os/signal
    os/user path/filepath runtime/debug runtime/metrics runtime/trace sync sync/atomic syscall testing
    text/template time
"""


def _cpython(names: list[str]) -> str:
    return (
        "cd /tmp && LANG=C.UTF-8 python3 -m test -j3 --timeout 3000 --junit-xml /tmp/junit.xml"
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
    one = "stress-ng --$s 2 --timeout 2s --no-rand-seed --temp-path /tmp/s >/dev/null 2>&1"
    return (
        f"mkdir -p /tmp/s; for s in {' '.join(names)}; do {one}; echo $s $? >> {OUTCOMES};"
        f" rm -rf /tmp/s/*; done; touch {DONE}"
    )


def _read_stress(text: str) -> dict[str, str]:
    """stress-ng exits with 0: successful, 2: failed, 3: no resources, 4: not implemented, 5: killed by a signal."""
    codes = dict(line.split() for line in text.splitlines())
    existing = {"0": "passed", "3": "skipped", "4": "skipped"}
    return {name: existing.get(code, f"exit {code}") for name, code in codes.items()}


def _listed(tree: Path, *program: str) -> list[str]:
    """What a program of the tree lists."""
    listed = subprocess.run(["chroot", tree, *program], check=True, capture_output=True, text=True)
    return listed.stdout.split()


def _go(names: list[str]) -> str:
    return (
        "cd $(go env GOROOT)/src && HOME=/tmp go test -short -json -timeout 50m"
        f" {' '.join(names)} > {OUTCOMES} 2>/tmp/log; touch {DONE}"
    )


def _read_go(text: str) -> dict[str, str]:
    outcomes = {"pass": "passed", "fail": "failed", "skip": "skipped"}
    events = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {
        f"{event['Package']}.{event.get('Test', '')}": outcomes[event["Action"]]
        for event in events
        if event["Action"] in outcomes
    }


def _glib(names: list[str]) -> str:
    """GLib's installed tests: their lines of TAP, each behind the name of its program, and how the program ended."""
    one = (
        f"rm -rf /tmp/g; mkdir /tmp/g; cd /tmp/g; line=$(sed -n s/^Exec=//p {GLIB}/$t.test); G_TEST_SLOW=0"
        f' timeout 3000 sh -c "$line" > /tmp/tap 2>/dev/null; echo "exit $?" >> /tmp/tap; sed "s|^|$t |" /tmp/tap'
    )
    return f"export XDG_RUNTIME_DIR=/tmp; for t in {' '.join(names)}; do {one} >> {OUTCOMES}; done; touch {DONE}"


def _read_glib(text: str) -> dict[str, str]:
    result = {}
    for line in text.splitlines():
        if ended := re.fullmatch(r"(\S+) exit (\d+)", line):
            result[ended[1]] = "passed" if ended[2] == "0" else f"exit {ended[2]}"
        elif found := re.fullmatch(r"(\S+) (not )?ok \d+ (?:- )?(\S+)(.*)", line):
            outcome = "skipped" if "SKIP" in found[4] else "failed" if found[2] else "passed"
            name = re.sub(r"seed:\d+", "seed", found[3])
            result[f"{found[1]} {name}"] = outcome
    return result


@dataclass(frozen=True)
class Suite:
    """Tests of somebody else: which a tree has, the line that runs them, what their outcomes file says of each."""

    names: Callable[[Path], list[str]]
    line: Callable[[list[str]], str]
    read: Callable[[str], dict[str, str]]


SUITES = {
    "cpython": Suite(lambda tree: CPYTHON.split(), _cpython, _read_junit),
    "regrtest": Suite(lambda tree: _listed(tree, "python3", "-m", "test", "--list-tests"), _cpython, _read_junit),
    "go": Suite(lambda tree: GO.split(), _go, _read_go),
    "glib": Suite(lambda tree: sorted(path.stem for path in (tree / GLIB[1:]).glob("*.test")), _glib, _read_glib),
    "programs": Suite(lambda tree: [name for name in PROGRAMS if name not in DIFFERENCES], _programs, _read_programs),
    "stress-ng": Suite(lambda tree: _listed(tree, "stress-ng", "--stressors"), _stress, _read_stress),
}


@dataclass
class Course:
    """One way of a suite."""

    outcomes: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    checkpoints: int = 0
    restores: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    reported: str = ""  # what the suite wrote

    def metrics(self, target: Mapping[str, set[str]]) -> dict[str, Any]:
        """`target`: the outcomes that each test may have."""
        kinds = [outcome.partition(" ")[0] for outcome in self.outcomes.values()]
        counts = Counter(kind if kind in ("passed", "skipped") else "failed" for kind in kinds)
        differs = {
            name: [*sorted(target.get(name, {MISSING})), self.outcomes.get(name, MISSING)]
            for name in sorted(target.keys() | self.outcomes.keys())
            if self.outcomes.get(name, MISSING) not in target.get(name, {MISSING})
        }
        return {
            **{name: counts[name] for name in ("passed", "failed", "skipped")},
            "seconds": round(self.seconds),
            "checkpoints": self.checkpoints,
            "restores": self.restores,
            "refused": self.refused,
            "different": len(differs),
            "differs": dict(list(differs.items())[:MAX_NAMED]),
        }


def in_docker(docker: Docker, suite: Suite, names: list[str]) -> Course:
    began = time.monotonic()
    line = f"{suite.line(names)}; cat {OUTCOMES}"
    done = docker.run("run", "--rm", *DOCKER, IMAGE, "sh", "-c", line, timeout=TIMEOUT)
    text = done.stdout.decode(errors="replace")
    return Course(suite.read(text), time.monotonic() - began, reported=text)


async def in_sandbox(client: Client, suite: Suite, names: list[str], way: str, pace: float, life: float) -> Course:
    course, began = Course(), time.monotonic()
    async with client.create(IMAGE, limits=LIMITS, retention=RETENTION) as sandbox:
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
                course.refused[error.message[:80]] = course.refused.get(error.message[:80], 0) + 1
            if way == "kills" and last is not None and time.monotonic() > until:
                await _kill(sandbox)
                await sandbox.restore(last)
                course.restores += 1
                until = time.monotonic() + life
        try:
            reported = await sandbox.files.read(OUTCOMES)
        except NotFound as error:  # the suite's own program ended early
            said = await sandbox.exec("tail -c 1500 /tmp/log", ends_turn=False)
            raise PagurusError(
                f"the suite ended {way} without outcomes after {course.checkpoints} checkpoints, {course.restores}"
                f" restores: {said.stdout.decode(errors='replace')}"
            ) from error
    course.reported = reported.decode(errors="replace")
    course.outcomes, course.seconds = suite.read(course.reported), time.monotonic() - began
    return course


async def _kill(sandbox: Sandbox) -> None:
    """All of its processes, as if memory had run out on the host."""
    for pid in await asyncio.to_thread(tasks, [sandbox.id]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _disk() -> Path:
    """A folder on a file system of its own: stressors fill what they are given, and Docker limits no container here."""
    directory = aftermath.directory("pagurus-docker-", "/var/tmp")
    image, mount = directory / "disk", directory / "mount"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(DISK)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, mount], check=True)
    (mount / "docker").mkdir()
    return mount / "docker"


def _remove_disk(disk: Path) -> None:
    subprocess.run(["umount", disk.parent], check=True)
    shutil.rmtree(disk.parent.parent)


async def everything(options: argparse.Namespace) -> dict[str, Any]:
    suite = SUITES[options.suite]
    words = options.only.split(",") if options.only else [""]
    names = [name for name in suite.names(options.tree) if any(word in name for word in words)]
    record = Record(options)
    dockers, others = ([way for way in record.ways if way.startswith("docker") == docker] for docker in (True, False))
    if record.pending(dockers):
        disk = await asyncio.to_thread(_disk)
        docker = Docker(disk)
        try:
            await asyncio.to_thread(docker.bring, options.tree, IMAGE)
            for way in record.pending(dockers):
                record.add(way, await asyncio.to_thread(in_docker, docker, suite, names))
        finally:
            await asyncio.to_thread(docker.close)
            await asyncio.to_thread(_remove_disk, disk)
    if record.pending(others):
        host = BenchHost(aftermath.directory("pagurus-suites-", "/var/tmp"), options.tree)
        try:
            await asyncio.to_thread(host.start)
            async with host.client() as client:
                for way in record.pending(others):
                    record.add(way, await in_sandbox(client, suite, names, way, options.pace, options.life))
        finally:
            await asyncio.to_thread(host.clean)
    return {"suite": options.suite, "modules": len(names), **record.metrics(), "cores": os.cpu_count()}


class Record:
    """The ways of a suite that have been run, by name: `docker`, `docker-2`, `sandbox`; a folder keeps them."""

    def __init__(self, options: argparse.Namespace):
        ways = options.ways
        self.ways = [f"{way}-{ways[: at + 1].count(way)}" if way in ways[:at] else way for at, way in enumerate(ways)]
        self._folder: Path | None = options.record
        self._courses: dict[str, Course] = {}
        for way in self.ways:
            if self._folder is not None and (path := self._folder / f"{options.suite}-{way}.json").exists():
                self._courses[way] = Course(**json.loads(path.read_text()))
        self._suite = options.suite

    def pending(self, ways: list[str]) -> list[str]:
        return [way for way in ways if way not in self._courses]

    def add(self, way: str, course: Course) -> None:
        self._courses[way] = course
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / f"{self._suite}-{way}.json").write_text(json.dumps(asdict(course)))
        print(json.dumps(self.metrics()), file=sys.stderr, flush=True)

    def metrics(self) -> dict[str, Any]:
        existing = [way for way in self.ways if way in self._courses]
        first = [way for way in existing if way.startswith("docker")] or existing[:1]
        names = {name for way in first for name in self._courses[way].outcomes}
        target = {name: {self._courses[way].outcomes.get(name, MISSING) for way in first} for name in names}
        return {way: self._courses[way].metrics(target) for way in existing}


def main(arguments: list[str]) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--suite", choices=SUITES, default="cpython")
    parser.add_argument("--only", default="", help="modules whose name holds one of these words (commas between)")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS), help="commas between")
    parser.add_argument("--pace", type=float, default=2.0, help="seconds from one checkpoint to the next")
    parser.add_argument("--life", type=float, default=20.0, help="seconds from one kill to the next")
    parser.add_argument("--record", type=Path, help="a folder that keeps the outcomes of each way")
    parser.add_argument("--tree", type=Path, default=TREE, help="file tree with the suites")
    options = parser.parse_args(arguments)
    command.show(asyncio.run(everything(options)), options)
    return 0
