"""``pagurus view``: the page in a browser of this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from pagurus.common import client, exit_codes

verbs = typer.Typer()


@verbs.command()
def view(
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port of loopback; 0 for any free one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser", help="Open the browser of this machine.")] = False,
) -> None:
    """The page for people, on a port of this machine, for the daemon that other verbs reach. Ctrl-C ends it.

    The address that is printed logs one browser in, once. Whoever has it may do what you may do.
    """
    import asyncio

    from pagurus.page.viewer import serve

    with exit_codes():
        asyncio.run(serve(client(), port, browser=browser))
