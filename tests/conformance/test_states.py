"""Every state that a process can have is what docs/states.md says of it, looked at from inside."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.checkpoint import Ours
from tests.conformance.states import classify, table
from tests.conformance.states.promises import ALWAYS, PROMISES
from tests.support.container_support import base_image

KINDS = ("restored", "named", "refused", "impossible")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return classify.compiled(tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def rows(program: Path) -> list[classify.Row]:
    return classify.rows(program)


def test_the_page_has_the_table(rows: list[classify.Row]) -> None:
    assert table.in_page() == table.table(rows), "run `python -m tests.conformance.states.table --write`"


def test_promises_are_of_rows(rows: list[classify.Row]) -> None:
    names = [row.name for row in rows]
    assert len(names) == len(set(names)) >= 150
    assert set(PROMISES) | set(ALWAYS) <= set(names)
    assert {promise.kind for promise in PROMISES.values()} < set(KINDS)
    assert all(promise.reason for promise in PROMISES.values())


@pytest.mark.parametrize(
    ("kind", "said", "verdict"),
    [
        ("restored", "", "restored"),
        ("differs", "", "silent"),
        ("disturbed", "", "silent"),
        ("blind", "", "silent"),
        ("broken", "", "silent"),
        ("refused", "", "silent"),
        ("impossible", "", "silent"),
    ],
)
def test_what_should_come_back(kind: str, said: str, verdict: str) -> None:
    assert classify.Observed(kind, said).verdict(classify.Promise("restored")) == verdict


def test_a_refusal_says_the_hint() -> None:
    promise = classify.Promise("refused", "close it")
    assert classify.Observed("refused", "no | hint: close it").verdict(promise) == "refused"
    assert classify.Observed("refused", "no | hint: the sandbox keeps running").verdict(promise) == "silent"
    assert classify.Observed("restored").verdict(promise) == "silent"
    assert classify.Observed("differs").verdict(classify.Promise("named", "harmless")) == "named"
    assert classify.Observed("restored").verdict(classify.Promise("named", "harmless")) == "silent"


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
async def test_states_are_as_promised(
    tmp_path: Path, program: Path, rows: list[classify.Row], kind: str, every: int
) -> None:
    result = classify.CrashResult()
    target = [row for row in rows if row.promise.kind == kind][::every]
    async with Ours(tmp_path, base_image()) as ours:
        await classify.States(ours, program, result).classify(target)
    wrong = {
        row.name: result.observed[row.name] for row in target if result.observed[row.name].verdict(row.promise) != kind
    }
    assert not wrong
