"""``pagurus run-code``: SandboxFusion's ``POST /run_code``, answered by forks."""

from __future__ import annotations

from typing import Annotated

import typer

from pagurus.common import exit_codes
from sandbox.errors import Invalid

verbs = typer.Typer()
LOOPBACK = ("127.0.0.1", "localhost")


@verbs.command("run-code")
def run_code(
    image: Annotated[str, typer.Option(help="Image with the programs of the languages that are asked for.")] = "debian",
    internet: Annotated[bool, typer.Option("--internet", help="Code reaches the internet.")] = False,
    listen: Annotated[str, typer.Option(help="Where, on loopback.", metavar="HOST:PORT")] = "127.0.0.1:8080",
) -> None:
    """Answer SandboxFusion's POST /run_code, each call in a fork of a warm sandbox."""
    with exit_codes():
        address, _, port = listen.rpartition(":")
        if address not in LOOPBACK or not port.isdigit():
            raise Invalid(f"{listen} is no port of loopback", hint="it asks for no token: 127.0.0.1:PORT")
        from pagurus.integrations.sandbox_fusion import serve

        serve(host=address, port=int(port), image=image, internet=internet)
