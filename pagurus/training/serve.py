"""``pagurus serve``: a model directory, or a run's newest version, behind OpenAI's and Anthropic's routes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagurus import output
from pagurus.common import carry_out, needs_training
from sandbox.errors import Invalid

verbs = typer.Typer()


@verbs.command()
def serve(
    model: Annotated[Path, typer.Argument(help="A Hugging Face directory with a chat template, or a run directory.")],
    engine: Annotated[str, typer.Option(help="embedded or vllm.")] = "vllm",
    engines: Annotated[int, typer.Option(min=1, help="Servers; requests go where their prefix is.")] = 1,
    length: Annotated[int, typer.Option(min=16, help="Tokens of the longest conversation.")] = 4096,
    port: Annotated[int, typer.Option(help="0: any that is free.")] = 8000,
) -> None:
    """Serve a model to agents until Ctrl-C, by OpenAI's and Anthropic's routes."""
    import asyncio
    import tempfile

    with needs_training():
        from rollout.engine.launch import KINDS
        from rollout.pool.serve import serving

    if engine not in KINDS:
        raise Invalid(f"no engine {engine!r}", hint="embedded or vllm")

    async def work(home: Path) -> None:
        launch = KINDS[engine](length=length)
        async with serving(model, launch, home, engines=engines, length=length, port=port) as endpoints:
            output.say(f"http://{endpoints.host}:{endpoints.port}/v1 serves {model.name}")
            await asyncio.Event().wait()

    with tempfile.TemporaryDirectory(prefix="pagurus-serve-") as home:
        try:
            carry_out(work(Path(home)))
        except KeyboardInterrupt:
            output.say("ended")
