"""`pagurus weights`: what is listed, compared, checked, removed and taken back."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pagurus.cli import application
from rollout.weights.store import VersionStore
from tests.support.weights import FILES, Walk
from trainer.weights import Publisher


@pytest.fixture
def run(tmp_path: Path) -> Path:
    walk = Walk(scale=8)
    publisher = Publisher(VersionStore(tmp_path / "weights"), complete_every=3, keep=10)
    for version in range(5):
        publisher.publish(version, walk.step(1e-7), FILES)
    publisher.close()
    return tmp_path


def weights(*arguments: str | Path, code: int = 0) -> str:
    result = CliRunner().invoke(application, ["weights", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def test_versions_are_listed_and_compared(run: Path) -> None:
    listed = json.loads(weights("ls", run, "--json"))["versions"]
    assert [item["version"] for item in listed] == [0, 1, 2, 3, 4]
    assert [item["total_bytes"] is not None for item in listed] == [True, False, False, True, False]
    assert listed[0]["step_bytes"] is None and 0 < listed[1]["step_bytes"] < listed[0]["total_bytes"] / 20
    assert len(re.findall(r"^\s*\d ", weights("ls", run), re.M)) == 5
    counts = json.loads(weights("diff", run, "0", "1", "--json"))
    assert 0 < sum(item["changed"] for item in counts.values()) < sum(item["words"] for item in counts.values()) / 20
    assert "0 of" in weights("diff", run, "2", "2")


def test_damage_is_found(run: Path) -> None:
    assert weights("verify", run).count("is whole") == 5
    store = VersionStore(run / "weights")
    steps = store.manifest(store.version(2)).steps or []
    store.path(next(ref for ref in steps if ref is not None).digest).write_bytes(b"damage")
    said = weights("verify", run, code=1)
    assert said.count("is whole") == 4 and "version 2: " in said


def test_versions_are_withdrawn_and_removed(run: Path) -> None:
    weights("rollback", run, "3")
    assert "removed 3 versions" in weights("gc", run, "--keep", "1")
    assert [ref.version for ref in VersionStore(run / "weights").versions()] == [3]
    result = CliRunner().invoke(application, ["weights", "rollback", str(run), "9"])
    assert "has no version 9" in str(result.exception)
    result = CliRunner().invoke(application, ["weights", "ls", str(run / "elsewhere")])
    assert "has no published weights" in str(result.exception)
