"""Every struct that crosses a process boundary of a sandbox host, headed "A -> B".

Owns: the wire, one module for each area; import from here. Fields are append-only with defaults
(msgspec's schema evolution rules). Does not own: behaviour. The wire is MessagePack between SDK and
daemon, JSON for everybody else; bytes travel as they are in MessagePack and as base64 in JSON.
"""

from sandbox.messages.checkpoints import (
    CheckpointInfo,
    CheckpointRequest,
    CheckpointState,
    ForkEntry,
    ForkRequest,
    RestoreRequest,
    RestoreResult,
)
from sandbox.messages.commands import Chunk, ExecRequest, ExecResult, TurnInfo
from sandbox.messages.files import Change, FileEvent, FileInfo
from sandbox.messages.gateway import (
    Exchange,
    ExchangeInfo,
    Gateway,
    GatewayStatistics,
    ReplayInfo,
    ReplayRequest,
    SideRule,
    TokenInfo,
    Upstream,
    UpstreamInfo,
)
from sandbox.messages.images import CommitRequest, ImageConfig, ImageInfo
from sandbox.messages.network import Network, NetworkCounters, NetworkStatistics, NetworkStatus, Refusal
from sandbox.messages.sandboxes import CreateRequest, Limits, Retention, SandboxInfo, SandboxState, Statistics
from sandbox.messages.verdict import Effects, Verdict

__all__ = [
    "Change",
    "CheckpointInfo",
    "CheckpointRequest",
    "CheckpointState",
    "Chunk",
    "CommitRequest",
    "CreateRequest",
    "Effects",
    "Exchange",
    "ExchangeInfo",
    "ExecRequest",
    "ExecResult",
    "FileEvent",
    "FileInfo",
    "ForkEntry",
    "ForkRequest",
    "Gateway",
    "GatewayStatistics",
    "ImageConfig",
    "ImageInfo",
    "Limits",
    "Network",
    "NetworkCounters",
    "NetworkStatistics",
    "NetworkStatus",
    "Refusal",
    "ReplayInfo",
    "ReplayRequest",
    "RestoreRequest",
    "RestoreResult",
    "Retention",
    "SandboxInfo",
    "SandboxState",
    "SideRule",
    "Statistics",
    "TokenInfo",
    "TurnInfo",
    "Upstream",
    "UpstreamInfo",
    "Verdict",
]
