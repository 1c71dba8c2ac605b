"""``pagurus top``: a live view of the sandboxes of a host."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagurus import output
from pagurus.common import Json, call
from sandbox.errors import PagurusError

if TYPE_CHECKING:
    from rich.console import Group

    from sandbox import Client
    from sandbox.messages import SandboxInfo, Statistics

verbs = typer.Typer()

COLUMNS = ("sandbox", "name", "image", "state", "cpu %", "memory", "tasks", "turn", "head")
MAX_ROWS = 200  # sandboxes shown; the busiest first


@verbs.command()
def top(
    interval: Annotated[float, typer.Option("--interval", "-n", min=0.2, help="Seconds between two looks.")] = 1.0,
    count: Annotated[int | None, typer.Option("--count", "-c", min=1, help="End after so many looks.")] = None,
    json: Json = False,
) -> None:
    """Watch what sandboxes use and what their turns did. Ctrl-C ends it."""

    import asyncio

    from rich.live import Live

    async def work(host: Client) -> None:
        before: dict[str, tuple[float, float]] = {}
        if json:
            output.as_json(await _poll(host, before))
            return
        console = output.console()
        with Live(console=console, screen=True, auto_refresh=False) if console.is_terminal else nullcontext() as live:
            polls = 0
            while count is None or polls < count:
                poll = await _poll(host, before)
                if live is None:
                    output.say(_head(poll["host"]))
                    output.table(COLUMNS, _rows(poll))
                else:
                    live.update(_drawn(poll), refresh=True)
                polls += 1
                if polls != count:
                    await asyncio.sleep(interval)

    try:
        call(work)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


async def _poll(host: Client, before: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """The host's counts and a row for each sandbox. `before` holds CPU seconds and when, by sandbox."""
    import asyncio

    statistics, infos = await host.statistics(), await host.sandboxes()
    return {"host": statistics, "sandboxes": await asyncio.gather(*(_row(host, info, before) for info in infos))}


async def _row(host: Client, info: SandboxInfo, before: dict[str, tuple[float, float]]) -> dict[str, Any]:
    from sandbox.messages import SandboxState

    row: dict[str, Any] = {
        "id": info.id,
        "name": info.name,
        "image": info.image,
        "state": info.state,
        "turn": info.turn,
        "head": info.head,
    }
    if info.state is SandboxState.RUNNING:
        try:
            used = await (await host.get(info.id)).metrics()
        except PagurusError:  # it died or was removed since
            return row
        now = time.monotonic()
        seconds, when = before.get(info.id, (used.cpu_seconds, now))
        before[info.id] = used.cpu_seconds, now
        row["cpu"] = (used.cpu_seconds - seconds) / (now - when) if now > when else 0.0
        row["memory"], row["processes"] = used.memory_bytes, used.processes
    return row


def _head(host: Statistics) -> str:
    saved = 1 - host.stored_bytes / host.full_bytes if host.full_bytes else 0.0
    verdicts = " ".join(f"{name} {number}" for name, number in sorted(host.verdicts.items()))
    return (
        f"{host.sandboxes} sandboxes   turns {host.turns} ({verdicts})   checkpoints in flight {host.in_flight}, "
        f"queued {host.queued}, failed {host.checkpoints_failed}   restores {host.restores}   "
        f"stored {output.size(host.stored_bytes)} ({saved:.0%} saved)"
    )


def _rows(poll: dict[str, Any]) -> list[tuple[str, ...]]:
    """The cells of the table, the busiest sandbox first."""
    rows = sorted(poll["sandboxes"], key=lambda row: (-row.get("cpu", -1.0), row["id"]))
    result = []
    for row in rows[:MAX_ROWS]:
        cells = (
            row["id"],
            row["name"],
            row["image"],
            row["state"],
            f"{100 * row['cpu']:.0f}" if "cpu" in row else "",
            output.size(row["memory"]) if row.get("memory") is not None else "",
            row.get("processes", ""),
            row["turn"],
            row["head"],
        )
        result.append(tuple("" if cell is None else str(cell) for cell in cells))
    return result


def _drawn(poll: dict[str, Any]) -> Group:
    from rich.console import Group
    from rich.table import Table

    table = Table(box=None, pad_edge=False, expand=True)
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in ("cpu %", "memory", "tasks", "turn") else "left")
    for row in _rows(poll):
        table.add_row(*map(output.plain, row))
    return Group(output.plain(_head(poll["host"])), table)
