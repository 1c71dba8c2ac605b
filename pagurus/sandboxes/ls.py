"""``pagurus ls`` and ``rm``: which sandboxes there are.

Owns: names, arguments, what is printed. Does not own: behaviour.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pagurus import output
from pagurus.common import Json, SandboxNames, call, item
from sandbox.errors import Invalid

if TYPE_CHECKING:
    from sandbox import Client

verbs = typer.Typer()


@verbs.command("ls")
def list_sandboxes(
    label: Annotated[
        list[str] | None, typer.Option("--label", "-l", help="Only those with this label.", metavar="NAME[=VALUE]")
    ] = None,
    json: Json = False,
) -> None:
    """The sandboxes of this host."""
    target = {name: value if equals else None for name, equals, value in (item.partition("=") for item in label or ())}
    result = call(lambda host: host.sandboxes(target))
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
) -> None:
    """Remove sandboxes with their checkpoints. What forks of them need stays."""
    if every == bool(sandboxes):
        raise Invalid("remove which?", hint="name sandboxes, or say --all")

    async def remove(host: Client, name: str) -> None:
        await (await host.get(name)).remove()

    named = sandboxes or [result.id for result in call(lambda host: host.sandboxes())]
    item(named, remove)
