"""``pagurus play`` and ``pagurus eval``: any environment against any model that speaks OpenAI's protocol, or against a
model directory, such as a version of a run; no training.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagurus import output
from pagurus.common import Env, Json, carry_out, client, needs_training
from sandbox.errors import Invalid

if TYPE_CHECKING:
    from rollout.engine.chat import ChatEngine
    from rollout.environments.base import Environment
    from rollout.episode.manager import EpisodeManager
    from rollout.evaluate import Evaluation
    from rollout.messages import Trajectory, TurnRecord
    from sandbox import Client

verbs = typer.Typer()

Model = Annotated[
    str,
    typer.Option(
        "--model",
        help="Address of its server; a directory: a run, RUN@VERSION, or Hugging Face's; oracle; null.",
        metavar="URL|FOLDER|oracle|null",
    ),
]
Rows = Annotated[
    Path | None, typer.Option("--rows", help="Data of `Environment.row`: seed n plays row n.", metavar="FILE")
]
Engine = Annotated[str, typer.Option(help="What serves a directory: embedded or vllm.")]
Length = Annotated[int, typer.Option(min=16, help="Tokens of the longest episode, with a directory.")]
ModelName = Annotated[
    str | None, typer.Option("--name", help="What the server calls the model; its first one when left out.")
]
KeyFile = Annotated[
    Path | None, typer.Option(help="File that holds the key; else OPENAI_API_KEY, if that is set.", metavar="FILE")
]
System = Annotated[str | None, typer.Option(help="Instead of our own first message to the model.", metavar="TEXT")]
Temperature = Annotated[float, typer.Option(help="At which it samples.")]
Tokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Of each answer, at most.")]
TRANSCRIPT = 1 << 20  # characters of an episode
NAMED = ("oracle", "null")  # instead of a model


@verbs.command()
def play(
    environment: Env,
    model: Model,
    name: ModelName = None,
    rows: Rows = None,
    seed: Annotated[int, typer.Option(help="Which episode.")] = 0,
    key_file: KeyFile = None,
    system: System = None,
    temperature: Temperature = 1.0,
    max_tokens: Tokens = 1024,
    engine: Engine = "embedded",
    length: Length = 1024,
    json: Json = False,
) -> None:
    """Play one episode of an environment, turn by turn. Exits with 1 if it could not be played."""

    from rollout.engine.client import Sampling
    from rollout.episode.spec import EpisodeSpec
    from rollout.evaluate import oracle_of
    from rollout.evaluate import play as play_one

    reported = 0

    def show(trajectory: Trajectory, record: TurnRecord) -> None:
        nonlocal reported
        if not reported:
            output.say(trajectory.opening)
        reported += 1
        output.say(f"\n> {record.action}   [{record.verdict}]\n{record.observation}")

    async def work() -> Trajectory:
        made = _environment(environment, rows)
        async with _episodes(made, [seed], model, name, key_file, system, engine, length) as episodes:
            if model == "oracle":
                episodes.engine = oracle_of(made)(seed)
            episodes.on_turn = None if json else show
            stops = episodes.renderer.stops if episodes.renderer else []
            sampling = Sampling(max_tokens=max_tokens, temperature=temperature, stop_token_ids=stops)
            return await play_one(episodes, EpisodeSpec(prompt=f"play-{seed}", seed=seed), sampling)

    trajectory = carry_out(work())
    if json:
        output.as_json(trajectory)
    else:
        reason = f": {trajectory.reason}" if trajectory.reason else ""
        output.say(f"\nreward {trajectory.reward:g} in {len(trajectory.turns)} turns, {trajectory.status}{reason}")
    raise typer.Exit(0 if trajectory.scored else 1)


@verbs.command("eval")
def evaluate(
    environment: Env,
    model: Model,
    name: ModelName = None,
    rows: Rows = None,
    episodes: Annotated[
        int | None,
        typer.Option(min=1, help="Seeds that are played; else all rows, or tasks of a directory, or 20."),
    ] = None,
    first_seed: Annotated[int, typer.Option(help="The first of them.")] = 0,
    samples: Annotated[int, typer.Option(min=1, help="Times that each is played; the k of pass@k.")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, help="Sandboxes at once.")] = 4,
    pass_at: Annotated[float, typer.Option(help="Reward with which an episode passes.")] = 1.0,
    key_file: KeyFile = None,
    system: System = None,
    temperature: Temperature = 1.0,
    max_tokens: Tokens = 1024,
    engine: Engine = "embedded",
    length: Length = 1024,
    json: Json = False,
) -> None:
    """Score a model at an environment: pass@1, pass@k. They have 95 % intervals. Exits with 1 without a score."""

    from rollout.engine.client import Sampling
    from rollout.evaluate import evaluate as score
    from rollout.evaluate import oracle_of

    def ended(trajectory: Trajectory) -> None:
        if not json:
            output.say(
                f"seed {trajectory.seed} sample {trajectory.index}: reward {trajectory.reward:g}, {trajectory.status}"
            )

    async def work() -> Evaluation:
        made = _environment(environment, rows)
        count = episodes or made.distinct() or 20
        seeds = range(first_seed, first_seed + count)
        async with _episodes(made, seeds, model, name, key_file, system, engine, length) as manager:
            stops = manager.renderer.stops if manager.renderer else []
            sampling = Sampling(max_tokens=max_tokens, temperature=temperature, stop_token_ids=stops)
            return await score(
                manager,
                seeds,
                sampling,
                samples=samples,
                concurrency=concurrency,
                pass_at=pass_at,
                on_end=ended,
                engine=oracle_of(made) if model == "oracle" else None,
            )

    result = carry_out(work())
    if json:
        output.as_json(result)
    else:
        _report(result)
    raise typer.Exit(0 if result.seeds else 1)


def _environment(place: Path, rows: Path | None) -> type[Environment]:
    from rollout.environments.directory import load
    from rollout.environments.mixture import with_rows
    from rollout.environments.rows import read_rows

    kind = load(place).environment
    return kind if rows is None else with_rows(kind, read_rows(rows, minimum=1))


def _report(result: Evaluation) -> None:
    for rate in result.rates:
        output.say(f"pass@{rate.k} {rate.mean:.3f}, 95 % between {rate.low:.3f} and {rate.high:.3f}")
    output.say(
        f"reward {result.reward:.3f} over {result.seeds} seeds x {result.samples}, {result.turns:.1f} turns each"
    )
    for reason in result.reasons:
        output.complain(f"lost: {reason}")


def _episodes(
    made: Any,
    seeds: Sequence[int],
    model: str,
    name: str | None,
    key_file: Path | None,
    system: str | None,
    engine: str,
    length: int,
) -> Any:
    """What plays episodes of these seeds of an environment with this model, as a context."""
    from rollout.environments.images import build_missing, needed

    async def build(host: Client) -> None:
        await build_missing(host, needed(made, seeds), report=output.report)

    if model in NAMED:
        return _untrained(made, build, None)
    if model.startswith(("http://", "https://")):
        from rollout.engine.chat import ChatEngine

        key = os.environ.get("OPENAI_API_KEY", "") if key_file is None else key_file.read_text().strip()
        return _untrained(made, build, ChatEngine(model, name or "", key=key, system=system))
    if not Path(model).is_dir() and "@" not in model:
        raise Invalid(
            f"{model!r} is neither an address nor a directory",
            hint="write http://HOST:PORT, a directory, oracle or null",
        )
    with needs_training():
        from rollout.played import engine_of, kind
    return engine_of(model, made, client, launch=kind(engine, length), length=length, build=build)


@contextlib.asynccontextmanager
async def _untrained(
    made: Any, build: Callable[[Client], Awaitable[None]], chat: ChatEngine | None
) -> AsyncIterator[EpisodeManager]:
    """With a model behind an address, or with none: who says what the environment says is right, or nothing."""
    from rollout.engine.chat import Characters
    from rollout.engine.script import Script
    from rollout.episode.manager import EpisodeManager
    from rollout.episode.spec import EpisodeLimits
    from rollout.evaluate import scored_host

    async with chat or contextlib.nullcontext(), scored_host(client) as (host, rewards):
        if chat is not None:
            chat.model = chat.model or await chat.first_model()
        await build(host.client)
        yield EpisodeManager(
            environment=made,
            host=host,
            rewards=rewards,
            engine=chat or Script(),
            tokenizer=Characters(),
            limits=EpisodeLimits(max_length=TRANSCRIPT),
        )
