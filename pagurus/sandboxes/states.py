"""``pagurus restore``, ``fork``, ``tree`` and ``diff``: the states of a sandbox, and going between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagurus import output
from pagurus.common import Json, SandboxName, call, checkpoint_ids, sources
from pagurus.sandboxes.descent import drawn
from sandbox.errors import NotFound

if TYPE_CHECKING:
    from sandbox import Client
    from sandbox.messages import CheckpointInfo

verbs = typer.Typer()

SIGNS = {"added": "A", "modified": "M", "removed": "D"}


@verbs.command()
def restore(
    sandbox: SandboxName,
    to: Annotated[
        str | None,
        typer.Argument(help="Id or label of a checkpoint; the latest when left out.", autocompletion=checkpoint_ids),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare the restored state with the checkpoint.")] = False,
    json: Json = False,
) -> None:
    """Take a sandbox back to a checkpoint, in place. Also revives a dead one."""

    async def work(host: Client) -> Any:
        return await (await host.get(sandbox)).restore(to, verify=verify)

    with output.working(f"restore {sandbox}", quiet=json):
        result = call(work)
    if json:
        output.as_json(result)
    else:
        print(f"{result.checkpoint} in {result.total_ms:.0f} ms" + (", verified equal" if result.verified else ""))


@verbs.command()
def fork(
    source: Annotated[str, typer.Argument(help="A sandbox, or a checkpoint by id or label.", autocompletion=sources)],
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many.")] = 1,
    verify: Annotated[bool, typer.Option("--verify", help="Compare each with the checkpoint before it runs.")] = False,
    json: Json = False,
) -> None:
    """Start sandboxes that continue from a checkpoint. If SOURCE is a sandbox, they continue from its present state."""

    async def work(host: Client) -> list[Any]:
        return [
            child.sandbox.info if child.error is None else {"error": str(child.error)}
            for child in await _forks(host, source, count, verify)
        ]

    with output.working(f"fork {source}", quiet=json):
        children = call(work)
    if json:
        output.as_json(children)
    failed = [child["error"] for child in children if isinstance(child, dict)]
    if not json:
        for child in children:
            if not isinstance(child, dict):
                print(child.id)
    for line in failed:
        output.complain(f"a child failed: {line}")
    raise typer.Exit(1 if failed else 0)


async def _forks(host: Client, source: str, count: int, verify: bool) -> list[Any]:
    try:
        sandbox = await host.get(source)
    except NotFound:
        try:
            return await host.fork(source, count, verify=verify)
        except NotFound:
            raise NotFound(
                f"no sandbox and no checkpoint is called {source}", hint="`pagurus ls` and `pagurus tree` list them"
            ) from None
    return await sandbox.fork(count, verify=verify)


@verbs.command()
def tree(sandbox: SandboxName, json: Json = False) -> None:
    """The checkpoints of a sandbox and how they descend. Each with its time, verdict and size."""

    async def work(host: Client) -> tuple[str | None, list[CheckpointInfo]]:
        result = await host.get(sandbox)
        return result.info.head, await result.tree()

    head, infos = call(work)
    if json:
        output.as_json(infos)
        return
    parents = {info.id: info.parent for info in infos}
    for line in drawn(parents, {info.id: _reported(info, info.id == head) for info in infos}):
        output.say(line)


def _reported(info: CheckpointInfo, head: bool) -> str:
    reported = (
        f"{info.id}  {output.when(info.created_at)}  turn {info.turn}  {info.verdict}  {info.state}  "
        f"{output.size(info.stored_bytes)} in {info.total_ms:.0f} ms"
    )
    label = f"  “{output.line(info.label)}”" if info.label else ""
    return reported + label + ("  ← head" if head else "")


@verbs.command()
def diff(
    sandbox: SandboxName,
    since: Annotated[
        str | None,
        typer.Argument(
            help="Id or label of a checkpoint; without one its oldest.",
            metavar="CHECKPOINT",
            autocompletion=checkpoint_ids,
        ),
    ] = None,
    why: Annotated[bool, typer.Option("--why", help="Also which process did it, by which call.")] = False,
    json: Json = False,
) -> None:
    """What changed in the files of a sandbox since a checkpoint. Without one, since the sandbox was made."""

    async def work(host: Client) -> Any:
        result = await host.get(sandbox)
        return await result.diff(since or (await result.tree())[0].id, why=why)

    changes = call(work)
    if json:
        output.as_json(changes)
        return
    for change in changes:
        reason = f"  ({output.line(change.why)})" if change.why else ""
        print(f"{SIGNS[change.kind]} {output.line(change.path)}{reason}")
