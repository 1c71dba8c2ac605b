"""``pagurus sweep``: a grid of runs and its table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagurus import output
from pagurus.common import Json, needs_training

verbs = typer.Typer()


@verbs.command()
def sweep(
    what: Annotated[Path, typer.Argument(help="A .toml file or a directory like examples/fix_the_service.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="key=value,value: every combination is a run, as seed=0,1."),
    ] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Runs at the same time.")] = 1,
    json: Json = False,
) -> None:
    """Run a grid of settings and print one table. The same command continues a grid that was interrupted."""
    with needs_training():
        from trainer.sweep import RESULTS, Sweep
    chosen = Sweep(what, settings or [], report=lambda text: None if json else print(text, flush=True))
    rows = chosen.run(at_once=at_once)
    if json:
        output.as_json(rows)
    else:
        keys = list(rows[0].settings)
        shown = [
            (*(row.settings[key] for key in keys), *(_number(row.results.get(name)) for name in RESULTS), row.state)
            for row in rows
        ]
        output.table((*keys, *RESULTS, ""), shown)
    raise typer.Exit(int(any(row.state != "done" for row in rows)))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
