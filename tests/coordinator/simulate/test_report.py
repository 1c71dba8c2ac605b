"""The report of each scenario has its plot, its inputs and the figures of `--json`."""

from __future__ import annotations

import json
import re
import sys
from html import escape
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.simulate.plot import Plot, PlotSpan
from coordinator.simulate.report import flat, page
from coordinator.simulate.scenarios import SCENARIOS
from pagurus.training.simulate import verbs
from sandbox.errors import Unsupported

# What each scenario's plot shows, and how it is made small.
SHOWN: dict[str, tuple[str, dict[str, int]]] = {
    "queue": ("the bound", {}),
    "replication": ("single requests", {}),
    "redundancy": ("the first 32 of 36, 8 of 9", {"prompts": 64}),
    "asynchrony": ("simulated", {"prompts": 32}),
    "affinity": ("the environment that writes, on H20", {}),
    "staleness": ("answers become longer", {"steps": 20}),
    "tail": ("tail batching", {"rounds": 2}),
    "mux": ("group 1, train machine 1", {"count": 8, "steps": 4}),
    "harvest": ("users who come", {"requests": 200}),
    "parallelism": ("GPUs of an engine", {"steps": 6}),
    "handover": ("step 1, engines go over", {"steps": 4}),
    "balance": ("with moves", {"seconds": 300}),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_report_has_the_plot_and_the_figures(name: str) -> None:
    label, small = SHOWN[name]
    metrics: dict[str, Any] = SCENARIOS[name](1, **small)  # type: ignore[call-arg]
    plot = metrics.pop("plot")
    text = page(name, "what it compares", 1, metrics, plot)
    (svg,) = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert label in svg and escape(plot.title) in text and "<script" not in text and "src=" not in text
    for figure, value in flat(metrics):
        assert f"<td>{escape(figure)}</td><td>{escape(value)}</td>" in text
    assert escape(metrics.get("inputs", "")) in text


def test_the_verb_writes_the_report_beside_the_same_figures(tmp_path: Path) -> None:
    plain = CliRunner().invoke(verbs, ["replication", "--json"])
    came = CliRunner().invoke(verbs, ["replication", "--json", "--report", str(tmp_path / "report.html")])
    assert came.exit_code == 0 and json.loads(came.stdout) == json.loads(plain.stdout)
    metrics = json.loads(came.stdout)
    text = (tmp_path / "report.html").read_text()
    assert f"<td>ratio</td><td>{metrics['ratio']}</td>" in text and metrics["inputs"] in text


def test_what_is_written_into_a_page_is_text() -> None:
    bad = "<b>&$x_$"
    plot = Plot(title=bad, x=bad, y=bad, lines={bad: ([0, 1], [1, 2])}, spans=[PlotSpan(bad, 0, 1, bad)])
    text = page(bad, bad, 0, {bad: {bad: bad}, "inputs": bad}, plot)
    assert "<b>" not in text and text.count(escape(bad)) >= 10


def test_without_matplotlib_the_report_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Unsupported, match="pagurus-rl"):
        page("queue", "", 0, {}, Plot(title="", x="", y=""))
