"""The daemon's log on stderr: lines for a person at a terminal, else one JSON object for each line.

Owns: the form. Fields of the objects: ``time``, ``level``, ``logger``, ``message``; ``sandbox``, ``turn`` and
``checkpoint`` where there is one; ``request`` and ``token`` (its id) while a request is served, then also the
``sandbox`` that it is about and the last ``turn`` that has ended there, unless the line is about another one;
``traceback``.
"""

from __future__ import annotations

import contextvars
import json
import logging
import re
import secrets
import sys
import time
from typing import TYPE_CHECKING

from daemon.auth.access import CALLER

if TYPE_CHECKING:
    from daemon.catalogue import SandboxRow

REQUEST: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="")
SUBJECT: contextvars.ContextVar[SandboxRow | None] = contextvars.ContextVar("subject", default=None)  # what it is about
_GIVEN = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NAMED = ("sandbox", "turn", "checkpoint")


def request_id(given: str | None) -> str:
    """The caller's own id of its request where it has a sane form, else a new one."""
    return given if given is not None and _GIVEN.fullmatch(given) else secrets.token_hex(8)


class JsonLines(logging.Formatter):
    """One JSON object for each record."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in _NAMED:
            if getattr(record, name, None) is not None:
                entry[name] = getattr(record, name)
        if (subject := SUBJECT.get()) is not None and entry.setdefault("sandbox", subject.id) == subject.id:
            entry.setdefault("turn", subject.turn)
        if request := REQUEST.get():
            entry["request"] = request
            if token := CALLER.get().token:
                entry["token"] = token
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class PlainFormatter(logging.Formatter):
    """One line for a person: when, how grave, what, about which sandbox. A terminal obeys nothing of it."""

    def format(self, record: logging.LogRecord) -> str:
        grave = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        named = [f"{name} {getattr(record, name)}" for name in _NAMED if getattr(record, name, None) is not None]
        about = f"  ({', '.join(named)})" if named else ""
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = f"{at}  {grave}{record.getMessage()}{about}"
        if record.exc_info:
            text += f"\n{self.formatException(record.exc_info)}"
        return "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text)


def to_stderr(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter() if sys.stderr.isatty() else JsonLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
