"""SDK <-> daemon: shells that keep their state, and turns of several acts."""

from __future__ import annotations

from typing import Annotated

import msgspec

from sandbox.messages.processes import Deadline, OutputLimit, ServiceName, SignalNumber, User


class SessionRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: POST /v1/sandboxes/{id}/sessions"""

    shell: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)] | None = None  # None: bash, or else sh
    env: dict[str, str] = {}
    cwd: str | None = None
    user: User | None = None
    service: ServiceName | None = None  # of a composition, where it runs; None: its main one


class SessionExecRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: POST /v1/sandboxes/{id}/sessions/{session}/exec

    The same `key` again is the same request again: its answer is returned once more, nothing is run twice.
    """

    command: Annotated[str, msgspec.Meta(max_length=2 << 20)]
    key: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    timeout: Deadline | None = 60.0  # seconds; then it is interrupted
    output_limit: OutputLimit = 1 << 20
    ends_turn: bool = True


class SessionSignalRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """SDK -> daemon: POST /v1/sandboxes/{id}/sessions/{session}/signal"""

    signal: SignalNumber = 2
