"""Pagurus sandboxes: the SDK.

::

    from sandbox import Client, Limits

    async with Client() as host:
        async with await host.create("debian", limits=Limits(cpus=1, memory="1GiB")) as sb:
            result = await sb.exec("echo hello > /greeting")
            before = await sb.checkpoint("greeted")
            await sb.exec("rm /greeting")
            await sb.restore(before)

The synchronous twin is :mod:`sandbox.sync`. Importing this package loads none of its modules: each
name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sandbox.errors import (
        CheckpointFailed,
        Closed,
        CommandNotFound,
        Conflict,
        ConnectionBroken,
        EngineFailed,
        Forbidden,
        ImageNotFound,
        Interrupted,
        Invalid,
        NoDaemon,
        NoSpace,
        NotEqual,
        NotFound,
        PagurusError,
        Protocol,
        RestoreFailed,
        SandboxDead,
        Timeout,
        TooMany,
        Unauthorized,
        Unsupported,
    )
    from sandbox.messages import (
        AtEnd,
        Change,
        CheckpointInfo,
        CheckpointState,
        Chunk,
        Credential,
        CredentialInfo,
        Effects,
        ExecResult,
        FileInfo,
        Limits,
        LogChunk,
        Logs,
        Metrics,
        Mount,
        Network,
        NetworkCounters,
        NetworkStatus,
        ProcessInfo,
        ProgramState,
        Refusal,
        RestoreResult,
        Retention,
        SandboxInfo,
        SandboxState,
        Statistics,
        TurnInfo,
        Verdict,
    )
    from sandbox.sdk.client import Client
    from sandbox.sdk.files import Files
    from sandbox.sdk.handle import CommandStream, Creation, Fork, Sandbox
    from sandbox.sdk.processes import Process, Terminal
    from sandbox.sdk.sessions import Session
    from sandbox.sdk.turns import Turn

__all__ = [
    "AtEnd",
    "Change",
    "CheckpointFailed",
    "CheckpointInfo",
    "CheckpointState",
    "Chunk",
    "Client",
    "Closed",
    "CommandNotFound",
    "CommandStream",
    "Conflict",
    "ConnectionBroken",
    "Creation",
    "Credential",
    "CredentialInfo",
    "Effects",
    "EngineFailed",
    "ExecResult",
    "FileInfo",
    "Files",
    "Forbidden",
    "Fork",
    "ImageNotFound",
    "Interrupted",
    "Invalid",
    "Limits",
    "LogChunk",
    "Logs",
    "Metrics",
    "Mount",
    "Network",
    "NetworkCounters",
    "NetworkStatus",
    "NoDaemon",
    "NoSpace",
    "NotEqual",
    "NotFound",
    "PagurusError",
    "Process",
    "ProcessInfo",
    "ProgramState",
    "Protocol",
    "Refusal",
    "RestoreFailed",
    "RestoreResult",
    "Retention",
    "Sandbox",
    "SandboxDead",
    "SandboxInfo",
    "SandboxState",
    "Session",
    "Statistics",
    "Terminal",
    "Timeout",
    "TooMany",
    "Turn",
    "TurnInfo",
    "Unauthorized",
    "Unsupported",
    "Verdict",
]

_HOMES = ("errors", "messages", "sdk.client", "sdk.files", "sdk.handle", "sdk.processes", "sdk.sessions", "sdk.turns")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in _HOMES:
            if (result := getattr(importlib.import_module(f"{__name__}.{home}"), name, None)) is not None:
                globals()[name] = result
                return result
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
