"""docs/hosts.md says what the last run on each system found."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.hosts import benches, guest, table
from tests.hosts.act import ACTS, Host, act
from tests.hosts.systems import SYSTEMS

SCRIPTS = "".join(path.read_text() for path in Path(__file__).parent.glob("*.sh"))


def test_the_page_has_the_results() -> None:
    assert table.in_page() == table.text()


def test_each_system_ran_acts_that_there_are() -> None:
    """Those that it did not run are marked in the page."""
    listed = {(group, name) for group, acts in ACTS.items() for name in acts}
    listed |= {("package", name) for name in re.findall(r'\bact "([^"]+)"', SCRIPTS)}
    listed |= {(benches.GROUP, item.full_name) for item in benches.BENCHES}
    assert guest.WITH_ACTS and len(listed) >= 40
    for name, found in table.results().items():
        ran = {(each["group"], each["act"]) for each in found["acts"]}
        assert ran <= listed and len(ran) >= 40, name


def test_an_act_that_did_not_pass_is_named_with_its_reason() -> None:
    lines = table.in_page().splitlines()
    for system, result in table.results().items():
        for item in result["acts"]:
            if item["result"] != "passed":
                name, title = f"{item['group']}: {item['act']}", SYSTEMS[system].title
                note = item["note"].strip()[:20] or "no reason given"
                assert any(name in line and f"{item['result']}, {note}" in line and title in line for line in lines), (
                    name
                )


@pytest.mark.parametrize("name", ["output, to each stream"])
def test_an_act_is_listed_once(name: str) -> None:
    with pytest.raises(ValueError, match="twice"):

        @act("commands", name)
        def again(host: Host) -> None:
            """Never run."""


def test_a_run_goes_on_where_the_last_one_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed or never began is run again; the other results stay beside the new ones."""
    monkeypatch.setattr(table, "RESULTS", tmp_path / "results")
    system = SYSTEMS["bookworm"]

    def run(resume: bool, *results: tuple[str, str]) -> None:
        lines = [
            json.dumps({"group": "g", "act": name, "result": result, "note": "", "seconds": 1})
            for name, result in results
        ]
        (tmp_path / "acts.jsonl").write_text("\n".join(lines) + "\n")
        table.record(system, tmp_path, "qemu", resume=resume)

    for name in ("os", "kernel", "lsm"):
        (tmp_path / name).write_text("x\n")
    run(False, ("one", "passed"), ("two", "failed"), ("three", "absent"))
    assert table.done(system) == ["g: one", "g: three"]
    run(True, ("two", "passed"), ("four", "passed"))
    assert table.done(system) == ["g: one", "g: two", "g: three", "g: four"]
    assert table.results()["bookworm"]["runs"] == 2
    run(False, ("one", "failed"))
    assert table.done(system) == [] and table.results()["bookworm"]["runs"] == 1
