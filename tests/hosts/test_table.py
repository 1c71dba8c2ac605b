"""docs/hosts.md says what the last run on each system found."""

from __future__ import annotations

import pytest

from tests.hosts import guest, table
from tests.hosts.act import ACTS, Host, act


def test_the_page_has_the_results() -> None:
    assert table.in_page() == table.text()


def test_each_system_ran_acts_that_there_are() -> None:
    """Those that it did not run are marked in the page."""
    listed = {(group, name) for group, acts in ACTS.items() for name in acts}
    listed.add(("package", "purged, it leaves nothing"))  # by the script that ran the others
    assert guest.WITH_ACTS and len(listed) >= 40
    for name, found in table.results().items():
        ran = {(each["group"], each["act"]) for each in found["acts"]}
        assert ran <= listed and len(ran) >= 40, name


def test_a_failed_act_is_named_in_the_page() -> None:
    for result in table.results().values():
        for item in result["acts"]:
            assert (
                item["result"] == "passed" or f"{item['group']}: {item['act']}: {item['note'][:20]}" in table.in_page()
            )


@pytest.mark.parametrize("name", ["output, to each stream"])
def test_an_act_is_listed_once(name: str) -> None:
    with pytest.raises(ValueError, match="twice"):

        @act("commands", name)
        def again(host: Host) -> None:
            """Never run."""
