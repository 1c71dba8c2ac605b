"""What the program says when something is wrong: words for a person, which say what would be right."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagurus.sandboxes.run import mounts, seconds
from sandbox.errors import Invalid
from tests.support.daemon_host import Daemon, missing

needs_host = pytest.mark.skipif(bool(missing()), reason=missing())


def pagurus(host: Daemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PAGURUS_RUN": str(host.run), "COLUMNS": "120"}
    command = [sys.executable, "-m", "pagurus", *arguments]
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def box(daemon: Daemon) -> Iterator[str]:
    """A sandbox named web whose first checkpoint has the label `before the upgrade`."""
    made = pagurus(daemon, "run", "--name", "web", "--label", "job=7", "debian")
    assert made.returncode == 0, made.stderr
    assert pagurus(daemon, "checkpoint", "web", "--label", "before the upgrade").returncode == 0
    yield made.stdout.strip()
    assert pagurus(daemon, "rm", "--all").returncode == 0
    assert pagurus(daemon, "ls", "--json").stdout == "[]\n"


@needs_host
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["run", "--memory", "900GiB", "debian"], 125, "900GiB of memory are more than this host has: "),
        (["run", "--memory", "900GiB", "debian"], 125, "(ask for less, or for no limit (None))"),
        (["run", "--memory", "much", "debian"], 125, "not a size: 'much' (write it like 512MiB or 1GiB)"),
        (["run", "--cpus", "0", "debian"], 125, "limits.cpus must be at least 0.01"),
        (["run", "--name", "my box", "debian"], 125, "'my box' is no name for a sandbox (use up to 64 letters, digits"),
        (["run", "--name", "my box", "debian"], 125, "such as my-box)"),
        (["run", "--network", "foo", "debian"], 125, "there is no network foo (--network is none, allow or open)"),
        (["run", "--label", "x", "debian"], 125, "--label 'x' has no value (write --label NAME=VALUE)"),
        (["run", "--env", "x", "debian"], 125, "--env 'x' has no value (write --env NAME=VALUE)"),
        (["run", "--mount", "/a", "debian"], 125, "not a mount: '/a' (write --mount /of/this/host:/in/the/sandbox;"),
        (["run", "--lifetime", "soon", "debian"], 125, "not a time: 'soon' (write it like 90s, 15m, 2h or 1d)"),
        (["run", "debian", "--name", "x"], 2, "options go before the image: --name stands behind it (write pagurus"),
        (["run", "debian-12"], 125, "debian-12"),
        (
            ["exec", "web", "-it", "bash"],
            2,
            "options go before the sandbox: -it stands behind it (write pagurus exec",
        ),
        (["exec", "nosuch", "true"], 125, "no such sandbox: nosuch (list those there are with `pagurus ls`)"),
        (["exec", "web", "nosuch"], 127, "nosuch: no such program"),
        (["restore", "web", "c-none"], 1, "no such checkpoint: c-none (list those there are with `pagurus tree`)"),
        (["fork", "nosuch"], 1, "no sandbox and no checkpoint is called nosuch (`pagurus ls` and `pagurus tree` list"),
        (["fork", "web", "--count", "2000"], 1, "count must lie between 1 and 1024, not 2000"),
        (["checkpoint", "web", "a", "--label", "b"], 1, "two labels: 'a' and 'b' (give one)"),
        (["rm"], 1, "remove which? (name sandboxes, or say --run, --label or --all)"),
        (["rm", "web", "--all"], 1, "remove which? (name sandboxes, or say --run, --label or --all)"),
        (["port-forward", "web", "http"], 1, "not a pair of ports: 'http' (write LOCAL:REMOTE, such as 8080:80"),
        (["net", "web", "--network", "foo"], 1, "there is no network foo (--network is none, allow or open)"),
        (["attach", "runs/nosuch"], 1, "there is no run directory runs/nosuch (name one, such as runs/latest)"),
        (["jobs"], 1, "no such route: /v1/cluster/jobs (ask a coordinator, whose socket or address PAGURUS_HOST names"),
        (["gateway", "set", "a b", "http://x"], 1, "no upstream may be called 'a b' (letters, digits, dots, dashes)"),
        (["gateway", "set", "a", "x"], 1, "url must be an address that begins with http:// or https://"),
        (
            ["token", "create", "x", "--owner", "a b"],
            1,
            "owner must be 1 to 64 letters, digits, dots, dashes and under",
        ),
    ],
)
def test_a_refusal_says_what_would_be_right(daemon: Daemon, box: str, words: list[str], code: int, said: str) -> None:
    done = pagurus(daemon, *words)
    assert said in done.stderr, done.stderr
    assert (done.returncode, done.stdout) == (code, "")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    for unwanted in ("Traceback", "regex", "$.", "Request", "`int`", "`str`"):
        assert unwanted not in done.stderr


@needs_host
def test_ids_may_be_cut_off_and_checkpoints_called_by_their_label(daemon: Daemon, box: str) -> None:
    start = box[:6]
    assert pagurus(daemon, "exec", start, "echo a | tr a b").stdout == "b\n"
    restored = pagurus(daemon, "restore", start, "before the upgrade", "--verify")
    assert restored.returncode == 0 and "verified equal" in restored.stdout, restored.stderr
    checkpoint = restored.stdout.split()[0]
    assert pagurus(daemon, "diff", "web", checkpoint[:8]).returncode == 0
    forked = pagurus(daemon, "fork", "before the upgrade").stdout.strip()
    assert pagurus(daemon, "checkpoint", "verify", "before the upgrade").returncode == 0
    several = pagurus(daemon, "exec", "s-", "true")
    assert several.returncode == 125 and "no such sandbox: s-" in several.stderr
    assert pagurus(daemon, "rm", forked[:8]).returncode == 0
    listed = pagurus(daemon, "ls", "--label", "job=7").stdout
    assert box in listed and "job=7" in listed
    assert "web" not in pagurus(daemon, "ls", "--label", "job=8").stdout


@needs_host
def test_two_with_one_label_are_named(daemon: Daemon, box: str) -> None:
    twice = [pagurus(daemon, "checkpoint", "web", "twice").stdout.strip() for _ in range(2)]
    done = pagurus(daemon, "restore", "web", "twice")
    assert done.returncode == 1 and all(one in done.stderr for one in twice)
    assert "2 have the label 'twice'" in done.stderr and "use more of the id" in done.stderr


@needs_host
def test_running_out_of_memory_is_said(daemon: Daemon) -> None:
    done = pagurus(daemon, "run", "--memory", "64MiB", "debian", "perl", "-e", "$x = 'a' x (1 << 29); print 1")
    assert done.returncode == 137, done.stderr
    assert "out of memory: at the sandbox's limit of 64MiB the kernel killed a process" in done.stderr
    assert "pagurus run --memory" in done.stderr


@needs_host
def test_run_takes_what_a_sandbox_can_have(daemon: Daemon, tmp_path: object) -> None:
    words = ["--disk", "1GiB", "--label", "a=b", "--mount", "/usr/share:/host", "--scratch", "/big:16MiB"]
    words += ["--lifetime", "1h", "--idle-timeout", "30m", "--remove", "--workdir", "/srv"]
    done = pagurus(daemon, "run", *words, "debian", "--", "sh", "-c", "pwd; ls -d /host/doc /big")
    assert (done.stdout, done.returncode) == ("/srv\n/big\n/host/doc\n", 0), done.stderr
    left = pagurus(daemon, "run", "-d", "--name", "later", *words, "debian", "sleep", "1000").stdout.strip()
    shown = pagurus(daemon, "ls", "--json").stdout
    assert left in shown and '"lifetime": 3600.0' in shown and '"at_end": "remove"' in shown
    assert "sleep" in pagurus(daemon, "exec", "later", "cat /proc/[0-9]*/comm").stdout
    assert pagurus(daemon, "rm", "later").returncode == 0


def test_durations_and_mounts() -> None:
    assert [seconds(text) for text in ("90", "90s", "15m", "2h", "1d", None)] == [90, 90, 900, 7200, 86_400, None]
    (directory, scratch) = mounts(["/a:/b:ro"], ["/c:1MiB"])
    assert (directory.source, directory.target, scratch.target, scratch.size) == ("/a", "/b", "/c", "1MiB")
    for wrong in ("a:/b", "/a:b", "/a", "/a:/b:rw"):
        with pytest.raises(Invalid, match="read-only"):
            mounts([wrong], None)


def test_the_images_of_root_are_not_a_users(tmp_path: Path) -> None:
    """In place of a user, who may not look into /var/lib/pagurus: root without its capabilities."""
    (tmp_path / "locked").mkdir(mode=0)
    os.chown(tmp_path / "locked", 65_534, 65_534)
    environment = {**os.environ, "PAGURUS_STATE": str(tmp_path / "locked")}
    command = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-m", "pagurus", "image", "import"]
    done = subprocess.run(
        [*command, "app", str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("pagurus: ") and "is root's (use sudo, or `pagurus image upload`)" in done.stderr
    assert len(done.stderr.splitlines()) == 1
