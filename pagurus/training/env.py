"""``pagurus env``: is an environment fit to be learned from?"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from pagurus import output
from pagurus.common import Env, Json, carry_out, client

if TYPE_CHECKING:
    from rollout.env_check import CheckReport

application = typer.Typer(help="Try an environment before anything learns from it.", no_args_is_help=True)


@application.callback()
def about() -> None:
    """Try an environment before anything learns from it."""


@application.command("check")
def check(
    environment: Env,
    seeds: Annotated[int, typer.Option(min=1, help="How many are tried.")] = 2,
    first_seed: Annotated[int, typer.Option(help="The first of them.")] = 0,
    pass_at: Annotated[float, typer.Option(help="Reward with which an episode passes.")] = 1.0,
    json: Json = False,
) -> None:
    """Try all that can be tried without a model.

    Compares resets and forks, plays an oracle, a null and a random agent, measures what turns cost and what is left.

    Exits with 1 when something is wrong.
    """
    import asyncio

    from rollout import env_check as checking
    from rollout.environments.directory import load
    from rollout.environments.images import build_missing, needed
    from rollout.labels import LabellingClient

    made = load(environment).environment
    chosen = range(first_seed, first_seed + min(seeds, made.distinct() or seeds))

    async def work() -> CheckReport:
        if not checking.needs_sandbox(made, chosen):
            return await checking.check(made, None, chosen, pass_at=pass_at, report=output.report)
        async with client() as connected:
            await build_missing(connected, needed(made, chosen), report=output.report)
            host = LabellingClient(connected, f"check-{os.getpid()}")
            try:
                return await checking.check(made, host, chosen, pass_at=pass_at, report=output.report)
            finally:
                await asyncio.shield(host.sweep())

    result = carry_out(work())
    if json:
        output.as_json(result)
    else:
        _report(result)
    raise typer.Exit(0 if result.right else 1)


def _report(result: CheckReport) -> None:
    rows = [("WRONG" if item.wrong else "", item.what, item.observed.strip()) for item in result.findings]
    output.table(("", "tried", "found"), rows)
    costs = result.costs
    judged = ", ".join(f"{count} {name}" for name, count in sorted(costs.verdicts.items()))
    output.say(f"a reset takes {costs.reset_s:.2f} s, a turn {costs.turn_ms:.1f} ms; {costs.turns} turns: {judged}")
    if costs.frozen_ms:
        output.say(f"a captured turn freezes {costs.frozen_ms:.1f} ms and stores {costs.stored_bytes / 1000:.1f} kB")
