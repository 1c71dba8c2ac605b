"""The verbs of ``pagurus``: which there are, and where each lives.

Owns: their names, their order, their line in ``pagurus --help``. Does not own: their arguments and what they print,
which the module of each has. Guarantee: only the module of the verb that is called is imported, so the program starts
in the time that Typer itself takes.
"""

from __future__ import annotations

import importlib
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from pagurus import VERSION


class Verb(NamedTuple):
    module: str  # with `verbs`, of which this is one, or with an `application` of its own verbs
    text: str  # its line in --help: the first sentence of its own help


VERBS = {
    "doctor": Verb("host_cli", "Find out what this host can do, by doing it."),
    "daemon": Verb("host_cli", "Run the daemon of this host in the foreground."),
    "run": Verb("run_cli", "Start a sandbox; with a command, run it there."),
    "exec": Verb("command_cli", "Run a command in a sandbox and end the turn."),
    "shell": Verb("shell_cli", "A terminal in a sandbox."),
    "port-forward": Verb("shell_cli", "Forward a port of this machine to one of a sandbox."),
    "cp": Verb("copy_cli", "Copy a file or a directory, as cp -r does."),
    "top": Verb("top", "Watch what sandboxes use and what their turns did."),
    "net": Verb("network_cli", "Show the network of a sandbox, or change its policy."),
    "restore": Verb("state_cli", "Take a sandbox back to a checkpoint, in place."),
    "fork": Verb("state_cli", "Start sandboxes that continue from a checkpoint."),
    "tree": Verb("state_cli", "The checkpoints of a sandbox and how they descend."),
    "diff": Verb("state_cli", "What changed in the files of a sandbox since a checkpoint."),
    "ls": Verb("sandboxes_cli", "The sandboxes of this host."),
    "rm": Verb("sandboxes_cli", "Remove sandboxes with their checkpoints."),
    "play": Verb("play_cli", "Play one episode of an environment, turn by turn."),
    "eval": Verb("play_cli", "Score a model at an environment: pass@1, pass@k."),
    "serve": Verb("serve_cli", "Serve a model to agents until Ctrl-C, by OpenAI's and Anthropic's routes."),
    "train": Verb("train_cli", "Train a policy in the sandboxes of this host."),
    "export": Verb("train_cli", "Write a policy of a run into a folder, in bfloat16."),
    "roles": Verb("train_cli", "The processes of a run: which live, since when, where."),
    "attach": Verb("train_cli", "What a detached run says, until it has ended."),
    "bench": Verb("host_cli", "Run a bench: `pagurus bench NAME [--json] ...`."),
    "image": Verb("image_cli", "Images that sandboxes start from."),
    "checkpoint": Verb("checkpoint_cli", "Capture a sandbox: checkpoint SANDBOX [LABEL]."),
    "token": Verb("token_cli", "Tokens that callers over TCP show."),
    "cluster": Verb("cluster_cli", "Hosts that work as one."),
    "migrate": Verb("migrate_cli", "Let a running sandbox go on at another host of the cluster."),
    "gateway": Verb("gateway_cli", "Models behind the gateway, and what agents said to them."),
    "rollouts": Verb("rollouts_cli", "What the rollouts of a run do, did, and why they wait."),
    "weights": Verb("weights_cli", "The published versions of a run's policy."),
    "simulate": Verb("simulate_cli", "Run a scheduling scenario on a virtual clock."),
}


class _Verbs(TyperGroup):
    """Knows every verb by its line; the verb itself is loaded when it is called."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        for name, verb in VERBS.items():
            self.add_command(TyperCommand(name, help=verb.text, rich_markup_mode=None))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, _command, rest = super().resolve_command(ctx, args)
        return name, None if name is None else loaded(name), rest


def loaded(name: str) -> Any:
    """The verb with its arguments."""
    module = importlib.import_module(f"pagurus.{VERBS[name].module}")
    alone = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    if hasattr(module, "verbs"):
        alone.add_typer(module.verbs)
    else:
        alone.add_typer(module.application, name=name)
    return typer.main.get_group(alone).commands[name]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"pagurus {VERSION}")
        raise typer.Exit()


application = typer.Typer(
    name="pagurus",
    cls=_Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@application.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Agent sandboxes that can be checkpointed, forked and rolled back, and the training that feeds on them."""
