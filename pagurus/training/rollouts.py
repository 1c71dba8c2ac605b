"""``pagurus rollouts``: what the rollouts of a run do, did, and why they wait; back to a turn of one of them."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from pagurus import output
from pagurus.common import Json, carry_out, client, exit_codes, needs_training
from sandbox.errors import Invalid, NotFound

if TYPE_CHECKING:
    from rollout.rewards.rescore import RescoredTrajectory

application = typer.Typer(help="What the rollouts of a run do, did, and why they wait.", no_args_is_help=True)
Run = Annotated[Path, typer.Argument(help="A run directory, such as runs/latest.", metavar="RUN")]
STALE = 5.0  # seconds after which a status is no longer of a living process


def rollout_of(run: Path) -> Path:
    """The rollout's directory of a run."""
    directory = run / "rollout"
    if not (directory / "samples.sqlite").exists():
        raise NotFound(f"{run} holds no rollouts", hint="name a run directory, such as runs/latest")
    return directory


@application.command("why")
def why(run: Run, json: Json = False) -> None:
    """Who waits for what, and since when. Also what each trajectory does, and where all prompts are."""
    from rollout.store.status import read_status

    status = read_status(rollout_of(run))
    if json:
        output.as_json(status)
        return
    now = time.time()
    age = now - status.at
    said = "the rollout lives" if age < STALE else f"no rollout has written here for {age:.0f} s: it is dead, or hangs"
    if (run / "summary.json").exists():
        said = f"the run has ended; what the rollout wrote last, {age:.0f} s ago"
    output.say(f"{said}; policy version {status.version}, step {status.step}, the trainer is {status.trainer}")
    if status.requested_at is not None:
        output.say(f"a batch is waited for since {now - status.requested_at:.0f} s")
    for wait in status.waits:
        since = "" if wait.since is None else f" since {now - wait.since:.0f} s"
        until = "" if wait.until is None else f", again in {max(0.0, wait.until - now):.0f} s"
        output.say(f"{wait.who} waits{since}: {wait.reason}{until}")
    account = msgspec.structs.asdict(status.account)
    output.say("prompts: " + ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in account.items()))
    rows = [
        (item.name, item.turn, item.tokens, item.oldest, f"{item.doing} {now - item.since:.1f} s", item.sandbox)
        for item in sorted(status.running, key=lambda item: item.since)
    ]
    output.table(("trajectory", "turn", "tokens", "oldest version", "doing", "sandbox"), rows)


@application.command("account")
def account(run: Run, json: Json = False) -> None:
    """Where all prompts are, and why some were given up.

    Samples that no step could train on are named with the reason.
    """
    from rollout.store.samples import SampleStore
    from trainer.batches import aside

    store = SampleStore(rollout_of(run), create=False)
    try:
        result, reasons, trajectories = store.account(), store.reasons(), len(store.trajectories())
    finally:
        store.close()
    left_out = aside.reasons(run)
    if json:
        named = [msgspec.structs.asdict(line) for line in aside.read(run)]
        more = {"reasons": reasons, "trajectories": trajectories, "put_aside": named}
        output.as_json({**msgspec.structs.asdict(result), **more})
        return
    output.table(("prompts", ""), [(name.replace("_", " "), n) for name, n in msgspec.structs.asdict(result).items()])
    for reason, count in reasons.items():
        output.say(f"{count} given up: {reason}")
    output.say(f"{trajectories} trajectories in saved steps, {sum(left_out.values())} samples of them put aside")
    for reason, count in left_out.items():
        output.say(f"{count} put aside: {reason}")


@application.command("replay")
def replay(run: Run, json: Json = False) -> None:
    """Decide again on each logged view: the actions must be the same.

    Of a run, or of engines that logged into a directory. Exit code 1 when one is not."""
    from rollout.store import decisions

    result = decisions.replay(run if any(run.glob("steps-*.jsonl")) else rollout_of(run))
    if json:
        output.as_json(result)
    else:
        output.say(f"{result.identical} of {result.decisions} decisions are identical")
        if result.first_difference:
            output.say(result.first_difference)
    raise typer.Exit(0 if result.identical == result.decisions else 1)


@application.command("gantt")
def gantt(
    run: Run,
    seconds: Annotated[float, typer.Option(help="So much of its newest time.")] = 600.0,
    out: Annotated[Path | None, typer.Option(help="The page; RUN/gantt.html when left out.")] = None,
) -> None:
    """Write a page that shows who did what when. Also why who waited, with shares of the time."""
    from rollout.gantt.chart import chart

    page = out or run / "gantt.html"
    page.write_text(chart(rollout_of(run), run.resolve().name, seconds))
    output.say(str(page))


@application.command("show")
def show(
    run: Run,
    name: Annotated[str | None, typer.Argument(help="One trajectory, such as p12/4; all when left out.")] = None,
    json: Json = False,
) -> None:
    """Read a trajectory: what the model wrote and saw. With verdict, checkpoint, version and effects of each turn."""
    from rollout.store.samples import SampleStore

    store = SampleStore(rollout_of(run), create=False)
    try:
        if name is None:
            rows = [(f"{prompt}/{member}", status, reward) for prompt, member, status, reward in store.samples()]
            if json:
                output.as_json([dict(zip(("trajectory", "status", "reward"), row, strict=True)) for row in rows])
            else:
                output.table(("trajectory", "status", "reward"), rows)
            return
        prompt, member = parse(name)
        trajectory = store.sample(prompt, member)
    finally:
        store.close()
    if json:
        output.as_json(trajectory)
        return
    for line in reported(trajectory):
        output.say(line)
    output.say("")
    output.say(_visitable(run, prompt, member))


def _visitable(run: Path, prompt: str, member: int) -> str:
    from rollout.timetravel import visitable

    try:
        there = [str(origin.visit.turn) for origin in visitable(rollout_of(run), prompt, member)]
    except NotFound as error:
        return f"no turn can be visited: {error}"
    return f"can be visited (`pagurus rollouts shell`, `resample`): the states before turns {', '.join(there)}"


@application.command("effects")
def effects(
    run: Run,
    rules: Annotated[
        Path | None, typer.Option(help="A TOML file with a table [effects], instead of the run's.")
    ] = None,
    json: Json = False,
) -> None:
    """Which trajectories did what rules name. They touched tests, listened, left processes, or set times of files."""
    from rollout.decide.effects import EffectRules
    from rollout.reports import effects_of
    from rollout.reports import rules as read

    existing = read(run, rules) or EffectRules()
    result = effects_of(rollout_of(run), existing)
    if json:
        output.as_json(result)
        return
    rows = [
        (
            f"{item.prompt}/{item.member}",
            item.reward,
            kind,
            len(observed),
            observed[0].turn,
            observed[0].what,
            item.then,
        )
        for item in result.trajectories
        for kind, observed in item.by_kind().items()
    ]
    output.table(("trajectory", "reward", "kind", "times", "first in turn", "for example", "then"), rows)
    for kind, part in result.kinds.items():
        mean = f"mean reward {part.reward:.3f}, of all others {part.others:.3f}"
        output.say(f"{kind}: {part.trajectories} of {result.played} trajectories; {mean}")


@application.command("shell")
def shell(
    run: Run,
    name: Annotated[str, typer.Argument(help="A trajectory, such as p12/4.")],
    command: Annotated[list[str] | None, typer.Argument(help="Instead of a shell, after --.")] = None,
    turn: Annotated[int | None, typer.Option(help="The state before this turn; the last one when left out.")] = None,
) -> None:
    """A terminal in a fork of a state that a trajectory was in. The fork is removed at the end; the state stays."""
    import asyncio

    from pagurus.sandboxes.exec import meant
    from pagurus.sandboxes.terminal import visit
    from rollout import timetravel
    from rollout.labels import LabellingClient

    with exit_codes():
        origins = timetravel.visitable(rollout_of(run), *parse(name))
        chosen = origins[-1] if turn is None else timetravel.at_turn(origins, turn)

        async def work() -> int:
            async with client() as host:
                sandbox = await timetravel.fork(LabellingClient(host, f"{run.resolve()}+visit"), chosen)
                try:
                    return await visit(sandbox.id, meant(command or []) or None)
                finally:
                    await asyncio.shield(sandbox.remove())

        code = asyncio.run(work())
    raise typer.Exit(code)


@application.command("resample")
def resample(
    run: Run,
    name: Annotated[str, typer.Argument(help="A trajectory, such as p12/4.")],
    turn: Annotated[list[int] | None, typer.Option(help="Before this turn; repeatable. All when left out.")] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Continuations of each state.")] = 8,
    version: Annotated[int | None, typer.Option(help="Of the policy that plays on; the newest when left out.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Sandboxes at once.")] = 4,
    pass_at: Annotated[float, typer.Option(help="Reward with which a continuation passes.")] = 1.0,
    json: Json = False,
) -> None:
    """Play on from states of a trajectory. Prints the value of each. Exits with 1 when nothing could be scored."""

    from rollout import timetravel

    origins = timetravel.visitable(rollout_of(run), *parse(name))
    turns = len(origins[0].trajectory.turns)
    chosen = [timetravel.at_turn(origins, item) for item in turn or []]
    chosen = chosen or [origin for origin in origins if origin.visit.turn < turns]
    with needs_training():
        from rollout.played import engine_of_run

    async def work() -> list[timetravel.TurnValue]:
        async with engine_of_run(run.resolve(), version, client) as (episodes, sampling):
            return [
                await timetravel.resample(episodes, origin, sampling, count=n, concurrency=concurrency, pass_at=pass_at)
                for origin in chosen
            ]

    result = carry_out(work())
    if json:
        output.as_json(result)
    else:
        rows = [
            (item.turn, item.played, f"{item.reward:.3f}", f"{item.passed:.3f}", f"{item.low:.3f} to {item.high:.3f}")
            for item in result
        ]
        output.table(("before turn", "played", "mean reward", "passed", "95 %"), rows)
        for reason in sorted({reason for item in result for reason in item.reasons}):
            output.complain(f"lost: {reason}")
    raise typer.Exit(0 if all(item.played for item in result) else 1)


@application.command("rescore")
def rescore(
    run: Run,
    name: Annotated[str | None, typer.Argument(help="One trajectory, such as p12/4; all that are kept else.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Reward functions that run at once.")] = 2,
    json: Json = False,
) -> None:
    """Score final states again, by the reward function as it is now. Nothing is played."""

    from pagurus.common import client
    from rollout.evaluate import scored_host
    from rollout.rewards.rescore import rescore as score_again
    from rollout.store.samples import SampleStore

    store = SampleStore(rollout_of(run), create=False)
    try:
        target = [parse(name)] if name else [(prompt, member) for prompt, member, _, _ in store.samples()]
        trajectories = [one for item in target if (one := store.sample(*item)).final is not None]
    finally:
        store.close()
    if not trajectories:
        raise Invalid(
            f"no trajectory of {run} has a final state", hint="its environment needs a `reward`: docs/rewards.md"
        )

    async def work() -> list[RescoredTrajectory]:
        async with scored_host(client, workers=workers) as (_, rewards):
            return await score_again(rewards, trajectories)

    result = carry_out(work())
    if json:
        output.as_json(result)
    else:
        output.table(("trajectory", "before", "now", ""), map(rescored, result))
    raise typer.Exit(0 if all(item.after is not None for item in result) else 1)


def rescored(result: RescoredTrajectory) -> tuple[str, float, float | str, str]:
    """A row of the table. A reason may be all that a scorer printed."""
    now = "-" if result.after is None else result.after
    return result.trajectory, result.before, now, " ".join(result.reason.split())


def parse(name: str) -> tuple[str, int]:
    """The prompt and the member of a name. Example: ``parse("p12/4") == ("p000012", 4)``."""
    match = re.fullmatch(r"p?(\d+)/(\d+)", name)
    if match is None:
        raise Invalid(f"{name!r} is no trajectory", hint="write it like p12/4")
    return f"p{int(match[1]):06d}", int(match[2])


def reported(trajectory: Any) -> list[str]:
    """A trajectory as a person reads it."""
    versions = sorted({version for version in trajectory.versions if version >= 0})
    span = "" if not versions else f", policy versions {versions[0]} to {versions[-1]}"
    took = trajectory.finished_at - trajectory.started_at
    lines = [
        f"{trajectory.prompt}/{trajectory.index}: {trajectory.status}, reward {trajectory.reward:g}{span}; "
        f"seed {trajectory.seed}, {took:.1f} s of which {trajectory.own_s:.1f} its own",
    ]
    if trajectory.reason:
        lines.append(f"  {trajectory.reason}")
    if trajectory.continued:
        lines.append(f"  another process went on with it {trajectory.continued} times")
    lines += [f"  {line}" for line in text(trajectory.opening)]
    for turn in trajectory.turns:
        lines += ["", *_turn(turn)]
    for recovery in trajectory.recoveries:
        equal = "equal" if recovery.equal else f"UNEQUAL: {', '.join(recovery.differences)}"
        lines.append(
            f"restored in turn {recovery.turn} to {recovery.checkpoint} ({equal}, {recovery.milliseconds:.0f} ms)"
        )
    return lines


def _turn(turn: Any) -> list[str]:
    thought = max(0.0, turn.gen_end - turn.gen_start)
    lines = [f"turn {turn.index}: version {turn.version}, {turn.tokens} tokens in {thought:.2f} s, {turn.finish}"]
    lines += [f"  > {line}" for line in text(turn.action)]
    lines += [f"  {line}" for line in text(turn.observation)]
    judged = f"  [{turn.verdict}"
    if turn.checkpoint is not None:
        judged += f", checkpoint {turn.checkpoint}"
    if turn.checkpoint_captured:
        judged += f" in {1000 * (turn.checkpoint_captured - turn.checkpoint_started):.0f} ms"
        judged += f", frozen {turn.frozen_ms:.1f} ms, {turn.stored_bytes} bytes, waited {1000 * turn.waited_s:.0f} ms"
    if turn.restored:
        judged += f", restored {turn.restored} times"
    if turn.uncaptured:
        judged += f", not captured: {turn.uncaptured}"
    return [*lines, judged + "]", *(f"    {effect}" for effect in turn.effects)]


def text(value: str) -> list[str]:
    """Lines of a text without the last line's end."""
    return value.removesuffix("\n").split("\n") if value else []
