"""``pagurus verify-model``: can a model be trained, and how?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagurus import output
from pagurus.common import Json, needs_training

verbs = typer.Typer()

SAYS = {
    "packed": "it is trained packed",
    "alone": "it is trained one trajectory at a time",
    "refused": "it is not trained",
}


@verbs.command(name="verify-model")
def verify_model(
    directory: Annotated[Path, typer.Argument(help="A Hugging Face directory.")],
    engine: Annotated[list[str] | None, typer.Option(help="Compare with this engine, too: embedded, vllm.")] = None,
    json: Json = False,
) -> None:
    """Compare a model's numbers with those of transformers, and of engines.

    Exits with 1 where the model would not be trained, or an engine reports other numbers.
    """
    import asyncio

    with needs_training():
        from trainer.models.served import served
        from trainer.models.verify import TOLERANCE, verify
    result = verify(directory)
    apart = {}
    for name in engine or ():
        if result.way != "refused":
            apart[name] = asyncio.run(served(directory, name, packs=result.packs))
    if json:
        output.as_json({"verification": result, "engines": apart})
    else:
        print(f"{result.model}: {SAYS[result.way]}" + (f"; {result.reason}" if result.reason else ""))
        rows = [(name, getattr(result, name)) for name in ("single", "packed", "recompute", "alone", "slope")]
        rows += [(f"engine {name}", value) for name, value in apart.items()]
        output.table(("compared", "largest difference"), [(name, "" if v is None else f"{v:.1e}") for name, v in rows])
    raise typer.Exit(int(result.way == "refused" or any(value > TOLERANCE for value in apart.values())))
