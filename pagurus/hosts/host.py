"""``pagurus doctor``, ``daemon`` and ``bench``: the host itself."""

from __future__ import annotations

import importlib
import sys
from typing import Annotated

import typer

from pagurus import output
from pagurus.common import PASSED_ON, Json
from sandbox.paths import CHECKOUT

verbs = typer.Typer()


@verbs.command()
def doctor(json: Json = False) -> None:
    """Find out what this host can do, by doing it. Says how to mend what is missing."""
    from daemon.doctor import conclusion, examine, sound

    findings = examine()
    if json:
        output.as_json(findings)
    else:
        output.table(
            ("", "capability", "fact", "hint"),
            [(f.level, f.name, f.fact, f.hint) for f in findings],
        )
        output.say(conclusion(findings))
    raise typer.Exit(0 if sound(findings) else 1)


@verbs.command(context_settings=PASSED_ON, add_help_option=False)
def daemon(context: typer.Context) -> None:
    """Run the daemon of this host in the foreground."""
    from daemon.app import main

    raise typer.Exit(main(context.args))


def _benches(incomplete: str) -> list[str]:
    import bench as benches

    return [name for name in benches.names() if name.startswith(incomplete)]


@verbs.command(context_settings=PASSED_ON, add_help_option=False)
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of a bench; `ls` shows them.", autocompletion=_benches)] = "ls",
) -> None:
    """Run a bench: `pagurus bench NAME [--json] ...`. With --json one JSON object is printed last."""
    import bench as benches

    existing, words = benches.names(), [name, *context.args]
    if name in existing:
        if not {"-h", "--help"} & set(context.args):
            from bench.harness import aftermath

            aftermath.guard()
        sys.path.append(str(CHECKOUT))  # whose examples some benches learn, and which are not installed
        raise typer.Exit(importlib.import_module(benches.module(name)).main(context.args))
    if name != "ls" and not name.startswith("-"):
        output.complain(f"no bench {name!r}; there are: {', '.join(existing)}")
        raise typer.Exit(2)
    if "--json" in words:
        output.as_json([{"name": item} for item in existing])
    else:
        output.table(("bench", "what it asks"), [(item, benches.about(item)) for item in existing])
