"""What the program loads before it does anything: held here, so that it starts in the time of its parser.

How long that takes on a machine is `pagurus bench cli`.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import bench
from pagurus.cli import VERBS, loaded

ROOT = Path(__file__).parent.parent.parent
OURS = {"sandbox", "daemon", "ebpf", "rollout", "trainer", "coordinator", "bench"}
HEAVY = {"aiohttp", "pydantic", "rich.console", "rich.table", "rich.progress", "tarfile", "torch", "numpy"}
PARSING_NEEDS_NO = {"asyncio", "msgspec", "rich", "ssl", "docker"}
SETTINGS = {"train", "submit"}  # their options are made from the structs of a run's settings, which they import
PROGRAM = """
import sys
from pagurus.__main__ import main
sys.argv[0] = "pagurus"
try:
    main()
except SystemExit:
    pass
print(*sys.modules, file=sys.stderr)
"""


def modules(*words: str) -> set[str]:
    """What is loaded when the program has ended."""
    command = [sys.executable, "-c", PROGRAM, *words]
    done = subprocess.run(
        command, cwd=ROOT, env={"PAGURUS_RUN": "/nonexistent"}, capture_output=True, text=True, check=True
    )
    return set(done.stderr.splitlines()[-1].split())


def verbs_among(result: set[str]) -> set[str]:
    return {name for name in result if name.startswith("pagurus.")} - {"pagurus.__main__", "pagurus.cli"}


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["no-such-verb"]], ids=" ".join)
def test_the_program_alone_loads_its_parser_and_no_verb(words: list[str]) -> None:
    result = modules(*words)
    assert not verbs_among(result) and not {name.split(".")[0] for name in result} & OURS
    assert not result & (HEAVY | PARSING_NEEDS_NO)


@pytest.mark.parametrize("verb", [item for item in VERBS if item not in ("daemon", "bench")])  # these answer themselves
def test_the_help_of_a_verb_loads_that_verb_alone(verb: str) -> None:
    result = modules(verb, "--help")
    others = {f"pagurus.{item.module}" for item in VERBS.values()} - {f"pagurus.{VERBS[verb].module}"}
    borrowed = {"pagurus.sandboxes.exec", "pagurus.sandboxes.net"}  # `run` carries commands out, and has a network
    assert (
        f"pagurus.{VERBS[verb].module}" in result
        and not result & (others - borrowed)
        and (verb in SETTINGS or not result & (HEAVY | PARSING_NEEDS_NO - {"msgspec"}))
        and "torch" not in result
    )


@pytest.mark.parametrize("line", ["ls", "ls --json", "tree web", "rm web", "checkpoint web", "image ls"])
def test_a_short_question_needs_no_http_library(line: str) -> None:
    result = modules(*line.split())
    assert "sandbox.sdk.brief" in result and not result & HEAVY


@pytest.mark.parametrize("verb", VERBS)
def test_the_line_of_a_verb_is_its_own_first_sentence(verb: str) -> None:
    assert loaded(verb).get_short_help_str(1000) == VERBS[verb].text


def test_every_verb_of_a_module_is_known() -> None:
    for name in {item.module for item in VERBS.values()}:
        module = importlib.import_module(f"pagurus.{name}")
        if hasattr(module, "verbs"):
            existing = {verb for verb, item in VERBS.items() if item.module == name}
            assert set(typer.main.get_group(module.verbs).commands) == existing


def test_every_bench_that_is_listed_can_be_run() -> None:
    text = {name: bench.source(name).read_text() for name in bench.names()}
    assert "checkpoint" in text and [name for name in text if "\ndef main(" not in text[name]] == []
