"""``pagurus migrate``: move a running sandbox to another host of the cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from pagurus import output
from pagurus.common import Json, SandboxName, call

verbs = typer.Typer()


@verbs.command()
def migrate(
    sandbox: SandboxName,
    host: Annotated[str, typer.Argument(metavar="HOST", help="Name of a host of the cluster.")],
    json: Json = False,
) -> None:
    """Move a running sandbox to another host of the cluster."""
    from sandbox.messages.cluster import MoveRequest, MoveResult

    request = MoveRequest(sandbox=sandbox, host=host)
    moved = call(lambda cluster: cluster.call("POST", "/v1/cluster/moves", MoveResult, request))
    if json:
        output.as_json(moved)
    else:
        print(f"{moved.sandbox} is on {moved.host}: {output.size(moved.copied_bytes)}, {moved.pause_ms:.0f} ms still")
