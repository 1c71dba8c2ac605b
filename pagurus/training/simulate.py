"""``pagurus simulate``: schedulers on a virtual clock.

No daemon is used.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from pagurus import output
from pagurus.common import Json
from sandbox.errors import NotFound

Scenario = Annotated[str, typer.Argument(help="Which; without one, all are listed.", metavar="[SCENARIO]")]
Seed = Annotated[int, typer.Option(help="Of everything that is drawn.")]
Report = Annotated[
    Path | None, typer.Option(help="An HTML page with figures, inputs and a plot, to be written.", metavar="FILE")
]


verbs = typer.Typer()


@verbs.command()
def simulate(scenario: Scenario = "", seed: Seed = 0, report: Report = None, json: Json = False) -> None:
    """Run a scheduling scenario on a virtual clock.

    The code that decides in a live run decides here: see docs/scheduling.md.
    """
    from coordinator.simulate.scenarios import SCENARIOS

    if not scenario:
        rows = [(name, _what(run)) for name, run in SCENARIOS.items()]
        output.as_json(dict(rows)) if json else output.table(("scenario", "what it compares"), rows)
        return
    if scenario not in SCENARIOS:
        raise NotFound(f"no scenario {scenario!r}", hint=f"there are: {', '.join(SCENARIOS)}")
    metrics = SCENARIOS[scenario](seed)
    plot = metrics.pop("plot")
    if report is not None:
        from coordinator.simulate.report import page

        report.write_text(page(scenario, _what(SCENARIOS[scenario]), seed, metrics, plot))
    if json:
        output.as_json({"scenario": scenario, "seed": seed, **metrics})
    else:
        output.table(("figure", scenario), [(name, str(figure)) for name, figure in metrics.items()])


def _what(run: Callable[..., object]) -> str:
    return (run.__doc__ or "").split("\n")[0]
