"""``pagurus simulate``: schedulers on a virtual clock.

Owns: names, arguments, what is printed. Does not own: the scenarios (:mod:`coordinator.simulate`). No daemon is asked.
"""

from __future__ import annotations

from typing import Annotated

import typer

from pagurus import output
from pagurus.common import Json
from sandbox.errors import NotFound

Scenario = Annotated[str, typer.Argument(help="Which; without one, all are listed.", metavar="[SCENARIO]")]
Seed = Annotated[int, typer.Option(help="Of everything that is drawn.")]


verbs = typer.Typer()


@verbs.command()
def simulate(scenario: Scenario = "", seed: Seed = 0, json: Json = False) -> None:
    """Run a scheduling scenario on a virtual clock.

    The code that decides in a live run decides here: see docs/scheduling.md.
    """
    from coordinator.simulate.scenarios import SCENARIOS

    if not scenario:
        rows = [(name, (run.__doc__ or "").split("\n")[0]) for name, run in SCENARIOS.items()]
        output.as_json(dict(rows)) if json else output.table(("scenario", "what it compares"), rows)
        return
    if scenario not in SCENARIOS:
        raise NotFound(f"no scenario {scenario!r}", remedy=f"there are: {', '.join(SCENARIOS)}")
    figures = SCENARIOS[scenario](seed)
    if json:
        output.as_json({"scenario": scenario, "seed": seed, **figures})
    else:
        output.table(("figure", scenario), [(name, str(figure)) for name, figure in figures.items()])
