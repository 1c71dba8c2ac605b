"""A sandbox of another host goes on here, under its own id.

Owns: what of it stays as it was. Does not own: how its state came (:mod:`daemon.store.imports`), how it comes back
(:mod:`daemon.host.restore`), that the other host no longer runs it, which the coordinator answers for.

Guarantee: it is the same sandbox: id, name, owner, host name and machine id, limits and settings, sessions
and processes, and the record of its turns as far as it is told; no fork hooks run.
Asked again for the same, it answers the same.
"""

from __future__ import annotations

import msgspec

from daemon.catalogue import ProgramRow, put_turn
from daemon.host.host import Host
from sandbox.errors import Conflict, Invalid
from sandbox.messages import SandboxInfo
from sandbox.messages.cluster import ArriveRequest


async def arrive(host: Host, checkpoint: str, request: ArriveRequest) -> SandboxInfo:
    """It runs when this returns. Raises Conflict where the id is taken by something else."""
    origin = await host.restorable(checkpoint)
    if (known := host.live_sandboxes.get(request.id)) is not None:
        if known.row.origin == origin.id:
            return known.row.info()
        raise Conflict(f"{request.id} is here already", remedy="remove it first", sandbox=request.id)
    if origin.sandbox != request.id:
        raise Conflict(f"checkpoint {origin.id} is of another sandbox: {origin.sandbox}", remedy="fork it instead")
    try:
        programs = msgspec.convert(request.programs, dict[str, ProgramRow])
    except msgspec.ValidationError as error:
        raise Invalid(f"the programs of {request.id} cannot be taken: {error}") from None
    with host.collector.pin(origin):
        row = host.forked(origin)
        row.id, row.hostname = request.id, request.id.removeprefix("s-")
        row.name, row.owner = request.name, request.owner
        row.programs = origin.programs = programs
        row.turn, row.created_at = origin.turn, request.created_at or row.created_at
        with host.made(row):
            await host.make(row, host.restorer.tree_below(row), origin, verify=request.verify)
    turns = [each for each in request.turns if each.sandbox == request.id and each.turn <= origin.turn]
    host.services.catalogue.later([put_turn(each) for each in turns])
    origin.owner = request.owner  # whoever sees the sandbox sees what it came from
    return row.info()
