"""``pagurus sft`` and ``pagurus dpo``: learn from conversations, or from pairs of answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pagurus.common import needs_training

verbs = typer.Typer()

What = Annotated[Path, typer.Argument(help="Rows (.jsonl, .json, .csv, .parquet, a saved data set), or a .toml file.")]
Settings = Annotated[list[str] | None, typer.Argument(help="key=value of any setting, as optimiser.rate=1e-5.")]
Model = Annotated[Path | None, typer.Option(help="What training begins with: a Hugging Face directory.")]
Out = Annotated[Path | None, typer.Option(help="Where run directories go.")]
Resume = Annotated[Path | None, typer.Option(help="Continue the run in this directory.")]


@verbs.command()
def sft(
    what: What = Path(), settings: Settings = None, model: Model = None, out: Out = None, resume: Resume = None
) -> None:
    """Imitate the assistant's messages of conversations."""
    _run("sft", what, settings, model, out, resume)


@verbs.command()
def dpo(
    what: What = Path(), settings: Settings = None, model: Model = None, out: Out = None, resume: Resume = None
) -> None:
    """Learn which of two answers is preferred: rows of prompt, chosen and rejected."""
    _run("dpo", what, settings, model, out, resume)


def _run(
    loss: str, what: Path, settings: list[str] | None, model: Path | None, out: Path | None, resume: Path | None
) -> None:
    with needs_training():
        from trainer.supervised import config, run
    if resume is not None:
        run.run(resume, run.resume(resume).config.ranks)
        return
    named: dict[str, Any] = {"model": model, "out": out}
    options = {name: str(value) for name, value in named.items() if value is not None}
    made = run.SupervisedRun(config.gather(loss, what, options, settings or []))
    if made.config.ranks == 1:
        made.run()
    else:
        run.run(made.directory, made.config.ranks)
