"""``pagurus ls``, ``rm`` and ``extend``: which sandboxes there are, and until when."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from pagurus import output
from pagurus.common import Json, SandboxName, SandboxNames, call, item
from sandbox.errors import Invalid, NotFound

if TYPE_CHECKING:
    from sandbox import Client
    from sandbox.messages import SandboxInfo

verbs = typer.Typer()
RUN = "pagurus.run"  # label: the run that a sandbox was made for
Labels = Annotated[
    list[str] | None, typer.Option("--label", "-l", help="Only those with this label.", metavar="NAME[=VALUE]")
]


@verbs.command("ls")
def list_sandboxes(
    label: Labels = None,
    json: Json = False,
) -> None:
    """The sandboxes of this host."""
    result = call(lambda host: host.sandboxes(_selection(label)))
    if json:
        output.as_json(result)
        return
    output.table(
        ("sandbox", "name", "image", "state", "turns", "head", "created", "labels"),
        [
            (s.id, s.name, s.image, s.state, s.turn, s.head, output.when(s.created_at), _labels(s.labels))
            for s in result
        ],
    )


def _labels(labels: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in labels.items())


@verbs.command()
def rm(
    sandboxes: SandboxNames = None,
    every: Annotated[bool, typer.Option("--all", help="All that you may see.")] = False,
    run: Annotated[str | None, typer.Option("--run", help="Those of this run.", metavar="ID")] = None,
    label: Labels = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print which, and remove nothing.")] = False,
) -> None:
    """Remove sandboxes with their checkpoints. What forks of them need stays."""
    chosen = [*(label or ()), *([] if run is None else [f"{RUN}={run}"])]
    if [bool(every), bool(sandboxes), bool(chosen)].count(True) != 1:
        raise Invalid("remove which?", hint="name sandboxes, or say --run, --label or --all")

    async def remove(host: Client, name: str) -> None:
        with contextlib.suppress(*([] if sandboxes else [NotFound])):  # of a selection: one that ended by itself
            await (await host.get(name)).remove()

    async def selected(host: Client) -> list[SandboxInfo]:
        if sandboxes:
            return [(await host.get(name)).info for name in sandboxes]
        return await host.sandboxes(_selection(chosen))

    if dry_run:
        for info in call(selected):
            print(" ".join(filter(None, (info.id, info.name, _labels(info.labels)))))
        return
    item(sandboxes or [info.id for info in call(selected)], remove)


def _selection(labels: list[str] | None) -> dict[str, str | None]:
    split = (text.partition("=") for text in labels or ())
    return {name: value if equals else None for name, equals, value in split}


@verbs.command()
def extend(
    sandbox: SandboxName,
    seconds: Annotated[str, typer.Argument(help="From now; `never`: it does not end by itself.", metavar="SECONDS")],
) -> None:
    """Move the end of a sandbox, to sooner or later than it was."""
    try:
        target = None if seconds == "never" else float(seconds)
    except ValueError:
        raise Invalid(f"{seconds!r} is no number of seconds", hint="write 600, or never") from None

    async def work(host: Client) -> SandboxInfo:
        return await (await host.get(sandbox)).extend(target)

    info = call(work)
    print("never" if info.lifetime is None else output.when(info.created_at + info.lifetime))
