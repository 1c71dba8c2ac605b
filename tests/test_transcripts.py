"""Every command line that README and docs print is understood by the program, and runs, or says what it needs.

Names that stand for others (ID, SANDBOX, c-1234abcd) are put in; everything else runs as it is printed, in a shell, one
document after the other against one daemon. A line that needs what a test has not is listed with what that is, and must
say so to its reader: in its comment or in its own words.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from pagurus.cli import application
from tests.support.daemon_host import Daemon

ROOT = Path(__file__).parent.parent
LINE = re.compile(r"^(?:\$ )?(?P<line>(?:[A-Z_]+=\S+ )*pagurus (?:(?!  ).)*?)(?: {2,}(?P<comment>.*))?$")

#: What cannot run here, by how it begins: why, and the words by which its reader knows.
ELSEWHERE = {
    "pagurus doctor": ("probes the whole host: tests/test_doctor.py", "this host"),
    "pagurus up": ("a compose file: tests/pagurus/sandboxes/test_compose.py", "compose.yaml"),
    "pagurus down": ("a compose file: tests/pagurus/sandboxes/test_compose.py", "removes"),
    "pagurus ps": ("a compose file: tests/pagurus/sandboxes/test_compose.py", "ps"),
    "pagurus services": ("a composition: tests/pagurus/sandboxes/test_compose.py", "services"),
    "pagurus exec --service": ("a composition: tests/pagurus/sandboxes/test_compose.py", "--service"),
    "pagurus shell": ("a terminal: tests/pagurus/sandboxes/test_shell.py", "a terminal"),
    "pagurus view": ("it serves until Ctrl-C: tests/pagurus/page", "view"),
    "pagurus daemon --listen": ("a daemon beside the test's", "--listen"),
    "PAGURUS_HOST=https://host": ("another host", "https://host"),
    "pagurus image debootstrap": ("Debian's mirror", "root, no daemon"),
    "pagurus image build web https://host": ("a git server: tests/daemon/store/test_git_contexts.py", "https://host"),
    "pagurus image build web ./context --replace --ssh": ("keys: tests/daemon/store/test_build_agents.py", "--ssh"),
    "pagurus credential": ("a secret: tests/daemon/credentials", "credential"),
    "pagurus run --credential": ("a secret: tests/daemon/credentials", "--credential"),
    "pagurus net SANDBOX --allow pypi.org --credential": ("a secret: tests/daemon/credentials", "--credential"),
    "pagurus image docker": ("a Docker Engine", "Docker Engine"),
    "pagurus image push": ("a registry: tests/sandbox/image", "credentials"),
    "pagurus sft": ("a model: tests/trainer/test_supervised.py", ""),
    "pagurus dpo": ("a model: tests/trainer/test_supervised.py", ""),
    "pagurus image pull": ("a registry: tests/sandbox/image", ""),
    "pagurus run --allow pypi.org": ("the internet", "pypi.org"),
    "pagurus checkpoint pull https://host": ("another host", "https://host"),
    "pagurus bench": ("minutes: tests/bench", "bench"),
    "pagurus play": ("a model: tests/rollout/test_evaluate.py", "--model"),
    "pagurus eval": ("a model: tests/rollout/test_evaluate.py", "--model"),
    "pagurus weights": ("a run with trained weights", "runs/"),
    "pagurus cluster": ("two hosts: tests/coordinator/test_cluster.py", "cluster"),
    "pagurus submit": ("a coordinator with Ray: tests/coordinator/test_jobs.py", "submit"),
    "pagurus jobs": ("a coordinator with Ray: tests/coordinator/test_jobs.py", "jobs"),
    "pagurus logs": ("a coordinator with Ray: tests/coordinator/test_jobs.py", "logs"),
    "pagurus cancel": ("a coordinator with Ray: tests/coordinator/test_jobs.py", "cancel"),
    "pagurus env": ("an environment and a daemon: tests/rollout/test_check.py", "env"),
    "pagurus rollouts": ("a run that has played: tests/pagurus/training/test_rollouts.py, tests/rollout", "rollouts"),
    "pagurus export": ("a run with trained weights", "runs/"),
    "pagurus train": ("training: tests/trainer", "train"),
    "pagurus simulate examples/plans": ("a checkout: tests/coordinator/simulate/test_scale.py", "examples/"),
}


@dataclass(frozen=True)
class Example:
    document: str
    text: str
    comment: str

    @property
    def synopsis(self) -> bool:
        """Brackets and bars: it shows what may be said, not what to say."""
        return "[" in self.text

    @property
    def needs(self) -> tuple[str, str] | None:
        return next((why for start, why in ELSEWHERE.items() if self.text.startswith(start)), None)


def shown(text: str) -> Iterator[str]:
    """The lines of a page that stand in blocks for a shell, or without a language; each as one, however broken."""
    language: str | None = None
    for line in re.sub(r" *\\\n *", " ", text).splitlines():
        if line.startswith("```"):
            language = None if language is not None else line[3:].strip()
        elif language in ("", "sh", "console", "bash", "text"):
            yield line


def examples() -> list[Example]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    matches = [(page.name, LINE.match(line)) for page in pages for line in shown(page.read_text())]
    return [Example(page, result["line"].strip(), result["comment"] or "") for page, result in matches if result]


EXAMPLES = examples()


def understood(words: list[str]) -> None:
    """Raises a usage error where the program would: verbs, options, numbers of arguments. Runs nothing."""
    command: Any = typer.main.get_command(application)
    context = command.make_context("pagurus", list(words))
    while hasattr(command, "commands"):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)


def words_of(text: str) -> list[list[str]]:
    """The arguments of each call of the program on a line, without what the shell takes for itself."""
    reader = shlex.shlex(text, posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    calls: list[list[str]] = [[]]
    words = list(reader)
    for before, word in zip(["", *words], words, strict=False):
        if word in (";", "|", "&&"):
            calls.append([])
        elif word not in ("<", ">") and before not in ("<", ">"):
            calls[-1].append(word)
    return [call[call.index("pagurus") + 1 :] for call in calls]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what the examples name."""
    place = tmp_path_factory.mktemp("examples")
    (place / "key").write_text("secret")
    for directory in ("context", "rootfs/bin"):
        (place / directory).mkdir(parents=True)
    (place / "context" / "Dockerfile").write_text("FROM debian\nARG VERSION=1\nRUN echo $VERSION > /version\n")
    (place / "rootfs" / "bin" / "true").write_text("#!/bin/sh\n")
    with tarfile.open(place / "app.tar", "w") as archive:
        archive.add(place / "rootfs", arcname=".")
    return place


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: f"{one.document}: {one.text[:60]}")
def test_every_example_is_understood(example: Example, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    if example.synopsis:
        (words,) = words_of(re.sub(r"\[[^\]]*\](\.\.\.)?", "", example.text))
        understood(words)
        return
    for words in words_of(example.text):
        understood(words)


def test_what_cannot_run_here_says_so_to_its_reader() -> None:
    used = set()
    for example in EXAMPLES:
        if (needs := example.needs) is not None:
            used.add(needs)
            assert needs[1] in f"{example.text} {example.comment}", example
    assert len(EXAMPLES) > 40 and sum(example.needs is None for example in EXAMPLES) > 25


@pytest.fixture(scope="module")
def world(daemon: Daemon, work: Path) -> Iterator[dict[str, str]]:
    """The environment in which examples run, and a sandbox that they speak of."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PAGURUS_RUN": str(daemon.run),
        "PAGURUS_STATE": str(daemon.state),
    }
    yield environment
    subprocess.run("pagurus rm --all", shell=True, cwd=work, env=environment, check=True)


def said(line: str, work: Path, world: dict[str, str]) -> str:
    done = subprocess.run(
        line, shell=True, cwd=work, env=world, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, (line, done.stdout, done.stderr)
    return done.stdout


@pytest.mark.parametrize("document", sorted({one.document for one in EXAMPLES if not one.needs and not one.synopsis}))
def test_every_example_runs_as_it_is_printed(document: str, work: Path, world: dict[str, str]) -> None:
    said("pagurus rm --all", work, world)
    name = "box" if document == "README.md" else "web"
    said(f"pagurus run --name {name} debian", work, world)
    older = said(f"pagurus checkpoint {name} --durable", work, world).strip()
    said(f"pagurus exec {name} 'echo 1 > /srv/page'", work, world)
    newer = said(f"pagurus checkpoint {name} --durable", work, world).strip()
    token = said("pagurus token create x >/dev/null; pagurus token ls --json", work, world)
    stand_ins = {
        r"\bID\b": newer,
        r"\bOTHER\b": older,
        r"\bSANDBOX\b": name,
        r"\bc-1234abcd\b": newer,
        r"\b0123456789ab\b": re.findall(r'"id": "([0-9a-z-]+)"', token)[-1],
    }
    for example in EXAMPLES:
        if example.document != document or example.needs or example.synopsis:
            continue
        line = example.text
        for word, meant in stand_ins.items():
            line = re.sub(word, meant, line)
        said(line, work, world)
