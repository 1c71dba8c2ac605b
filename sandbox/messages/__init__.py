"""Every struct that crosses a process boundary of a sandbox host, headed "A -> B".

Fields are append-only with defaults (msgspec's schema evolution rules).

The wire is MessagePack between SDK and daemon, JSON for everybody else; bytes travel as they are in MessagePack and as
base64 in JSON.
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
from sandbox.messages.files import Change, FileEvent, FileInfo, FileVersions
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
from sandbox.messages.ignore import IgnoreRules
from sandbox.messages.images import (
    CommitRequest,
    CopyRequest,
    CopyResult,
    HealthCheck,
    ImageConfig,
    ImageInfo,
    KeepStep,
    NameImage,
    PullImage,
    PullProgress,
    PushImage,
    PushResult,
    StepInfo,
    StepsRemoved,
    StepsTarget,
)
from sandbox.messages.network import (
    Credential,
    CredentialInfo,
    Network,
    NetworkCounters,
    NetworkStatistics,
    NetworkStatus,
    Refusal,
)
from sandbox.messages.processes import (
    LogChunk,
    Logs,
    Metrics,
    ProcessInfo,
    ProcessRequest,
    ProgramKind,
    ProgramState,
    SignalRequest,
    TerminalRequest,
)
from sandbox.messages.sandboxes import (
    AtEnd,
    CreateRequest,
    LabelsRequest,
    LifetimeRequest,
    Limits,
    Mount,
    Retention,
    SandboxInfo,
    SandboxState,
    Statistics,
)
from sandbox.messages.services import (
    Composition,
    Service,
    ServiceInfo,
    StopRequest,
    UpRequest,
)
from sandbox.messages.sessions import SessionExecRequest, SessionRequest, SessionSignalRequest
from sandbox.messages.verdict import Effects, Verdict
