"""What one owner's builds of templates take of the daemon."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daemon.auth.access import CALLER, Caller
from daemon.e2b import templates
from daemon.e2b.steps import START, StartState
from daemon.e2b.templates import Build, Templates
from sandbox.errors import Invalid, NotFound, TooMany


def builds_of(tmp_path: Path) -> Templates:
    host: Any = SimpleNamespace(places=SimpleNamespace(stored=tmp_path / "stored"))
    return Templates(host, b"secret", "unused")


def test_builds_of_one_owner_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that have ended are forgotten, the oldest first; those under way are not, and refuse the next one."""
    monkeypatch.setattr(templates, "MAX_BUILDS", 3)
    templates_here = builds_of(tmp_path)
    builds = [templates_here.admit(Build("ann", [f"t{number}"], {})) for number in range(5)]
    CALLER.set(Caller(owner="ann", scope="admin", everything=False))
    with pytest.raises(NotFound):
        templates_here.build(builds[1].id)
    assert templates_here.build(builds[2].id) is builds[2]
    for build in builds[2:]:
        build.task = SimpleNamespace(done=lambda: False)  # type: ignore[assignment]
    with pytest.raises(TooMany):
        templates_here.admit(Build("ann", ["more"], {}))
    assert templates_here.admit(Build("bob", ["other"], {}))


def test_the_log_of_a_build_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_LOG", 10)
    build = Build("ann", ["t"], {})
    for _ in range(20):
        build.say("x" * 10_000)
    assert len(build.log) == 10 and all(len(line["message"]) == 4000 for line in build.log)


@pytest.mark.parametrize("label", ["!", "e30=", "WzEsIDJd", "/w=="])  # {}, [1, 2], and no text
def test_a_start_label_of_a_stranger_is_refused(label: str) -> None:
    with pytest.raises(Invalid, match=r"e2b\.start"):
        StartState.of({START: label})
