"""How the program prints: JSON for scripts, tables for people.

Guarantee: what a sandbox wrote (names, labels, errors) never reaches a terminal as control sequences through anything
here. The raw outputs of commands are not printed here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console

PAUSE = 5.0  # seconds between two lines of progress in a log


def console() -> Console:
    """What tables are drawn on. rich is loaded where something is drawn: not for ``--help``."""
    from rich.console import Console

    return Console()


def as_json(value: Any) -> None:
    """One JSON document on stdout. What a terminal would obey is escaped: it only occurs inside strings.

    Bytes that are text are shown as text, others in base64 under a name that says so.
    """
    import msgspec

    reported = _readable(msgspec.to_builtins(value, builtin_types=(bytes,), str_keys=True))
    text = msgspec.json.format(msgspec.json.encode(reported), indent=2).decode()
    sys.stdout.write("".join(char if char.isprintable() or char == "\n" else _escaped(char) for char in text) + "\n")


def _readable(value: Any) -> Any:
    """The same with text instead of bytes.

    >>> _readable({"stdout": b"hello", "stderr": b"\xff"})
    {'stdout': 'hello', 'stderr_base64': b'\xff'}
    """
    if isinstance(value, dict):
        return dict(_readable_entry(name, inner) for name, inner in value.items())
    return [_readable(item) for item in value] if isinstance(value, list) else value


def _readable_entry(name: str, value: Any) -> tuple[str, Any]:
    if not isinstance(value, bytes):
        return name, _readable(value)
    try:
        return name, value.decode()
    except UnicodeDecodeError:
        return f"{name}_base64", value


def _escaped(char: str) -> str:
    units = char.encode("utf-16-be")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def complain(text: str) -> None:
    """Say on stderr what went wrong."""
    print(f"pagurus: {printable(text)}", file=sys.stderr)


def report(text: str) -> None:
    """Say on stderr how far it is."""
    print(printable(text), file=sys.stderr, flush=True)


def say(text: str) -> None:
    """One line on stdout, at once: what follows it may last, and stdout may be a log."""
    print(printable(text), flush=True)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table; cells are plain text. Cells are broken only where a terminal is too narrow for their line.

    >>> table(("sandbox", "state"), [("s-1", "running"), ("s-22", None)])
    sandbox  state
    s-1      running
    s-22
    """
    from rich.cells import cell_len

    cells = [["" if cell is None else line(str(cell)) for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(columns, *cells, strict=True)]
    terminal = sys.stdout.isatty()
    if terminal and sum(widths) + 2 * len(widths) > shutil.get_terminal_size().columns:
        _broken_table(columns, cells)
        return
    strong, end = ("\x1b[1m", "\x1b[0m") if terminal and os.environ.get("TERM") != "dumb" else ("", "")
    for number, row in enumerate([columns, *cells]):
        padded = (cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True))
        text = "  ".join(padded).rstrip()
        print(text if number else f"{strong}{text}{end}")


def _broken_table(columns: Sequence[str], rows: list[list[str]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    shown = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        shown.add_row(*map(escape, row))
    console().print(shown)


class ProgressCallback(Protocol):
    """Called with how far something is: bytes so far, and of how many where that became known."""

    def __call__(self, done: int, total: int | None = None) -> None: ...


@contextlib.contextmanager
def progress(what: str, total: int | None, *, quiet: bool = False) -> Iterator[ProgressCallback]:
    """A bar on stderr for `total` bytes (None: not known yet); call what it yields with the bytes so far.

    Where stderr is no terminal, such as in a log, it is a line now and then. Nothing with `quiet`.
    """
    if quiet:
        yield lambda done, total=None: None
        return
    if not sys.stderr.isatty():
        yield _now_and_then(what, total)
        return
    from rich import progress as parts
    from rich.console import Console

    columns = (
        parts.TextColumn("{task.description}"),
        parts.BarColumn(),
        parts.DownloadColumn(binary_units=True),
        parts.TransferSpeedColumn(),
        parts.TimeRemainingColumn(),
    )
    with parts.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(plain(what), total=total)
        yield lambda done, total=None: bar.update(task, completed=done, total=total)


def _now_and_then(what: str, total: int | None) -> ProgressCallback:
    said, existing = time.monotonic(), total

    def advanced(done: int, total: int | None = None) -> None:
        nonlocal said, existing
        existing = total or existing
        if time.monotonic() - said >= PAUSE:
            said = time.monotonic()
            print(
                f"{line(what)}: {size(done)}" + (f" of {size(existing)}" if existing else ""),
                file=sys.stderr,
                flush=True,
            )

    return advanced


@contextlib.contextmanager
def working(what: str, *, quiet: bool = False) -> Iterator[None]:
    """The same for work of unknown length: a bar that moves, and the time that it took so far."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    from rich import progress as parts
    from rich.console import Console

    columns = (parts.TextColumn("{task.description}"), parts.BarColumn(), parts.TimeElapsedColumn())
    with parts.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task(plain(what), total=None)
        yield


def printable(text: str) -> str:
    """Text that a sandbox wrote, without what a terminal would obey."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def line(text: str) -> str:
    """The same as one line: also without tabs and line ends."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def plain(text: str) -> str:
    """The same for what reads markup: tables and bars."""
    from rich.markup import escape

    return escape(line(text))


def size(count: int) -> str:
    """Bytes for people."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def when(seconds: float | None) -> str:
    """Epoch seconds as local time."""
    return "" if not seconds else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
