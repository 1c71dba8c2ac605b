"""The command-line program against a real daemon: what people type, and what they get for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from pagurus import VERSION
from pagurus.cli import application, loaded
from pagurus.sandboxes.cp import CopyTarget, placed
from sandbox.errors import Invalid
from tests.support.daemon_host import Daemon, missing

ROOT = Path(__file__).parent.parent.parent
needs_host = pytest.mark.skipif(bool(missing()), reason=missing())


def pagurus(*arguments: str, host: Daemon | None = None, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    run = str(host.run) if host else "/nonexistent"
    environment = {**os.environ, "PAGURUS_RUN": run}
    command = [sys.executable, "-m", "pagurus", *arguments]
    return subprocess.run(command, env=environment, input=stdin, capture_output=True, check=False)


@pytest.fixture
def host(daemon: Daemon) -> Daemon:
    return daemon


@pytest.fixture
def sandbox(host: Daemon) -> Iterator[str]:
    done = pagurus("run", "debian", host=host)
    name = done.stdout.decode().strip()
    assert done.returncode == 0 and name, done.stderr
    yield name
    pagurus("rm", name, host=host)


def listed(host: Daemon) -> list[str]:
    return [entry["id"] for entry in json.loads(pagurus("ls", "--json", host=host).stdout)]


@needs_host
def test_exec_passes_streams_and_the_code_on(host: Daemon, sandbox: str) -> None:
    done = pagurus("exec", sandbox, "sh", "-c", "cat; echo no >&2; exit 7", host=host, stdin=b"a\0b")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"a\0b", b"no\n")


@needs_host
def test_exec_runs_as_whom_it_is_told(host: Daemon, sandbox: str) -> None:
    who = pagurus("exec", "--user", "nobody:daemon", sandbox, "sh", "-c", "id -un; id -gn", host=host)
    assert who.stdout == b"nobody\ndaemon\n"
    ghost = pagurus("exec", "-u", "ghost", sandbox, "true", host=host)
    assert ghost.returncode == 125 and b"no user 'ghost' in the sandbox's /etc/passwd" in ghost.stderr


@needs_host
def test_exec_of_what_does_not_exist_says_so(host: Daemon, sandbox: str) -> None:
    done = pagurus("exec", sandbox, "no-such-program", host=host)
    assert done.returncode == 127
    assert b"no-such-program" in done.stderr and sandbox.encode() in done.stderr and b"Traceback" not in done.stderr


@needs_host
def test_exec_ends_at_its_time_limit(host: Daemon, sandbox: str) -> None:
    done = pagurus("exec", "--timeout", "0.3", sandbox, "sleep", "1000", host=host)
    assert done.returncode == 124 and b"time limit" in done.stderr


@needs_host
def test_run_removes_what_it_started(host: Daemon) -> None:
    before = listed(host)
    done = pagurus("run", "debian", "echo", "hello", host=host)
    assert done.stdout == b"hello\n" and done.returncode == 0
    assert listed(host) == before


@needs_host
def test_an_unknown_image_lists_those_there_are(host: Daemon) -> None:
    done = pagurus("run", "no-such-image", host=host)
    assert done.returncode == 125 and b"debian" in done.stderr


@needs_host
def test_checkpoint_diff_restore_and_tree(host: Daemon, sandbox: str) -> None:
    pagurus("exec", sandbox, "sh", "-c", "echo 1 >/srv/a", host=host)
    saved = pagurus("checkpoint", sandbox, "before", host=host).stdout.decode().strip()
    pagurus("exec", sandbox, "sh", "-c", "echo 2 >/srv/a; echo 3 >/srv/b", host=host)
    changes = json.loads(pagurus("diff", sandbox, saved, "--json", host=host).stdout)
    assert {(change["path"], change["kind"]) for change in changes} >= {("/srv/a", "modified"), ("/srv/b", "added")}
    restored = pagurus("restore", sandbox, saved, "--verify", host=host)
    assert restored.returncode == 0 and b"verified equal" in restored.stdout, restored.stderr
    assert pagurus("exec", sandbox, "sh", "-c", "cat /srv/a; ls /srv", host=host).stdout == b"1\na\n"
    tree = json.loads(pagurus("tree", sandbox, "--json", host=host).stdout)
    assert "before" in {entry.get("label") for entry in tree}
    assert saved in pagurus("tree", sandbox, host=host).stdout.decode()


@needs_host
def test_fork_continues_from_a_checkpoint(host: Daemon, sandbox: str) -> None:
    pagurus("exec", sandbox, "sh", "-c", "echo kept >/srv/a", host=host)
    saved = pagurus("checkpoint", sandbox, host=host).stdout.decode().strip()
    children = pagurus("fork", saved, "--count", "2", host=host).stdout.decode().split()
    assert len(children) == 2
    for child in children:
        assert pagurus("exec", child, "cat", "/srv/a", host=host).stdout == b"kept\n"
    assert pagurus("rm", *children, host=host).returncode == 0


@needs_host
def test_rm_names_what_it_did_not_find(host: Daemon) -> None:
    done = pagurus("rm", "no-such-sandbox", host=host)
    assert done.returncode == 1 and b"no-such-sandbox" in done.stderr


@needs_host
def test_rm_takes_a_run_alone(host: Daemon, sandbox: str) -> None:
    mine = [pagurus("run", "-l", f"pagurus.run={run}", "debian", host=host).stdout.decode().strip() for run in "aab"]
    selected = pagurus("rm", "--run", "a", "--dry-run", host=host)
    assert sorted(line.split()[0] for line in selected.stdout.decode().splitlines()) == sorted(mine[:2])
    assert {*mine, sandbox} <= set(listed(host))
    assert pagurus("rm", "--run", "a", host=host).returncode == 0
    assert {sandbox, mine[2]} == {sandbox, *mine} & set(listed(host))
    assert pagurus("rm", "--run", "a", host=host).returncode == 0  # there are none any more
    assert pagurus("rm", "-l", "pagurus.run=b", host=host).returncode == 0
    assert pagurus("rm", "--run", "b", "--all", host=host).returncode == 1


@needs_host
def test_extend_moves_an_end(host: Daemon, sandbox: str) -> None:
    def lifetime() -> object:
        infos = json.loads(pagurus("ls", "--json", host=host).stdout)
        return next(info for info in infos if info["id"] == sandbox).get("lifetime")

    assert pagurus("extend", sandbox, "600", host=host).returncode == 0
    assert isinstance(lifetime(), float)
    assert pagurus("extend", sandbox, "never", host=host).stdout == b"never\n"
    assert lifetime() is None
    wrong = pagurus("extend", sandbox, "soon", host=host)
    assert wrong.returncode == 1 and b"no number of seconds" in wrong.stderr


def test_without_a_daemon_the_error_says_how_to_start_one() -> None:
    done = pagurus("ls")
    assert done.returncode == 1
    assert b"pagurus daemon" in done.stderr and b"Traceback" not in done.stderr


VERBS = {
    *(
        "doctor",
        "daemon",
        "run",
        "up",
        "services",
        "down",
        "ps",
        "ls",
        "top",
        "exec",
        "shell",
        "cp",
        "port-forward",
        "rm",
        "restore",
        "fork",
    ),
    *("extend", "tree", "diff", "net", "train", "export", "roles", "attach", "bench", "play", "eval", "serve"),
    *("sweep", "verify-model", "sft", "dpo", "mcp", "run-code", "view"),
    *("migrate", "simulate", "submit", "jobs", "logs", "cancel"),
}
GROUPS = {
    "image": {
        "ls",
        "import",
        "docker",
        "debootstrap",
        "upload",
        "build",
        "commit",
        "rm",
        "steps",
        "prune",
        "pull",
        "push",
        "export",
    },
    "checkpoint": {"take", "ls", "verify", "label", "rm", "collect", "have", "export", "import", "pull"},
    "token": {"create", "ls", "revoke"},
    "credential": {"put", "ls", "rm"},
    "gateway": {"ls", "set", "rm", "token", "log"},
    "rollouts": {"why", "gantt", "account", "replay", "rescore", "show", "effects", "resample", "shell"},
    "env": {"check"},
    "cluster": {"up", "ls", "add", "rm", "drain", "resume", "label", "where", "turns"},
    "weights": {"ls", "verify", "diff", "rollback", "gc"},
}


def test_the_table_of_verbs() -> None:
    """By name, not by the words of the help."""
    table: Any = typer.main.get_command(application)
    assert {name for name, verb in table.commands.items() if not verb.hidden} == VERBS | GROUPS.keys()
    for name, verbs in GROUPS.items():
        assert {item for item, verb in loaded(name).commands.items() if not verb.hidden} == verbs


LISTINGS = (
    "ls",
    "services",
    "top",
    "tree",
    "diff",
    "net",
    "doctor",
    "bench ls",
    "image ls",
    "image steps",
    "checkpoint ls",
)


@pytest.mark.parametrize("listing", [*LISTINGS, "checkpoint verify", "token ls", "gateway ls", "gateway log", "jobs"])
def test_every_listing_takes_json(listing: str) -> None:
    if listing != "bench ls":  # which passes its words on
        first, *rest = listing.split()
        verb = loaded(first)
        for word in rest:
            verb = verb.commands[word]
        assert "--json" in {option for parameter in verb.params for option in parameter.opts}
        return
    named = json.loads(pagurus("bench", "ls", "--json").stdout)
    assert {"name": "isolation"} in named and named == json.loads(pagurus("bench", "--json").stdout)


@pytest.mark.parametrize("group", sorted(GROUPS))
def test_the_help_of_a_group_is_not_cut(group: str) -> None:
    usage, *lines = pagurus(group, "--help").stdout.decode().splitlines()
    assert usage.endswith("...") and not [line for line in lines if line.endswith("...")]


def test_each_bench_says_what_it_asks() -> None:
    lines = pagurus("bench", "ls").stdout.decode().splitlines()[1:]
    assert len(lines) > 20 and all(len(line.split(maxsplit=1)) == 2 for line in lines)


def test_wrong_usage_is_exit_code_2() -> None:
    assert pagurus("exec").returncode == 2
    assert pagurus("bench", "no-such-bench").returncode == 2


def test_a_bench_finds_the_examples_from_anywhere() -> None:
    program = Path(sys.executable).with_name("pagurus")
    done = subprocess.run([program, "bench", "recipe", "--help"], cwd="/", capture_output=True, check=False)
    assert done.returncode == 0 and b"--staleness" in done.stdout, done.stderr


def test_the_version() -> None:
    assert pagurus("--version").stdout.decode() == f"pagurus {VERSION}\n"


@pytest.mark.parametrize(
    ("source", "target", "tree", "result", "directory", "name"),
    [
        ("a", "/d", False, "directory", "/d", "a"),
        ("x/a", "/d/b", False, None, "/d", "b"),
        ("x/a", "/d/b", False, "file", "/d", "b"),
        ("a", "b", False, None, ".", "b"),
        ("dir", "/new", True, None, "/new", None),
        ("dir", "/d", True, "directory", "/d", "dir/"),
        ("dir/", "/d", True, "directory", "/d", "dir/"),
        ("dir/.", "/d", True, "directory", "/d", None),
        (".", "/d", True, "directory", "/d", None),
        ("/", "out", True, "directory", "out", None),
    ],
)
def test_a_copy_means_what_cp_means(source, target, tree, result, directory, name) -> None:
    where = CopyTarget(directory, below=(name or "").rstrip("/")) if tree else CopyTarget(directory, name)
    assert placed(source, target, tree=tree, result=result) == where


@pytest.mark.parametrize(("tree", "result", "target"), [(True, "file", "/f"), (False, None, "/d/")])
def test_a_copy_that_means_nothing_is_refused(tree: bool, result: str | None, target: str) -> None:
    with pytest.raises(Invalid, match="directory"):
        placed("a", target, tree=tree, result=result)


@needs_host
def test_copies_go_in_and_come_out(host: Daemon, sandbox: str, tmp_path: Path) -> None:
    (tmp_path / "in/sub").mkdir(parents=True)
    (tmp_path / "in/sub/f").write_text("carried")
    assert pagurus("cp", str(tmp_path / "in"), f"{sandbox}:/carried", host=host).returncode == 0
    assert pagurus("exec", sandbox, "cat", "/carried/sub/f", host=host).stdout == b"carried"
    assert pagurus("cp", f"{sandbox}:/carried/sub", str(tmp_path / "out"), host=host).returncode == 0
    assert (tmp_path / "out/f").read_text() == "carried"
    # As cp, scp and docker cp do: a file becomes the target, or goes into it where that is a directory.
    assert pagurus("cp", f"{sandbox}:/etc/debian_version", str(tmp_path / "dv"), host=host).returncode == 0
    assert (tmp_path / "dv").read_text().strip()
    assert pagurus("cp", f"{sandbox}:/etc/debian_version", str(tmp_path), host=host).returncode == 0
    assert (tmp_path / "debian_version").read_bytes() == (tmp_path / "dv").read_bytes()
    assert pagurus("cp", str(tmp_path / "dv"), f"{sandbox}:/carried/version", host=host).returncode == 0
    assert pagurus("cp", str(tmp_path / "dv"), f"{sandbox}:/carried", host=host).returncode == 0
    assert pagurus("cp", str(tmp_path / "in"), f"{sandbox}:/carried", host=host).returncode == 0
    listed = pagurus("exec", sandbox, "sh", "-c", "cd /carried && ls -A && ls in", host=host).stdout.split()
    assert listed == [b"dv", b"in", b"sub", b"version", b"sub"]
    nowhere = pagurus("cp", f"{sandbox}:/etc/debian_version", str(tmp_path / "no/such"), host=host)
    assert nowhere.returncode == 1 and b"there is no directory" in nowhere.stderr
    missing = pagurus("cp", f"{sandbox}:/nosuch", str(tmp_path / "x"), host=host)
    assert missing.returncode == 1 and b"there is no /nosuch in the sandbox" in missing.stderr
    refused = pagurus("cp", str(tmp_path / "in"), str(tmp_path / "out"), host=host)
    assert refused.returncode == 1 and b"SANDBOX:PATH" in refused.stderr


@needs_host
def test_images_are_listed_built_and_removed(host: Daemon, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN echo built > /built\n")
    built = pagurus("image", "build", "mine", str(tmp_path), host=host)
    assert built.returncode == 0, built.stderr
    images = json.loads(pagurus("image", "ls", "--json", host=host).stdout)
    assert [image["name"] for image in images] == ["debian", "mine"]
    assert pagurus("run", "mine", "cat", "/built", host=host).stdout == b"built\n"
    (step,) = json.loads(pagurus("image", "steps", "--json", host=host).stdout)
    assert step["title"] == "RUN echo built > /built"
    assert b"kept steps of builds: 1, " in pagurus("image", "ls", host=host).stdout
    assert json.loads(pagurus("image", "prune", "--json", host=host).stdout)["steps"] == 1
    assert pagurus("image", "rm", "mine", host=host).returncode == 0
    assert b"mine" not in pagurus("image", "ls", host=host).stdout


@needs_host
def test_top_shows_what_sandboxes_use(host: Daemon, sandbox: str) -> None:
    poll = json.loads(pagurus("top", "--json", host=host).stdout)
    (row,) = [row for row in poll["sandboxes"] if row["id"] == sandbox]
    assert row["state"] == "running" and row["processes"] >= 1 and row["memory"] > 0
    drawn = pagurus("top", "--count", "2", "--interval", "0.2", host=host)
    assert drawn.returncode == 0
    rows = [line for line in drawn.stdout.decode().splitlines() if line.startswith(sandbox)]
    assert len(rows) == 2 and all(line.endswith(row["head"]) for line in rows)  # whole, whatever the width


def test_what_is_missing_is_one_line(tmp_path: Path) -> None:
    """No tracebacks: no daemon, a daemon without root, training without torch."""
    nowhere = {**os.environ, "PAGURUS_RUN": str(tmp_path), "PAGURUS_HOST": ""}
    listed = subprocess.run(
        [sys.executable, "-m", "pagurus", "ls"], env=nowhere, capture_output=True, text=True, check=False
    )
    assert listed.returncode == 1 and "no daemon answers" in listed.stderr
    assert len(listed.stderr.splitlines()) == 1

    program = "import os; os.geteuid = lambda: 1000; from daemon.app import main; raise SystemExit(main([]))"
    user = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (user.returncode, len(user.stderr.splitlines())) == (1, 1) and "use sudo" in user.stderr

    program = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['pagurus', 'train', '.']\n"
        "from pagurus.__main__ import main; main()"
    )
    bare = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert bare.returncode == 1 and "make setup-train" in bare.stderr
    assert len(bare.stderr.splitlines()) == 1
