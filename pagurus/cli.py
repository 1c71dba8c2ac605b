"""The verbs of ``pagurus``: which there are, and where each lives.

Guarantee: only the module of the verb that is called is imported, so the program starts in the time that Typer itself
takes.
"""

from __future__ import annotations

import importlib
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from pagurus import VERSION


class Verb(NamedTuple):
    module: str  # room and name; it has `verbs`, of which this is one, or an `application` of its own verbs
    text: str  # its line in --help: the first sentence of its own help


ROOMS = {
    "sandboxes": "Sandboxes and their states",
    "hosts": "Hosts, and what they keep",
    "training": "Environments, models and runs",
}
VERBS = {
    "run": Verb("sandboxes.run", "Start a sandbox; with a command, run it there."),
    "up": Verb("sandboxes.compose", "Start the services of a compose file in one sandbox."),
    "down": Verb("sandboxes.compose", "Remove the sandbox of a compose file, with its checkpoints."),
    "ps": Verb("sandboxes.compose", "The services of the sandbox of a compose file."),
    "services": Verb("sandboxes.compose", "The services of a sandbox; start, stop or restart some."),
    "exec": Verb("sandboxes.exec", "Run a command in a sandbox and end the turn."),
    "shell": Verb("sandboxes.shell", "A terminal in a sandbox."),
    "port-forward": Verb("sandboxes.shell", "Forward a port of this machine to one of a sandbox."),
    "cp": Verb("sandboxes.cp", "Copy a file or a directory, as cp -r does."),
    "top": Verb("sandboxes.top", "Watch what sandboxes use and what their turns did."),
    "net": Verb("sandboxes.net", "Show the network of a sandbox, or change its policy."),
    "restore": Verb("sandboxes.states", "Take a sandbox back to a checkpoint, in place."),
    "fork": Verb("sandboxes.states", "Start sandboxes that continue from a checkpoint."),
    "tree": Verb("sandboxes.states", "The checkpoints of a sandbox and how they descend."),
    "diff": Verb("sandboxes.states", "What changed in the files of a sandbox since a checkpoint."),
    "ls": Verb("sandboxes.ls", "The sandboxes of this host."),
    "rm": Verb("sandboxes.ls", "Remove sandboxes with their checkpoints."),
    "extend": Verb("sandboxes.ls", "Move the end of a sandbox, to sooner or later than it was."),
    "checkpoint": Verb("sandboxes.checkpoint", "Capture a sandbox: checkpoint SANDBOX [LABEL]."),
    "doctor": Verb("hosts.host", "Find out what this host can do, by doing it."),
    "view": Verb("hosts.view", "The page for people, on a port of this machine."),
    "daemon": Verb("hosts.host", "Run the daemon of this host in the foreground."),
    "bench": Verb("hosts.host", "Run a bench: `pagurus bench NAME [--json] ...`."),
    "image": Verb("hosts.image", "Images that sandboxes start from."),
    "credential": Verb("hosts.credential", "Headers that requests of sandboxes get on their way out."),
    "token": Verb("hosts.token", "Tokens that callers over TCP show."),
    "cluster": Verb("hosts.cluster", "Hosts that work as one."),
    "migrate": Verb("hosts.migrate", "Move a running sandbox to another host of the cluster."),
    "gateway": Verb("hosts.gateway", "Models behind the gateway, and what agents said to them."),
    "mcp": Verb("hosts.mcp", "Serve sandboxes as tools, by the Model Context Protocol."),
    "run-code": Verb("hosts.run_code", "Answer SandboxFusion's POST /run_code, each call in a fork of a warm sandbox."),
    "play": Verb("training.play", "Play one episode of an environment, turn by turn."),
    "eval": Verb("training.play", "Score a model at an environment: pass@1, pass@k."),
    "env": Verb("training.env", "Try an environment before anything learns from it."),
    "serve": Verb("training.serve", "Serve a model to agents until Ctrl-C, by OpenAI's and Anthropic's routes."),
    "train": Verb("training.train", "Train a policy in the sandboxes of this host."),
    "sweep": Verb("training.sweep", "Run a grid of settings and print one table."),
    "verify-model": Verb("training.verify", "Compare a model's numbers with those of transformers, and of engines."),
    "sft": Verb("training.supervised", "Imitate the assistant's messages of conversations."),
    "dpo": Verb("training.supervised", "Learn which of two answers is preferred: rows of prompt, chosen and rejected."),
    "export": Verb("training.train", "Write a policy of a run into a directory, in bfloat16."),
    "roles": Verb("training.train", "The processes of a run: which live, since when and where."),
    "attach": Verb("training.train", "Show the output of a detached run until it ends."),
    "submit": Verb("training.jobs", "Queue a training run at the cluster."),
    "jobs": Verb("training.jobs", "The jobs of the cluster."),
    "logs": Verb("training.jobs", "What a job says, or the services of a sandbox."),
    "cancel": Verb("training.jobs", "End jobs, or take them out of the queue."),
    "rollouts": Verb("training.rollouts", "What the rollouts of a run do, did, and why they wait."),
    "weights": Verb("training.weights", "The published versions of a run's policy."),
    "simulate": Verb("training.simulate", "Run a scheduling scenario, or the plan of a large run, on a virtual clock."),
}


class _Verbs(TyperGroup):
    """Knows every verb by its line; the verb itself is loaded when it is called."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        for name, verb in VERBS.items():
            self.add_command(TyperCommand(name, help=verb.text, rich_markup_mode=None))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for capacity, title in ROOMS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(name, verb.text) for name, verb in VERBS.items() if verb.module.startswith(capacity)]
                )

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


def _print_version(target: bool) -> None:
    if target:
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
