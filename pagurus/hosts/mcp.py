"""``pagurus mcp``: sandboxes as tools of a model."""

from __future__ import annotations

from typing import Annotated

import typer

from pagurus.common import exit_codes
from sandbox.errors import Invalid, Unsupported

verbs = typer.Typer()
LOOPBACK = ("127.0.0.1", "localhost")


@verbs.command()
def mcp(
    image: Annotated[str, typer.Option(help="Image of sandboxes that name no other.")] = "debian",
    internet: Annotated[bool, typer.Option("--internet", help="They reach the internet.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="They stay when the server ends.")] = False,
    listen: Annotated[
        str | None, typer.Option(help="Serve streamable HTTP here instead of stdio, on loopback.", metavar="HOST:PORT")
    ] = None,
) -> None:
    """Serve sandboxes as tools, by the Model Context Protocol."""
    with exit_codes():
        try:
            from pagurus.integrations.mcp import serve
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in ("mcp", "pydantic"):
                raise
            raise Unsupported("the package mcp is not installed", hint='pip install "pagurus-client[mcp]"') from None
        address, _, port = (listen or "127.0.0.1:0").rpartition(":")
        if address not in LOOPBACK or not port.isdigit():
            raise Invalid(f"{listen} is no port of loopback", hint="it asks for no token: 127.0.0.1:PORT")
        serve(
            "stdio" if listen is None else "streamable-http",
            image=image,
            internet=internet,
            keep=keep,
            host=address,
            port=int(port),
        )
