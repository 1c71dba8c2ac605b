"""Every error that Pagurus raises towards its users, and the closed table that crosses the wire.

Guarantee: an error received from another process is one of this table or :class:`Protocol`; no class is ever looked up
by a name that a sandbox or a peer supplied.

::

    PagurusError                 code, message, hint; sandbox and turn where there is one
    ├── Invalid                  the caller's argument is wrong              (you)
    ├── NotFound                 no such sandbox, checkpoint, image, file    (you)
    ├── Conflict                 not possible in this state                  (you)
    ├── Closed                   used after close or removal                 (you)
    ├── Unauthorized             no token, or not one that allows this       (you)
    ├── Forbidden                the token does not reach so far             (you)
    ├── TooMany                  over a limit of requests: wait, then again  (you)
    ├── ImageNotFound            no such image; the message lists those there are
    ├── CommandNotFound          the program does not exist in the sandbox
    ├── SandboxDead              the sandbox has no living pid 1: restore it (the world)
    ├── CheckpointFailed         CRIU or btrfs refused; the sandbox still runs
    ├── RestoreFailed            CRIU or btrfs refused; the old state is gone or kept, see message
    ├── NotEqual                 restored state differs from its checkpoint
    ├── NoSpace                  disk or budget is full; says how much is missing
    ├── Unsupported              this host cannot do it; names the missing capability
    ├── EngineFailed             an inference engine died or answered nonsense
    ├── Interrupted              the daemon ended before the answer: it may or may not have taken place
    ├── Timeout                  a deadline of the caller passed
    ├── NoDaemon                 nothing answers at this address, or access is denied (the world)
    └── Protocol                 a peer broke the protocol
        └── ConnectionBroken     the connection ended before the whole answer was here
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import msgspec

from sandbox.names import printable


class ErrorBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """daemon -> SDK: the body of every response that is not 2xx."""

    code: str
    message: str
    hint: str = ""
    sandbox: str | None = None
    turn: int | None = None


TABLE: dict[str, type[PagurusError]] = {}  # by code: what may come from another process


class PagurusError(Exception):
    """Base of all errors. `str(error)` is one line: what happened, then the hint."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500

    def __init_subclass__(cls, code: str = "", status: int = 0) -> None:
        """`code` and `status`: of one of the table. All others are sent as the one that they are a kind of."""
        if code:
            cls.code, cls.status = code, status
            TABLE[code] = cls

    def __init__(self, message: str, *, hint: str = "", sandbox: str | None = None, turn: int | None = None):
        message = printable(message)
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.sandbox = sandbox
        self.turn = turn

    def __str__(self) -> str:
        where = "".join(
            part
            for part in (
                f"sandbox {self.sandbox}" if self.sandbox else "",
                f" turn {self.turn}" if self.turn is not None else "",
            )
        ).strip()
        head = f"{where}: {self.message}" if where else self.message
        return f"{head} ({self.hint})" if self.hint else head

    def body(self) -> ErrorBody:
        return ErrorBody(code=self.code, message=self.message, hint=self.hint, sandbox=self.sandbox, turn=self.turn)


@contextmanager
def hinted(hint: str) -> Iterator[None]:
    """Give `hint` to errors that have none of their own. Also decorates a function, not a coroutine."""
    try:
        yield
    except PagurusError as error:
        error.hint = error.hint or hint
        raise


class Invalid(PagurusError, code="invalid", status=400):
    pass


class NotFound(PagurusError, code="not_found", status=404):
    pass


class Conflict(PagurusError, code="conflict", status=409):
    pass


class Closed(PagurusError, code="closed", status=409):
    pass


class Unauthorized(PagurusError, code="unauthorized", status=401):
    pass


class Forbidden(PagurusError, code="forbidden", status=403):
    pass


class TooMany(PagurusError, code="too_many", status=429):
    retry_after: float | None = None  # seconds


class ImageNotFound(NotFound, code="image_not_found", status=404):
    pass


class CommandNotFound(PagurusError, code="command_not_found", status=422):
    pass


class SandboxDead(PagurusError, code="sandbox_dead", status=410):
    pass


class CheckpointFailed(PagurusError, code="checkpoint_failed", status=500):
    pass


class RestoreFailed(PagurusError, code="restore_failed", status=500):
    pass


class NotEqual(PagurusError, code="not_equal", status=500):
    pass


class NoSpace(PagurusError, code="no_space", status=507):
    pass


class Unsupported(PagurusError, code="unsupported", status=501):
    pass


class EngineFailed(PagurusError, code="engine_failed", status=502):
    pass


class Interrupted(PagurusError, code="interrupted", status=409):
    pass


class Timeout(PagurusError, code="timeout", status=504):
    pass


class Protocol(PagurusError, code="protocol", status=502):
    pass


class ConnectionBroken(Protocol):
    """Raised by the client itself: it never crosses the wire."""


class NoDaemon(PagurusError):
    """Raised by the client itself: it never crosses the wire."""

    code = "no_daemon"


def from_body(body: ErrorBody) -> PagurusError:
    """The exception for a received error body. Unknown codes become :class:`PagurusError`."""
    kind = TABLE.get(body.code, PagurusError)
    return kind(body.message, hint=body.hint, sandbox=body.sandbox, turn=body.turn)
