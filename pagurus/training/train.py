"""``pagurus train``, ``export``, ``roles`` and ``attach``: a training run and its processes."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path
from typing import Annotated

import typer

from pagurus import output
from pagurus.common import Json, needs_training
from pagurus.training.options import given, settings_command
from sandbox.errors import NotFound

verbs = typer.Typer()


@verbs.command(cls=settings_command("trainer.config", "TrainConfig", excluded=("task", "resume")))
def train(
    context: typer.Context,
    what: Annotated[Path, typer.Argument(help="A .toml file or a directory like examples/fix_the_service.")] = Path(),
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="key=value of any setting, as optimiser.rate=1e-6."),
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the run in this directory.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and what it takes, start nothing.")
    ] = False,
    fresh: Annotated[bool, typer.Option(help="New run, even if the last one of this plan has not ended.")] = False,
    detach: Annotated[bool, typer.Option(help="Run in the background; `pagurus attach` shows the output.")] = False,
) -> None:
    """Train a policy in the sandboxes of this host. Options overrule the file, key=value overrules both.

    If a run of the same plan has not ended, it continues. Settings of tables are in docs/settings.md.
    """
    with needs_training():
        from coordinator import local
        from trainer import config as configuration
        from trainer.prepare import prepare

        if importlib.util.find_spec("torch") is None:  # the supervisor does without, the roles do not
            raise ModuleNotFoundError("no torch", name="torch")
    made = configuration.gather(what, given(context), settings or [], resume=resume)
    if dry_run:
        from trainer.preview import preview  # with torch, which a supervisor has no use for

        raise typer.Exit(preview(made))
    run = prepare(made, fresh=fresh)
    if run is None:
        raise typer.Exit(1)
    if detach:
        local.detach(run)
        print(f"{run}\nlook at it with: pagurus attach {run}")
        return
    raise typer.Exit(local.supervise(run, local.programs(run), standbys=local.STANDBYS))


@verbs.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    directory: Annotated[Path, typer.Argument(help="Where the model goes; must not exist.")],
    version: Annotated[int | None, typer.Option(help="Which one; else the newest.")] = None,
) -> None:
    """Write a policy of a run into a directory, in bfloat16. Transformers and vLLM can load it."""
    with needs_training():
        from rollout.weights.export import export as write

    print(f"policy version {write(run, directory, version)} is in {directory}")


@verbs.command()
def roles(
    run: Annotated[Path, typer.Argument(help="A run directory, such as runs/latest.")],
    restart: Annotated[str | None, typer.Option(help="Kill this one; its supervisor starts it again.")] = None,
    json: Json = False,
) -> None:
    """The processes of a run: which live, since when and where."""
    from coordinator import local

    if restart is not None and not local.restart(run, restart):
        raise NotFound(f"{run} has no living {restart}", hint="`pagurus roles RUN` lists them")
    states = local.states(run)
    if json:
        output.as_json(states)
        return
    alive = {True: "lives", False: "gone", None: "elsewhere"}
    rows = [(s.name, alive[s.alive], s.host, s.pid, s.generation, f"{s.age_s:.0f} s", s.url) for s in states]
    output.table(("role", "", "machine", "pid", "generation", "started", "address"), rows)


@verbs.command()
def attach(run: Annotated[Path, typer.Argument(help="A run directory, such as runs/latest.")]) -> None:
    """Show the output of a detached run until it ends. Ctrl-C leaves the run alone."""
    from coordinator import local

    with contextlib.suppress(KeyboardInterrupt):
        for part in local.follow(run):
            sys.stdout.buffer.write(part)
            sys.stdout.buffer.flush()
