"""The verbs of ``pagurus`` and their arguments.

Owns: names, arguments, what is printed. Does not own: behaviour. Each verb calls one method of the SDK, of the
daemon or of the trainer.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagurus import (
    VERSION,
    checkpoint_cli,
    command_cli,
    copy_cli,
    gateway_cli,
    image_cli,
    network_cli,
    output,
    play_cli,
    rollouts_cli,
    run_cli,
    serve_cli,
    shell_cli,
    state_cli,
    token_cli,
    top,
    weights_cli,
)
from pagurus.common import PASSED_ON, Json, SandboxNames, call, each, needs_training
from sandbox.errors import Invalid, NotFound

if TYPE_CHECKING:
    from sandbox import Client

IN_ORDER = {"allow_interspersed_args": False}  # what follows the first argument is the command's


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"pagurus {VERSION}")
        raise typer.Exit()


application = typer.Typer(
    name="pagurus",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
application.add_typer(image_cli.application, name="image")
application.add_typer(checkpoint_cli.application, name="checkpoint")
application.add_typer(token_cli.application, name="token")
application.add_typer(gateway_cli.application, name="gateway")
application.add_typer(rollouts_cli.application, name="rollouts")
application.add_typer(weights_cli.application, name="weights")


@application.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Agent sandboxes that can be checkpointed, forked and rolled back, and the training that feeds on them."""


# --------------------------------------------------------------------------- the host


@application.command()
def doctor(json: Json = False) -> None:
    """Find out what this host can do, by doing it. Says how to mend what is missing."""
    from daemon.doctor import conclusion, examine, sound

    findings = examine()
    if json:
        output.as_json(findings)
    else:
        output.table(
            ("", "capability", "fact", "remedy"),
            [(f.level, f.name, f.fact, f.remedy) for f in findings],
        )
        output.say(conclusion(findings))
    raise typer.Exit(0 if sound(findings) else 1)


@application.command(context_settings=PASSED_ON, add_help_option=False)
def daemon(context: typer.Context) -> None:
    """Run the daemon of this host in the foreground."""
    from daemon.app import main

    raise typer.Exit(main(context.args))


# --------------------------------------------------------------------------- sandboxes


application.command(context_settings=IN_ORDER)(run_cli.run)
application.command("exec", context_settings=IN_ORDER)(command_cli.execute)
application.command("shell", context_settings=IN_ORDER)(shell_cli.shell)
application.command("port-forward")(shell_cli.port_forward)
application.command("cp")(copy_cli.copy)
application.command("top")(top.top)
application.command("net")(network_cli.net)
application.command()(state_cli.restore)
application.command()(state_cli.fork)
application.command()(state_cli.tree)
application.command()(state_cli.diff)


@application.command("ls")
def list_sandboxes(
    label: Annotated[
        list[str] | None, typer.Option("--label", "-l", help="Only those with this label.", metavar="NAME[=VALUE]")
    ] = None,
    json: Json = False,
) -> None:
    """The sandboxes of this host."""
    wanted = {name: value if equals else None for name, equals, value in (each.partition("=") for each in label or ())}
    found = call(lambda host: host.sandboxes(wanted))
    if json:
        output.as_json(found)
        return
    output.table(
        ("sandbox", "name", "image", "state", "turns", "head", "created", "labels"),
        [(s.id, s.name, s.image, s.state, s.turn, s.head, output.when(s.created_at), _labels(s.labels)) for s in found],
    )


def _labels(labels: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in labels.items())


@application.command()
def rm(
    sandboxes: SandboxNames = None,
    every: Annotated[bool, typer.Option("--all", help="All that you may see.")] = False,
) -> None:
    """Remove sandboxes with their checkpoints. What forks of them need stays."""
    if every == bool(sandboxes):
        raise Invalid("remove which?", remedy="name sandboxes, or say --all")

    async def remove(host: Client, name: str) -> None:
        await (await host.get(name)).remove()

    named = sandboxes or [found.id for found in call(lambda host: host.sandboxes())]
    each(named, remove)


# --------------------------------------------------------------------------- training and benches


application.command()(play_cli.play)
application.command("eval")(play_cli.evaluate)
application.command()(serve_cli.serve)


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
    ranks: Annotated[
        int | None, typer.Option(help="Processes that share the steps; with --resume, a new number of them.")
    ] = None,
    lora: Annotated[int | None, typer.Option(help="Rank of adapters that are trained instead of the weights.")] = None,
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
        from trainer.prepare import prepare

        if importlib.util.find_spec("torch") is None:  # the supervisor does without, the roles do not
            raise ModuleNotFoundError("no torch", name="torch")
    content: dict[str, Any] = {"task": what}
    if what.suffix == ".toml":
        content = configuration.read(what)
    options = locals()
    content |= {name: options[name] for name in configuration.KEYS if options.get(name) is not None}
    made = configuration.make(content | ({"resume": resume} if resume else {}))
    if dry_run:
        from trainer.preview import preview  # with torch, which a supervisor has no use for

        raise typer.Exit(preview(made))
    run = prepare(made, steps=steps, ranks=ranks, fresh=fresh)
    if run is None:
        raise typer.Exit(1)
    if detach:
        local.detach(run)
        print(f"{run}\nlook at it with: pagurus attach {run}")
        return
    raise typer.Exit(local.supervise(run, local.programs(run), spares=local.SPARES))


@application.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    folder: Annotated[Path, typer.Argument(help="Where the model goes; must not exist.")],
) -> None:
    """Write the newest policy of a run into a folder. Transformers and vLLM can load it."""
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
    name: Annotated[str, typer.Argument(help="Name of a bench; `ls` shows them.", autocompletion=_benches)] = "ls",
) -> None:
    """Run a bench: `pagurus bench NAME [--json] ...`. With --json one JSON object is printed last."""
    import bench as benches

    known, words = benches.names(), [name, *context.args]
    if name in known:
        raise typer.Exit(importlib.import_module(f"bench.{name}").main(context.args))
    if name != "ls" and not name.startswith("-"):
        output.complain(f"no bench {name!r}; there are: {', '.join(known)}")
        raise typer.Exit(2)
    if "--json" in words:
        output.as_json([{"name": each} for each in known])
    else:
        output.table(("bench",), [(each,) for each in known])
