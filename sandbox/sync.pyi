"""Static types of sandbox.sync. Made by scripts/sync_stubs.py; do not edit."""

import builtins
import ssl
from collections.abc import AsyncIterator, Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import aiohttp

from sandbox.errors import PagurusError
from sandbox.messages import (
    AtEnd,
    Change,
    CheckpointInfo,
    Chunk,
    Exchange,
    ExchangeInfo,
    ExecResult,
    FileEvent,
    FileInfo,
    Gateway,
    GatewayStatistics,
    IgnoreRules,
    ImageConfig,
    ImageInfo,
    Limits,
    LogChunk,
    Logs,
    Metrics,
    Mount,
    Network,
    NetworkStatus,
    ProcessInfo,
    PushResult,
    RestoreResult,
    Retention,
    SandboxInfo,
    ServiceInfo,
    Statistics,
    StepInfo,
    StepsRemoved,
    TokenInfo,
    TurnInfo,
    Upstream,
    UpstreamInfo,
)
from sandbox.messages.store import CheckpointReport, ImportResult
from sandbox.sdk.compose import Pull
from sandbox.sdk.network import Credentials

__all__ = [
    "Client",
    "CommandStream",
    "Conversation",
    "Files",
    "Fork",
    "Models",
    "Networking",
    "Ports",
    "Process",
    "Processes",
    "Run",
    "Sandbox",
    "ServiceHandle",
    "Services",
    "Session",
    "Sessions",
    "Store",
    "Terminal",
    "Terminals",
    "Turn",
]

T = TypeVar("T")

class Sandbox:
    """One sandbox. ``with`` removes it at the end."""

    info: SandboxInfo
    files: Files
    gateway: Conversation
    network: Networking
    processes: Processes
    sessions: Sessions
    terminals: Terminals
    ports: Ports
    services: Services
    def __enter__(self) -> Sandbox: ...
    def __exit__(self, *error: object) -> None: ...
    def captured(self, of: ExecResult | CheckpointInfo | str) -> CheckpointInfo:
        """Wait until the checkpoint of a turn is captured: from then on it can be restored."""
    def checkpoint(
        self, label: str | None = None, *, wait: Literal["captured", "durable"] = "captured"
    ) -> CheckpointInfo:
        """A checkpoint of the state as it is now."""
    def diff(self, since: CheckpointInfo | str, *, why: bool = False) -> builtins.list[Change]:
        """How the file tree differs from a checkpoint. `why`: with the call that changed each, where it is known."""
    def durable(self, of: ExecResult | CheckpointInfo | str) -> CheckpointInfo:
        """Wait until the checkpoint of a turn survives the loss of power."""
    def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = 60.0,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: int | str | None = None,
        service: str | None = None,
        output_limit: int = ...,
        ends_turn: bool = True,
        key: str | None = None,
    ) -> ExecResult:
        """Run a command (a string for ``/bin/sh -c``, or an argument vector) and end the turn."""
    def extend(self, seconds: float | None) -> SandboxInfo:
        """Move its end: so many seconds from now, sooner or later than it was; None: it does not end by itself."""
    def fork(
        self, count: int = 1, *, verify: bool = False, labels: dict[str, str] | None = None
    ) -> builtins.list[Fork]:
        """`count` new sandboxes that continue from the state as it is now. See :meth:`Client.fork`."""
    @property
    def id(self) -> str: ...
    def kill(self) -> None:
        """Kill all its processes; restore() brings it back."""
    def metrics(self) -> Metrics:
        """What it uses now: processor seconds, memory, processes, disk."""
    def pty(
        self, command: str | Sequence[str] | None = None, *, rows: int = 24, columns: int = 80, **options: Any
    ) -> AbstractContextManager[Terminal]:
        """A program (None: a shell) at a terminal that ends with the block. One that stays: ``sb.terminals.open``."""
    def refresh(self) -> SandboxInfo:
        """The sandbox as it is now."""
    def remove(self) -> None:
        """Remove it with its checkpoints, but for what forks of it need. Idempotent."""
    def restore(self, to: CheckpointInfo | str | None = None, *, verify: bool = False) -> RestoreResult:
        """Back to a checkpoint (None: the latest), in place. Also revives a dead sandbox."""
    def set_labels(self, labels: dict[str, str | None]) -> SandboxInfo:
        """Set labels, and remove those with None."""
    def stream(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = None,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: int | str | None = None,
        service: str | None = None,
        ends_turn: bool = True,
    ) -> CommandStream:
        """Run a command and yield its output as it comes; the last chunk carries the result."""
    def tree(self) -> builtins.list[CheckpointInfo]:
        """Its checkpoints and those that they descend from, oldest first."""
    def turn(self) -> Turn:
        """``with sb.turn():`` makes all acts in the block one turn, judged and captured at its end."""
    def turns(self) -> builtins.list[TurnInfo]:
        """What its turns did, oldest first."""

class Files:
    """The file tree of a sandbox. Paths are absolute or relative to its root."""
    def append(self, path: str, data: bytes | str, *, service: str | None = None) -> None:
        """Write at the end of a regular file, which is made when it is missing."""
    def archive(self, path: str, *, service: str | None = None) -> Generator[bytes]:
        """A directory (its content) or a file as a tar stream, owners as the sandbox sees them."""
    def download(
        self,
        path: str,
        local: str | Path,
        *,
        below: str = "",
        limit: int = ...,
        progress: Callable[[int], Any] | None = None,
        service: str | None = None,
    ) -> int:
        """Copy a file, or the content of a directory, into the local directory `local`, made when need be."""
    def exists(self, path: str, *, service: str | None = None) -> bool:
        """Whether there is anything at `path`; a dangling link counts."""
    def list(self, path: str = "/", *, service: str | None = None) -> builtins.list[FileInfo]:
        """The entries of a directory, by name."""
    def mkdir(self, path: str, *, mode: int = ..., service: str | None = None) -> None:
        """Make a directory with its missing parents; one that exists stays as it is."""
    def move(self, source: str, target: str, *, service: str | None = None) -> None:
        """Rename a file or directory, over a file that is there; missing parents of `target` are made."""
    def read(self, path: str, *, offset: int = 0, limit: int | None = None, service: str | None = None) -> bytes:
        """The content of a regular file: at most `limit` bytes from `offset`."""
    def remove(self, path: str, *, recursive: bool = False, service: str | None = None) -> None:
        """Remove a file, a link or an empty directory; with `recursive`, a directory and what is in it."""
    def stat(self, path: str, *, service: str | None = None) -> FileInfo:
        """What `path` is; a symbolic link is not followed."""
    def stream(
        self, path: str, *, offset: int = 0, limit: int | None = None, service: str | None = None
    ) -> Generator[bytes]:
        """The same bytes in parts as they come, at most 256 KiB each. The host reads no faster than the caller."""
    def upload(
        self,
        local: str | Path,
        path: str,
        *,
        progress: Callable[[int], Any] | None = None,
        service: str | None = None,
        without: Collection[str] = ...,
    ) -> int:
        """Copy a local file, or the content of a local directory, into the directory `path`."""
    def watch(self, path: str = "/", *, recursive: bool = False, service: str | None = None) -> Generator[FileEvent]:
        """Changes below a directory as they happen; paths are relative to it."""
    def write(
        self, path: str, data: bytes | str, *, mode: int = ..., append: bool = False, service: str | None = None
    ) -> None:
        """Write a regular file, of at most 256 MiB at once; missing parents are made. Text is UTF-8."""

class Conversation:
    """What the agent of one sandbox and its model say to each other."""
    def exchange(self, of: ExchangeInfo | int) -> Exchange:
        """One exchange with its content."""
    def exchanges(self, limit: int = ...) -> builtins.list[ExchangeInfo]:
        """The last exchanges, the oldest first."""
    def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = 60.0,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: int | str | None = None,
        output_limit: int = ...,
    ) -> ExecResult:
        """The next command of an agent outside. It ends no turn: the agent's next request does."""
    def replay(self, to: CheckpointInfo | str) -> int:
        """Answer the coming requests from the record up to a checkpoint, of this sandbox or another."""
    def token(self) -> TokenInfo:
        """A new token by which an agent outside is known as this sandbox's. The one before ends."""

class Models:
    """The gateway of the host."""
    def drop(self, name: str) -> None:
        """Remove an upstream that no sandbox uses."""
    def put(self, name: str, upstream: Upstream) -> None:
        """Make or change an upstream. Its key lies in a file of the host's."""
    def statistics(self) -> GatewayStatistics: ...
    def upstreams(self) -> builtins.list[UpstreamInfo]:
        """Where requests may go. Keys are not shown."""

class Networking:
    """What a sandbox may reach: ``sb.network``."""
    def set(self, network: Network) -> NetworkStatus:
        """Change the policy of the running sandbox. In force when this returns."""
    def status(self) -> NetworkStatus:
        """The policy, the sandbox's address, its traffic, and the latest things that it was refused."""

class Images:
    """The images that sandboxes start from. Raises ImageNotFound, Conflict (the name is taken), Invalid."""
    def build(
        self,
        name: str,
        context: str | Path,
        *,
        file: str | Path | None = None,
        arguments: dict[str, str] | None = None,
        target: str | None = None,
        network: Network | None = None,
        limits: Limits | None = None,
        replace: bool = False,
        cache: bool = True,
        offline: bool = False,
        secrets: Mapping[str, bytes] | None = None,
        ssh: Mapping[str, str | Path] | None = None,
        contexts: Mapping[str, str] | None = None,
        output: Callable[[str], Any] | None = None,
    ) -> ImageInfo:
        """Build a Dockerfile, every step in a sandbox; no Docker Engine is needed."""
    def commit(
        self, checkpoint: CheckpointInfo | str, name: str, *, config: ImageConfig | None = None, replace: bool = False
    ) -> ImageInfo:
        """Make an image of the files of a checkpoint. `config`: None keeps that of the image below it."""
    def export(self, name: str, archive: str | Path, *, progress: Callable[[int], Any] | None = None) -> None:
        """Write an image to a new local file: a tar of an OCI layout, which `docker load` reads as well."""
    def find_steps(self, keys: Sequence[str]) -> Sequence[StepInfo]:
        """The kept steps with one of these keys (see :mod:`sandbox.sdk.plan`)."""
    def get(self, name: str) -> ImageInfo:
        """One image."""
    def give_name(
        self, image: str, name: str, *, config: ImageConfig | None = None, replace: bool = False
    ) -> ImageInfo:
        """Give the tree of an image another name. `config`: None keeps that of the image. No file is copied."""
    def keep_step(self, key: str, checkpoint: str, title: str) -> StepInfo:
        """Keep a checkpoint as the outcome of a step of a build, once it is durable."""
    def list(self) -> builtins.list[ImageInfo]:
        """All images, by name."""
    def prune(self) -> StepsRemoved:
        """Remove the kept steps, but for those that living sandboxes are based on."""
    def pull(
        self, reference: str, name: str | None = None, *, progress: Callable[[int, int], object] | None = None
    ) -> ImageInfo:
        """Take an image from a registry, by the credentials of the host: ``pull("python:3.12-slim")``."""
    def push(self, name: str, reference: str) -> PushResult:
        """Send an image to a registry, by the credentials of the host: ``push("web", "registry:5000/team/web:2")``."""
    def remove(self, name: str) -> None:
        """Remove a name. The tree stays while another name or a sandbox needs it."""
    def steps(self) -> Sequence[StepInfo]:
        """The steps of builds that the host keeps, the one used last first."""
    def upload(
        self, name: str, archive: str | Path, *, replace: bool = False, progress: Callable[[int], Any] | None = None
    ) -> ImageInfo:
        """Make an image from a local archive: an OCI layout, what ``docker save`` writes, or a tar of a root."""

class Store:
    """Checkpoints that lie on a host: list, label, remove, verify, move to another host."""
    def checkpoints(self) -> builtins.list[CheckpointInfo]:
        """All checkpoints of the host, oldest first."""
    def collect(self) -> None:
        """Apply every retention policy and free what nothing refers to, now instead of soon."""
    def have(self) -> bytes:
        """What need not be sent to this host: give it to `stream` of another one."""
    def label(self, checkpoint: str | CheckpointInfo, label: str | None) -> CheckpointInfo:
        """Label a checkpoint, or take its label away (None)."""
    def pull(
        self,
        address: str,
        checkpoint: str | CheckpointInfo,
        *,
        token: str | None = None,
        ca: str | None = None,
        mounts: bool = False,
    ) -> ImportResult:
        """Let the daemon fetch a checkpoint from another one, only what it lacks. `mounts`: as for `receive`."""
    def receive(self, stream: AsyncIterator[bytes], *, mounts: bool = False) -> ImportResult:
        """Import what another host's `stream` gave. All or nothing."""
    def remove(self, checkpoint: str | CheckpointInfo) -> None:
        """Remove a checkpoint. Raises Conflict when a sandbox is based on it."""
    def stream(
        self,
        checkpoint: str | CheckpointInfo,
        *,
        since: str | CheckpointInfo | None = None,
        have: bytes = b"",
        manifest: bool = False,
    ) -> Generator[bytes]:
        """A durable checkpoint as bytes, less what the other side has: a checkpoint, or what its `have` said."""
    def verify(self, *checkpoints: str | CheckpointInfo, restore: bool = False) -> builtins.list[CheckpointReport]:
        """Hash checkpoints again; without any: all of the host, and its catalogue. Reads all of them."""

class Processes:
    """The background processes of a sandbox."""
    def get(self, process: str) -> Process:
        """The process with this id."""
    def list(self) -> builtins.list[Process]:
        """Those of the sandbox's present state, oldest first; the latest ended ones too."""
    def start(
        self,
        command: str | Sequence[str],
        *,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        user: int | str | None = None,
        service: str | None = None,
        stdin: Literal["pipe"] | None = None,
        log_limit: int = ...,
        ends_turn: bool = True,
        excluded: bool = False,
    ) -> Process:
        """Start a program and return at once. Of each output the newest `log_limit` bytes are kept."""

class Process:
    """A background process."""

    info: ProcessInfo
    def close_stdin(self) -> None:
        """Nothing follows: it reads the end of its stdin."""
    @property
    def id(self) -> str: ...
    def kill(self, number: int | str = ...) -> None:
        """The same, with SIGKILL by default."""
    def logs(self, since: Logs | None = None) -> Logs:
        """What is kept of its outputs: all of it, or what follows an earlier answer."""
    def refresh(self) -> ProcessInfo:
        """The process as it is now, also after a restore; what is written next follows what it has got until then."""
    def remove(self) -> None:
        """End it with all that it started, and forget its log."""
    def signal(self, number: int | str = ..., *, group: bool = True) -> None:
        """Send a signal (``"INT"``, ``2``) to its process group (or to it alone)."""
    def stream(self, since: Logs | None = None) -> Generator[LogChunk]:
        """Its outputs as they come, from the oldest byte kept, until it has closed both."""
    def wait(self, timeout: float | None = None) -> int | None:
        """Its exit code (128 + signal number when killed by one) once it has ended; None after `timeout` seconds."""
    def write(self, data: bytes | str) -> None:
        """Give it stdin. Returns when it has taken all, so a process that does not read makes us wait."""

class Terminals:
    """The terminals of a sandbox."""
    def get(self, terminal: str) -> Terminal:
        """The terminal with this id, to sit down at it again."""
    def list(self) -> builtins.list[ProcessInfo]:
        """Those of the sandbox's present state."""
    def open(
        self,
        command: str | Sequence[str] | None = None,
        *,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        user: int | str | None = None,
        service: str | None = None,
        rows: int = 24,
        columns: int = 80,
    ) -> Terminal:
        """Start a program (None: a shell) at a new terminal. Enter the result to sit down at it."""

class Terminal:
    """A program at a terminal. ``with`` sits down at it and leaves it at the end; the program lives on."""

    info: ProcessInfo
    exit_code: int | None
    def __enter__(self) -> Terminal: ...
    def __iter__(self) -> Iterator[bytes]: ...
    def __exit__(self, *error: object) -> None: ...
    @property
    def id(self) -> str: ...
    def kill(self) -> None:
        """End the program and remove the terminal."""
    def read(self) -> bytes | None:
        """The next output; None once the program has ended."""
    def resize(self, rows: int, columns: int) -> None:
        """Set the size of the window."""
    def write(self, data: bytes | str) -> None:
        """Type something."""

class Services:
    """The services of a sandbox that was made from a composition. Raises Invalid for a sandbox of one image."""
    def get(self, name: str) -> ServiceHandle:
        """One service. Raises NotFound."""
    def list(self) -> Sequence[ServiceInfo]:
        """All of them, as they are in the sandbox's present state."""
    def up(self, *services: str, wait: bool = True, timeout: float = 300.0) -> Sequence[ServiceInfo]:
        """Start those that do not run (all, or these with what they depend on), in order, and end the turn."""

class ServiceHandle:
    """One service. After a restore it is that of the restored state."""

    info: ServiceInfo
    def exec(self, command: str | Sequence[str], **options: Any) -> ExecResult:
        """Run a command in it, as :meth:`Sandbox.exec` does."""
    def logs(self, since: Logs | None = None) -> Logs:
        """What is kept of its outputs since its last start: all of it, or what follows an earlier answer."""
    @property
    def name(self) -> str: ...
    def refresh(self) -> ServiceInfo:
        """The service as it is now."""
    def restart(self, timeout: float | None = None) -> ServiceInfo:
        """Stop it and start it again, and end the turn."""
    def stop(self, timeout: float | None = None) -> ServiceInfo:
        """Stop it by its signal, with SIGKILL after `timeout` seconds (None: its own). No policy starts it."""
    def stream(self) -> Generator[LogChunk]:
        """Its outputs as they come, from the oldest byte kept, also those after a restart, until it has ended."""

class Sessions:
    """The sessions of a sandbox."""
    def get(self, session: str) -> Session:
        """The session with this id: also in a fork, where it continues from where the sandbox was forked."""
    def list(self) -> builtins.list[Session]:
        """Those of the sandbox's present state."""
    def open(
        self,
        shell: str | None = None,
        *,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        user: int | str | None = None,
        service: str | None = None,
    ) -> Session:
        """Start a shell (None: bash, or else sh) that lives until it is closed; of a composition, in `service`."""

class Session:
    """One shell. ``with`` closes it at the end. After a restore it is the shell of that state."""

    info: ProcessInfo
    def __enter__(self) -> Session: ...
    def __exit__(self, *error: object) -> None: ...
    def close(self) -> None:
        """End the shell with all that it started."""
    def exec(
        self,
        command: str,
        *,
        timeout: float | None = 60.0,
        output_limit: int = ...,
        ends_turn: bool = True,
        key: str | None = None,
    ) -> ExecResult:
        """Run a command in the shell: directory, variables, functions, jobs and ``$?`` stay for the next one."""
    @property
    def id(self) -> str: ...
    def signal(self, number: int | str = ...) -> None:
        """Send a signal (``"TERM"``, ``15``) to what the running command has in front; SIGINT is Ctrl-C."""
    def stream(
        self, command: str, *, timeout: float | None = None, ends_turn: bool = True, key: str | None = None
    ) -> Generator[Chunk]:
        """Run a command and yield its output as it comes (the first 16 MiB of each); the last chunk has the result."""

class Ports:
    """The TCP ports of a sandbox. Its network policy does not matter here: the way leads through the daemon."""
    def connect(self, port: int) -> tuple[Reader, Writer]:
        """A connection to a port of the sandbox: ``reader, writer = await sb.ports.connect(8000)``."""
    def forward(self, port: int, *, host: str = "127.0.0.1", local_port: int = 0) -> AbstractContextManager[str]:
        """A port of this machine that leads to `port` of the sandbox; yields ``HOST:PORT``."""
    def list(self) -> builtins.list[int]:
        """Those on which something listens."""

class Turn:
    """All acts on the sandbox within it are one turn, judged and captured at the end."""

    result: ExecResult | None
    def __enter__(self) -> Turn: ...
    def __exit__(self, *error: object) -> None: ...

class Run:
    """Sandboxes that live no longer than this client."""

    id: Any
    lease: float
    trouble: PagurusError | None
    def __enter__(self) -> Run: ...
    def __exit__(self, *error: object) -> None: ...
    def begin(self) -> None:
        """Begin it, and renew its lease from now on."""
    def compose(
        self, paths: str | Path | Sequence[str | Path] = ".", *, labels: dict[str, str] | None = None, **options: Any
    ) -> Sandbox:
        """A new sandbox of the run, of compose files. See :meth:`Client.compose`."""
    def create(self, image: str, *, labels: dict[str, str] | None = None, **options: Any) -> Sandbox:
        """A new sandbox of the run. See :meth:`Client.create`."""
    def end(self) -> int:
        """End it with its sandboxes; how many there were."""
    def fork(
        self, checkpoint: str | CheckpointInfo, count: int = 1, *, labels: dict[str, str] | None = None, **options: Any
    ) -> builtins.list[Fork]:
        """Sandboxes of the run that continue from a checkpoint. See :meth:`Client.fork`."""
    def labelled(self, labels: dict[str, str] | None = None) -> dict[str, str]:
        """These labels, and the one that makes a sandbox one of the run."""
    def leave(self) -> None:
        """Renew it no more: its sandboxes end after the lease, unless another client renews it."""
    def renew(self) -> None:
        """Raises Conflict when it has ended."""
    def sandboxes(self) -> builtins.list[SandboxInfo]:
        """Those of the run."""

class Fork:
    """One child of a fork: a `sandbox`, or the `error` that this child alone met."""

    error: PagurusError | None
    @property
    def sandbox(self) -> Sandbox:
        """The new sandbox; raises if this child failed."""

class CommandStream:
    """A command whose output is streamed: iterate for its chunks."""
    def __iter__(self) -> Iterator[Chunk]: ...
    def __next__(self) -> Chunk: ...
    def aclose(self) -> None:
        """Leave it: the command is ended."""
    def signal(self, number: int | str = ..., *, group: bool = True) -> None:
        """Send a signal (``"INT"``, ``2``) to the command with all that it started, or to it alone."""

class Client:
    """A sandbox host. `address` is the daemon's socket, or a URL where a daemon listens on TCP."""
    def __init__(
        self,
        address: str | Path | None = None,
        *,
        token: str | None = None,
        ca: str | Path | ssl.SSLContext | None = None,
        connections: int = ...,
        timeout: float = 20.0,
    ) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...
    def call(
        self,
        method: str,
        path: str,
        answer: type[T],
        body: object = None,
        *,
        timeout: float | None = None,
        keyed: bool | str = False,
    ) -> T:
        """One request; the decoded answer, or the error that the daemon raised."""
    def checkpoint(
        self, checkpoint: str | CheckpointInfo, *, wait: Literal["captured", "durable"] | None = None
    ) -> CheckpointInfo:
        """A checkpoint as it is now, or once it is captured or durable; raises if it failed."""
    def close(self) -> None:
        """Close the connections. Sandboxes live on. Idempotent."""
    def compose(
        self,
        paths: str | Path | Sequence[str | Path] = ".",
        *,
        name: str | None = None,
        profiles: Sequence[str] = ...,
        env: Mapping[str, str] | None = None,
        main: str | None = None,
        limits: Limits | None = None,
        network: Network | None = None,
        build: bool = True,
        pull: Pull = "missing",
        copy_binds: bool = False,
        directory: str | Path | None = None,
        up: bool = True,
        wait: bool = True,
        timeout: float = 300.0,
        output: Callable[[str], Any] | None = None,
        **options: Any,
    ) -> Sandbox:
        """A new sandbox of the services of compose files: ``with host.compose("compose.yaml") as sb``."""
    def create(
        self,
        image: str,
        *,
        name: str | None = None,
        limits: Limits | None = None,
        network: Network | None = None,
        env: dict[str, str] | None = None,
        workdir: str | None = None,
        user: int | str | None = None,
        labels: dict[str, str] | None = None,
        mounts: builtins.list[Mount] | None = None,
        durable_answers: bool = False,
        replicated_answers: bool = False,
        gateway: Gateway | None = None,
        retention: Retention | None = None,
        lifetime: float | None = None,
        idle_timeout: float | None = None,
        at_end: AtEnd = ...,
        ignore: IgnoreRules | None = None,
        no_new_privs: bool = False,
        docker: bool = False,
    ) -> Sandbox:
        """A new sandbox: ``sb = await host.create(...)``, or ``with host.create(...) as sb``."""
    @property
    def credentials(self) -> Credentials:
        """Headers that requests of sandboxes get on their way out."""
    def fork(
        self,
        checkpoint: str | CheckpointInfo,
        count: int = 1,
        *,
        verify: bool = False,
        labels: dict[str, str] | None = None,
    ) -> builtins.list[Fork]:
        """`count` new sandboxes that continue from a checkpoint. Each succeeds or fails alone."""
    def frames(self, method: str, path: str, kind: type[T], body: object = None) -> Generator[T]:
        """One request whose answer is a stream of values, each behind its length."""
    @property
    def gateway(self) -> Models:
        """The LLM gateway of the host."""
    def get(self, sandbox: str) -> Sandbox:
        """The sandbox with this id or name, or whose id alone begins so (``"s-4f"``)."""
    def health(self) -> dict[str, Any]: ...
    @property
    def images(self) -> Images:
        """The images that sandboxes start from."""
    def raw(
        self,
        method: str,
        path: str,
        data: bytes | AsyncIterator[bytes | memoryview] | None,
        kind: str,
        timeout: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> bytes:
        """One request with a body of bytes, or of an iterator of them; the bytes of the answer."""
    def raw_session(self) -> tuple[aiohttp.ClientSession, str]:
        """The session, and the address before the daemon's paths: to pass requests of others on as they are."""
    def request(
        self,
        method: str,
        path: str,
        data: bytes | AsyncIterator[bytes | memoryview] | None,
        kind: str,
        timeout: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> AbstractContextManager[aiohttp.ClientResponse]: ...
    def run(self, run: str | None = None, *, lease: float = 60.0) -> Run:
        """Sandboxes that end with this client: ``with host.run() as run: sb = await run.create("debian")``."""
    def sandboxes(self, labels: dict[str, str | None] | None = None) -> builtins.list[SandboxInfo]:
        """All, or those with these labels (None: with any value)."""
    def socket(self, path: str) -> AbstractContextManager[aiohttp.ClientWebSocketResponse]:
        """A connection that carries messages both ways, or the error with which the daemon refused it."""
    def statistics(self) -> Statistics: ...
    @property
    def store(self) -> Store:
        """The checkpoints of the host as content."""

class Reader:
    def read(self, n: int = -1) -> bytes: ...
    def readline(self) -> bytes: ...
    def readexactly(self, n: int) -> bytes: ...
    def readuntil(self, separator: bytes = b"\n") -> bytes: ...
    def at_eof(self) -> bool: ...
    def __iter__(self) -> Iterator[bytes]: ...

class Writer:
    def write(self, data: bytes) -> None: ...
    def writelines(self, data: Iterable[bytes]) -> None: ...
    def drain(self) -> None: ...
    def write_eof(self) -> None: ...
    def can_write_eof(self) -> bool: ...
    def is_closing(self) -> bool: ...
    def close(self) -> None: ...
    def wait_closed(self) -> None: ...
    def get_extra_info(self, name: str, default: Any = None) -> Any: ...
