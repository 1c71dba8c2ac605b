"""Routes of runs: what a client renews while it lives."""

from __future__ import annotations

import msgspec

from daemon.api.route import Area
from daemon.host import runs
from daemon.host.host import Host
from sandbox.errors import Invalid
from sandbox.messages.runs import RunEnded, RunInfo, RunName, RunRequest

AREA = Area()


@AREA("PUT", "/v1/runs/{run}", scope="exec")
async def _renew(host: Host, run: str, body: RunRequest) -> RunInfo:
    """Begin a run, or renew its lease. Sandboxes with the label pagurus.run=RUN are removed when it is not renewed."""
    await host.runs.renew(_name(run), body.lease)
    return RunInfo(run=run, lease=body.lease)


@AREA("DELETE", "/v1/runs/{run}", scope="exec")
async def _end(host: Host, run: str) -> RunEnded:
    """End a run with its sandboxes."""
    owner = await host.runs.end(_name(run))
    return RunEnded(removed=await runs.remove(host, runs.belonging(list(host.live_sandboxes.values()), {(owner, run)})))


def _name(run: str) -> str:
    try:
        return msgspec.convert(run, RunName)
    except msgspec.ValidationError:
        raise Invalid("no run may be called so", hint="letters, digits, dots, dashes and underscores") from None
