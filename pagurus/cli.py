"""The verbs of ``pagurus`` and their arguments.

Owns: names, arguments, what is printed. Does not own: behaviour. Each verb calls one method of the SDK, of the
daemon or of the trainer.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.tree import Tree

from pagurus import (
    checkpoint_cli,
    command_cli,
    copy_cli,
    gateway_cli,
    image_cli,
    network_cli,
    output,
    rollouts_cli,
    shell,
    token_cli,
    top,
)
from pagurus.common import (
    PASSED_ON,
    Json,
    SandboxName,
    SandboxNames,
    call,
    checkpoint_ids,
    each,
    needs_training,
    sources,
)
from sandbox import Client
from sandbox.errors import NotFound
from sandbox.messages import CheckpointInfo

IN_ORDER = {"allow_interspersed_args": False}  # what follows the first argument is the command's

application = typer.Typer(
    name="pagurus",
    help="Agent sandboxes that can be checkpointed, forked and rolled back, and the training that feeds on them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
application.add_typer(image_cli.application, name="image")
application.add_typer(checkpoint_cli.application, name="checkpoint")
application.add_typer(token_cli.application, name="token")
application.add_typer(gateway_cli.application, name="gateway")
application.add_typer(rollouts_cli.application, name="rollouts")
shell.register(application)
application.command("cp")(copy_cli.copy)
application.command("top")(top.top)
application.command("net")(network_cli.net)

# --------------------------------------------------------------------------- the host


@application.command()
def doctor(json: Json = False) -> None:
    """Probe what this host can do, for real, and say how to mend what it cannot."""
    from daemon.doctor import examine, sound

    findings = examine()
    if json:
        output.as_json(findings)
    else:
        output.table(
            ("", "capability", "fact", "remedy"),
            [(f.level, f.name, f.fact, f.remedy) for f in findings],
        )
    raise typer.Exit(0 if sound(findings) else 1)


@application.command(context_settings=PASSED_ON, add_help_option=False)
def daemon(context: typer.Context) -> None:
    """Run the daemon of this host in the foreground (see `pagurus daemon --help`)."""
    from daemon.app import main

    raise typer.Exit(main(context.args))


# --------------------------------------------------------------------------- sandboxes


application.command(context_settings=IN_ORDER)(command_cli.run)
application.command("exec", context_settings=IN_ORDER)(command_cli.execute)


@application.command("ls")
def list_sandboxes(json: Json = False) -> None:
    """The sandboxes of this host."""
    found = call(lambda host: host.sandboxes())
    if json:
        output.as_json(found)
        return
    output.table(
        ("sandbox", "name", "image", "state", "turns", "head", "created"),
        [(s.id, s.name, s.image, s.state, s.turn, s.head, output.when(s.created_at)) for s in found],
    )


@application.command()
def rm(sandboxes: SandboxNames) -> None:
    """Remove sandboxes with their checkpoints, but for what forks of them need."""

    async def remove(host: Client, name: str) -> None:
        await (await host.get(name)).remove()

    each(sandboxes, remove)


# --------------------------------------------------------------------------- checkpoints


@application.command()
def restore(
    sandbox: SandboxName,
    to: Annotated[
        str | None, typer.Argument(help="Checkpoint id; the latest when left out.", autocompletion=checkpoint_ids)
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


@application.command()
def fork(
    source: Annotated[str, typer.Argument(help="A sandbox, or the id of a checkpoint.", autocompletion=sources)],
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many.")] = 1,
    json: Json = False,
) -> None:
    """Start new sandboxes that continue from a checkpoint or from a sandbox as it is now."""

    async def work(host: Client) -> list[Any]:
        children = await (host.fork(source, count) if source.startswith("c-") else (await host.get(source)).fork(count))
        return [child.sandbox.info if child.error is None else {"error": child.error} for child in children]

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


@application.command()
def tree(sandbox: SandboxName, json: Json = False) -> None:
    """The checkpoints of a sandbox and how they descend from one another."""

    async def work(host: Client) -> tuple[str | None, list[CheckpointInfo]]:
        found = await host.get(sandbox)
        return found.info.head, await found.tree()

    head, infos = call(work)
    if json:
        output.as_json(infos)
        return
    nodes: dict[str | None, Tree] = {None: Tree(output.plain(sandbox))}
    for info in infos:
        text = f"{info.id} turn {info.turn} {info.verdict} {info.state} {output.size(info.stored_bytes)}"
        if info.label:
            text += f" “{info.label}”"
        parent = nodes.get(info.parent, nodes[None])
        nodes[info.id] = parent.add(output.plain(text) + (" [bold]← head[/bold]" if info.id == head else ""))
    output.console.print(nodes[None])


@application.command()
def diff(
    sandbox: SandboxName,
    since: Annotated[
        str | None,
        typer.Argument(
            help="Id of a checkpoint; without one its oldest.", metavar="CHECKPOINT", autocompletion=checkpoint_ids
        ),
    ] = None,
    why: Annotated[bool, typer.Option("--why", help="Also which process did it, by which call.")] = False,
    json: Json = False,
) -> None:
    """How the file tree of a sandbox differs from a checkpoint: without one, what has changed since it was made."""

    async def work(host: Client) -> Any:
        found = await host.get(sandbox)
        return await found.diff(since or (await found.tree())[0].id, why=why)

    changes = call(work)
    if json:
        output.as_json(changes)
        return
    for change in changes:
        reason = f"  ({output.line(change.why)})" if change.why else ""
        print(f"{ {'added': 'A', 'modified': 'M', 'removed': 'D'}[change.kind] } {output.line(change.path)}{reason}")


# --------------------------------------------------------------------------- training and benches


@application.command()
def train(
    what: Annotated[Path, typer.Argument(help="A .toml file, or a folder such as examples/fix_the_service.")] = Path(),
    model: Annotated[Path | None, typer.Option(help="The policy to begin with: a Hugging Face folder.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything.")] = None,
    engine: Annotated[str | None, typer.Option(help="embedded or vllm.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps; with --resume, a new number of them.")] = None,
    groups: Annotated[int | None, typer.Option(help="Prompts of a step.")] = None,
    size: Annotated[int | None, typer.Option(help="Trajectories of a prompt.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Sandboxes at once; else by the cores that are free.")] = None,
    held_out: Annotated[int | None, typer.Option(help="Episodes of each evaluation.")] = None,
    objective: Annotated[str | None, typer.Option(help="grpo, dapo, gspo, ...: docs/training.md.")] = None,
    faults: Annotated[int | None, typer.Option(help="Sandboxes killed on purpose in the second half.")] = None,
    pace: Annotated[float | None, typer.Option(help="Seconds per answer, at least; 0 is flat out.")] = None,
    image: Annotated[str | None, typer.Option(help="Instead of the environment's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where run folders go.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run folder.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and what it takes, start nothing.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option(help="Begin anew, also where the last run of this plan has not ended.")
    ] = False,
    detach: Annotated[bool, typer.Option(help="Leave it to itself; `pagurus attach` shows what it says.")] = False,
) -> None:
    """Train a policy in the sandboxes of this host. Options here overrule the file.

    A run of the same plan that has not ended is gone on with.
    """
    with needs_training():
        from coordinator import local
        from trainer import config as configuration
        from trainer.run import prepare, preview

    content: dict[str, Any] = {"task": what}
    if what.suffix == ".toml":
        content = configuration.read(what)
    options = locals()
    content |= {name: options[name] for name in configuration.KEYS if options.get(name) is not None}
    made = configuration.make(content | ({"resume": resume} if resume else {}))
    if dry_run:
        raise typer.Exit(preview(made))
    run = prepare(made, steps=steps, fresh=fresh)
    if run is None:
        raise typer.Exit(1)
    argv = [sys.executable, "-m", "trainer", str(run)]
    if detach:
        local.detach(run, argv)
        print(f"{run}\nlook at it with: pagurus attach {run}")
        return
    raise typer.Exit(local.supervise(run, argv))


@application.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    folder: Annotated[Path, typer.Argument(help="Where the model goes; must not exist.")],
) -> None:
    """Write the newest policy of a run as a Hugging Face folder, for transformers and vLLM."""
    with needs_training():
        from trainer.publish import export_newest

    print(f"policy version {export_newest(run, folder)} is in {folder}")


@application.command()
def roles(
    run: Annotated[Path, typer.Argument(help="A run folder, such as runs/latest.")],
    restart: Annotated[str | None, typer.Option(help="Kill this one; who watches it starts it again.")] = None,
    json: Json = False,
) -> None:
    """The processes of a run: which live, since when, where."""
    from coordinator import local

    if restart is not None and not local.restart(run, restart):
        raise NotFound(f"{run} has no living {restart}", remedy="`pagurus roles RUN` lists them")
    states = local.states(run)
    if json:
        output.as_json(states)
        return
    rows = [(s.name, "lives" if s.alive else "gone", s.pid, s.generation, f"{s.age_s:.0f} s", s.url) for s in states]
    output.table(("role", "", "pid", "generation", "started", "address"), rows)


@application.command()
def attach(run: Annotated[Path, typer.Argument(help="A run folder, such as runs/latest.")]) -> None:
    """What a detached run says, until it has ended. Ctrl-C ends the looking, not the run."""
    from coordinator import local

    with contextlib.suppress(KeyboardInterrupt):
        for part in local.follow(run):
            sys.stdout.buffer.write(part)
            sys.stdout.buffer.flush()


def _benches(incomplete: str) -> list[str]:
    import bench as benches

    return [name for name in benches.names() if name.startswith(incomplete)]


@application.command(context_settings=PASSED_ON, add_help_option=False)
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of a bench; `list` shows them.", autocompletion=_benches)] = "list",
) -> None:
    """Run a bench: `pagurus bench NAME [--json] ...`. With --json one JSON object is printed last."""
    import bench as benches

    known, words = benches.names(), [name, *context.args]
    if name in known:
        raise typer.Exit(importlib.import_module(f"bench.{name}").main(context.args))
    if name != "list" and not name.startswith("-"):
        output.complain(f"no bench {name!r}; there are: {', '.join(known)}")
        raise typer.Exit(2)
    if "--json" in words:
        output.as_json([{"name": each} for each in known])
    else:
        output.table(("bench",), [(each,) for each in known])
