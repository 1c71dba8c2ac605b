"""``pagurus simulate``: schedulers, and plans of large runs, on a virtual clock.

No daemon is used.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from pagurus import output
from pagurus.common import Json
from sandbox.errors import NotFound, Unsupported

Scenario = Annotated[
    str,
    typer.Argument(help="Which, or a plan in a .toml file; without one, all are listed.", metavar="[SCENARIO|PLAN]"),
]
Seed = Annotated[int, typer.Option(help="Of everything that is drawn.")]
Report = Annotated[
    Path | None, typer.Option(help="An HTML page with figures, inputs and a plot, to be written.", metavar="FILE")
]


verbs = typer.Typer()


@verbs.command()
def simulate(scenario: Scenario = "", seed: Seed = 0, report: Report = None, json: Json = False) -> None:
    """Run a scheduling scenario, or the plan of a large run, on a virtual clock.

    The code that decides in a live run decides here: see docs/scheduling.md.
    """
    if scenario.endswith(".toml"):
        _plan(Path(scenario), seed, report, json=json)
        return
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


def _plan(path: Path, seed: int, report: Path | None, *, json: bool) -> None:
    from coordinator.simulate.scale import report as scale
    from coordinator.simulate.scale.plan import parse

    if report is not None:
        raise Unsupported("a plan has no page", hint="leave out --report; --json prints all of it")
    try:
        plan = parse(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise NotFound(f"no plan {path}: {error}", hint="examples/plans has two") from None
    metrics = scale.report(scale.compute(plan, seed))
    output.as_json(metrics) if json else output.table(("figure", plan.name), list(scale.flat(metrics)))


def _what(run: Callable[..., object]) -> str:
    return (run.__doc__ or "").split("\n")[0]
