"""``pagurus view``: the page in a browser of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagurus.common import client, exit_codes

verbs = typer.Typer()


@verbs.command()
def view(
    run: Annotated[
        Path | None, typer.Argument(help="A run directory to show, such as runs/latest.", metavar="RUN")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port of loopback; 0 for any free one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser", help="Open the browser of this machine.")] = False,
) -> None:
    """The page for people, on a port of this machine. Ctrl-C ends it.

    It shows the daemon that other verbs reach, and RUN, which needs no daemon. The address that is printed logs one
    browser in, once. Who has it may do what you may do.
    """
    import asyncio

    from pagurus.page.runs import RunRoutes
    from pagurus.page.viewer import serve

    with exit_codes():
        routes = None if run is None else RunRoutes(run)
        asyncio.run(serve(client(), port, run=routes, browser=browser))
