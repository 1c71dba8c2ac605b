"""The daemon's log on stderr: lines for a person at a terminal, else one JSON object for each line.

Fields of the objects: ``time``, ``level``, ``logger``, ``message``; ``sandbox``, ``turn`` and ``checkpoint`` where
there is one; ``request`` and ``token`` (its id) while a request is served, then also the ``sandbox`` that it is about
and the last ``turn`` that has ended there, unless the line is about another one; ``traceback``; ``left_out``: how many
lines of the same place about the same sandbox are missing before it.

Guarantee: whatever a sandbox or a caller does, what the daemon writes of it is bounded, in lines and in their length;
who makes many lines loses its own.
"""

from __future__ import annotations

import collections
import contextvars
import json
import logging
import re
import secrets
import sys
import time
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from aiohttp.http import HttpProcessingError

from daemon.auth.access import CALLER

if TYPE_CHECKING:
    from daemon.catalogue import SandboxRow

REQUEST: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="")
SUBJECT: contextvars.ContextVar[SandboxRow | None] = contextvars.ContextVar("subject", default=None)  # what it is about
MAX_LINES, LINES_PER_S = 60, 1.0  # of one place in the code about one sandbox: at once, and from then on
MAX_SHARE, SHARE_PER_S = 600, 10.0  # of one owner, or of one sandbox of the host's own
MAX_TEXT = 8192  # characters of a message, and of a traceback
MAX_EXISTING = 10_000  # places and shares that are remembered
_GIVEN = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NAMED = ("sandbox", "turn", "checkpoint")


def request_id(given: str | None) -> str:
    """The caller's own id of its request where it has a sane form, else a new one."""
    return given if given is not None and _GIVEN.fullmatch(given) else secrets.token_hex(8)


class _Lines:
    """How many lines may come now, and how many did not."""

    __slots__ = ("at", "left", "left_out")

    def __init__(self, left: float, at: float) -> None:
        self.left, self.at, self.left_out = left, at, 0


class LogRateLimit(logging.Filter):
    """Leaves out lines of frequent sources. Debugging lines, which an operator has turned on, are not counted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._existing: collections.OrderedDict[Hashable, _Lines] = collections.OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.INFO:
            return True
        subject = SUBJECT.get()
        sandbox = getattr(record, "sandbox", None) or (subject.id if subject is not None else "")
        share = CALLER.get().owner or (subject.owner if subject is not None else "") or sandbox
        place = self._of((record.name, record.lineno, sandbox or share), MAX_LINES, LINES_PER_S)
        shared = self._of(share, MAX_SHARE, SHARE_PER_S) if share else place  # the daemon's own have none
        if place.left < 1 or shared.left < 1:
            place.left_out += 1
            return False
        place.left -= 1
        shared.left -= shared is not place
        if place.left_out:
            record.left_out, place.left_out = place.left_out, 0
        return True

    def _of(self, key: Hashable, limit: int, rate: float) -> _Lines:
        now = self._clock()
        result = self._existing.setdefault(key, _Lines(limit, now))
        self._existing.move_to_end(key)
        if len(self._existing) > MAX_EXISTING:
            self._existing.popitem(last=False)
        result.left, result.at = min(limit, result.left + (now - result.at) * rate), now
        return result


class JsonLines(logging.Formatter):
    """One JSON object for each record."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage()[:MAX_TEXT],
        }
        for name in (*_NAMED, "left_out"):
            if getattr(record, name, None) is not None:
                entry[name] = getattr(record, name)
        if (subject := SUBJECT.get()) is not None and entry.setdefault("sandbox", subject.id) == subject.id:
            entry.setdefault("turn", subject.turn)
        if request := REQUEST.get():
            entry["request"] = request
            if token := CALLER.get().token:
                entry["token"] = token
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)[-MAX_TEXT:]
        return json.dumps(entry)


class PlainFormatter(logging.Formatter):
    """One line for a person: when, how grave, what, about which sandbox. A terminal obeys nothing of it."""

    def format(self, record: logging.LogRecord) -> str:
        grave = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        named = [f"{name} {getattr(record, name)}" for name in _NAMED if getattr(record, name, None) is not None]
        named += [f"{count} lines like this left out"] if (count := getattr(record, "left_out", 0)) else []
        about = f"  ({', '.join(named)})" if named else ""
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = f"{at}  {grave}{record.getMessage()[:MAX_TEXT]}{about}"
        if record.exc_info:
            text += f"\n{self.formatException(record.exc_info)[-MAX_TEXT:]}"
        return "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text)


class MalformedRequests(logging.Filter):
    """aiohttp logs each request that is not HTTP, of whomever, as an error with a traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], HttpProcessingError):
            record.levelno, record.levelname = logging.INFO, "INFO"
            record.msg, record.args, record.exc_info = (
                "a request is not HTTP: %r",
                (str(record.exc_info[1])[:200],),
                None,
            )
            return logging.getLogger().isEnabledFor(logging.INFO)
        return True


def to_stderr(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter() if sys.stderr.isatty() else JsonLines())
    handler.addFilter(MalformedRequests())
    handler.addFilter(LogRateLimit())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
