"""Routes of checkpoints, restores and forks."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from daemon.api.route import Area
from daemon.host.host import Host
from daemon.turns.turns import LiveSandbox
from sandbox.messages import CheckpointInfo, CheckpointRequest, ForkEntry, ForkRequest, RestoreRequest, RestoreResult

AREA = Area()
MAX_WAIT = 600.0  # seconds of one long poll


class WaitQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What to wait for, and how many seconds at most. Without `wait` the answer comes at once."""

    wait: Literal["captured", "durable"] | None = None
    timeout: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT)] = 60.0


@AREA("GET", "/v1/sandboxes/{id}/checkpoints")
async def _tree(host: Host, live: LiveSandbox) -> list[CheckpointInfo]:
    """The checkpoints of a sandbox and those that they descend from, the oldest first."""
    return host.tree(live.row.id)


@AREA("POST", "/v1/sandboxes/{id}/checkpoints", status=201, scope="exec", keyed="again")
async def _checkpoint(live: LiveSandbox, body: CheckpointRequest) -> CheckpointInfo:
    """Capture the state of a sandbox as it is now."""
    inflight = await live.checkpoint(body.label)
    durable = body.wait == "durable"
    await inflight.finalized(durable=durable)
    if (trouble := inflight.trouble(durable=durable)) is not None:
        raise trouble
    return inflight.row.info()


@AREA("POST", "/v1/sandboxes/{id}/restore", scope="exec", keyed="again")
async def _restore(host: Host, live: LiveSandbox, body: RestoreRequest) -> RestoreResult:
    """Take a sandbox back to a checkpoint, in place. Also revives a dead one."""
    return await host.restore(live.row.id, body)


@AREA("POST", "/v1/sandboxes/{id}/fork", status=201, scope="exec", keyed="redo")
async def _fork_sandbox(host: Host, live: LiveSandbox, body: ForkRequest) -> list[ForkEntry]:
    """Make sandboxes that continue from the state as it is now. Each succeeds or fails alone."""
    return await host.fork_sandbox(live.row.id, body)


@AREA("GET", "/v1/checkpoints/{checkpoint}")
async def _wait(host: Host, checkpoint: str, query: WaitQuery) -> CheckpointInfo:
    """A checkpoint, once it is captured or durable, or has failed, or the time is over."""
    return await host.wait_checkpoint(checkpoint, query.wait, query.timeout)


@AREA("POST", "/v1/checkpoints/{checkpoint}/fork", status=201, scope="exec", keyed="redo")
async def _fork(host: Host, checkpoint: str, body: ForkRequest) -> list[ForkEntry]:
    """Make sandboxes that continue from a checkpoint. Each succeeds or fails alone."""
    return await host.fork(checkpoint, body)
