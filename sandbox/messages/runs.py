"""Runs of clients, by which sandboxes end with the client that made them."""

from __future__ import annotations

from typing import Annotated

import msgspec

RUN_LABEL = "pagurus.run"  # of a sandbox: the run that it belongs to
RunName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")]
Lease = Annotated[float, msgspec.Meta(ge=1, le=1e9)]


class RunRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: PUT /v1/runs/{run}: begin a run, or renew its lease."""

    lease: Lease = 60.0  # seconds from now on; its sandboxes are removed unless it is renewed before


class RunInfo(msgspec.Struct, kw_only=True):
    """daemon -> SDK: a run."""

    run: str
    lease: float


class RunEnded(msgspec.Struct, kw_only=True):
    """daemon -> SDK: DELETE /v1/runs/{run}"""

    removed: int  # sandboxes
