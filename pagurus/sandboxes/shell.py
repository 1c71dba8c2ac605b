"""``pagurus shell`` and ``pagurus port-forward``."""

from __future__ import annotations

from typing import Annotated

import typer

from pagurus.common import IN_ORDER, SandboxName, ServiceOption, WhoOption, exit_codes
from pagurus.sandboxes.exec import meant

verbs = typer.Typer()


@verbs.command(context_settings=IN_ORDER)
def shell(
    sandbox: SandboxName,
    command: Annotated[list[str] | None, typer.Argument(help="Instead of a shell.")] = None,
    user: WhoOption = None,
    service: ServiceOption = None,
    attach: Annotated[str | None, typer.Option(help="Return to a terminal that is open already.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the terminal and its log after its end.")] = False,
) -> None:
    """A terminal in a sandbox. Exits with the code of the shell; what was done is a turn."""
    import asyncio

    from pagurus.sandboxes.terminal import visit

    with exit_codes():
        sitting = visit(sandbox, meant(command or []) or None, user=user, service=service, attach=attach, keep=keep)
        code = asyncio.run(sitting)
    raise typer.Exit(code)


@verbs.command("port-forward")
def port_forward(
    sandbox: SandboxName,
    pair: Annotated[str, typer.Argument(help="LOCAL:REMOTE, or REMOTE for any free port here.", metavar="PORTS")],
    address: Annotated[str, typer.Option(help="Address of this machine to listen on.")] = "127.0.0.1",
) -> None:
    """Forward a port of this machine to one of a sandbox. Ctrl-C ends it."""
    import asyncio

    from pagurus.sandboxes.terminal import forward, ports

    local, remote = ports(pair)
    asyncio.run(forward(sandbox, local, remote, address))
