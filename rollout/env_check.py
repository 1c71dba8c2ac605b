"""Is an environment fit to be learned from? What resets, forks and three agents that learn nothing say of it.

Guarantee: what is found was seen in the very loop that trains. Nothing that it made is left, unless it says so.

::

    each seed:  reset ─┬─▶ first text, state, files, programs ─▶ equal to those of a second reset?
                       └─▶ checkpoint ─▶ fork ─▶ equal to the checkpoint?
    then:       oracle │ null │ random agent ─▶ rewards, failures, what turns cost ─▶ what is left
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollout.engine.chat import END, VERSION, WRITTEN, Characters
from rollout.engine.client import Generation, Sampling, WeightSpan
from rollout.engine.script import Script
from rollout.environments.base import AgentSandbox, Environment
from rollout.episode import nowhere
from rollout.episode.manager import EpisodeManager, Reset
from rollout.episode.parts import EpisodeEnd, Generator
from rollout.episode.spec import EpisodeLimits, EpisodeSpec
from rollout.evaluate import play
from rollout.labels import LabellingClient
from rollout.messages import Trajectory
from rollout.rewards.service import RewardService
from sandbox.container import identity
from sandbox.errors import PagurusError
from sandbox.messages import ExecResult

TRANSCRIPT = 1 << 20  # characters of an episode
ANSWER = 1 << 16
MAX_NAMED = 5  # paths that one finding names
ODD = ("", " ", "\0", "-1", "{}", "ä☃", "x" * 2000)  # said by an agent that knows nothing
EngineOf = Callable[[int], Generator | None]
ORACLE, NULL, RANDOM = "oracle", "null agent", "random agent"
PROGRAMS = "exec cat /proc/[0-9]*/comm"
POLLS, PAUSE = 20, 0.25  # at programs that still start; seconds between two


class CheckFinding(msgspec.Struct, frozen=True, kw_only=True):
    """Example: ``CheckFinding(what="left behind", observed="process 71 sleep", wrong=True)``"""

    what: str
    observed: str
    wrong: bool = False


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Of all resets and turns; medians where nothing else is said."""

    reset_s: float
    turns: int  # how many
    turn_ms: float  # mean, of the time that the environment and its commands took
    verdicts: dict[str, int]  # how many of each
    frozen_ms: float  # of turns that were captured
    stored_bytes: float  # of those of them that were durable when their episode ended


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    findings: list[CheckFinding]
    costs: Costs

    @property
    def right(self) -> bool:
        return not any(item.wrong for item in self.findings)


class Aimless:
    """Says a word that it has read, something that is right elsewhere in the episode, or something unexpected."""

    def __init__(self, seed: int, right: Sequence[str]):
        self._rng, self._right = random.Random(f"aimless {seed}"), right

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "") -> Generation:
        read = Characters().decode([item for item in prompt_ids if item < WRITTEN]).split()
        action = self._rng.choice(self._rng.choice([group for group in (read, self._right, ODD) if group]))
        ids = [*(WRITTEN + ord(char) for char in action), END]
        return Generation(
            token_ids=ids, logprobs=[0.0] * len(ids), spans=[WeightSpan(VERSION, 0, len(ids))], finish_reason="stop"
        )


async def check(
    environment: Callable[[], Environment],
    host: LabellingClient | None,
    seeds: Sequence[int],
    *,
    pass_at: float = 1.0,
    report: Callable[[str], object] = lambda _: None,
) -> CheckReport:
    """`host`: None where neither the environment nor its scorer needs a sandbox. `report` hears what begins."""
    before = _children()
    manager = EpisodeManager(
        environment=environment,
        host=host,
        engine=Script(),
        tokenizer=Characters(),
        limits=EpisodeLimits(max_length=TRANSCRIPT),
    )
    findings: list[CheckFinding] = []
    took: list[float] = []
    for number, seed in enumerate(seeds, 1):
        report(f"resets and forks of seed {seed}, {number} of {len(seeds)}")
        findings += await _resets(manager, seed, took)
    async with contextlib.AsyncExitStack() as stack:
        if host is not None:
            manager.rewards = await stack.enter_async_context(RewardService(host))
        agents = _agents(environment).items()
        played = {who: await _play(manager, who, seeds, engine_of, report) for who, engine_of in agents}
    for who, trajectories in played.items():
        findings.append(_judged(who, trajectories, pass_at))
    findings.append(await _left(host, before))
    return CheckReport(findings=findings, costs=_costs(took, [item for some in played.values() for item in some]))


def needs_sandbox(environment: Callable[[], Environment], seeds: Sequence[int]) -> bool:
    made = [environment().of(seed)[0] for seed in seeds]
    return any(env.image or (env.reward is not None and env.reward.forks) for env in made)


# --------------------------------------------------------------------- resets


async def _resets(manager: EpisodeManager, seed: int, took: list[float]) -> list[CheckFinding]:
    what = f"reset of seed {seed}"
    made: list[Reset] = []
    try:
        for _ in range(2):
            began = time.monotonic()
            made.append(await manager.reset(EpisodeSpec(prompt=f"check-{seed}", seed=seed)))
            took.append(time.monotonic() - began)
        differ = await _differences(*made)
        said = f"two differ in: {', '.join(differ)}" if differ else "two are equal"
        fresh, _ = manager.environment().of(seed)
        return [
            CheckFinding(what=what, observed=said, wrong=bool(differ)),
            _written_down(f"state of seed {seed}", fresh, made[0][2]),
            await _forked(f"fork of seed {seed}", manager, fresh, made[0][0]),
        ]
    except EpisodeEnd as end:
        return [CheckFinding(what=what, observed=str(end.failure), wrong=True)]
    finally:
        for sandbox, _, _ in made:
            await sandbox.remove()


async def _differences(one: Reset, other: Reset) -> list[str]:
    """In what two resets of a seed differ. Times of files do not count."""
    differ = ["first observation"] if one[1] != other[1] else []
    differ += ["state of the object"] if one[2] != other[2] else []
    if one[0].id == nowhere.NAME:
        return differ
    changes = await other[0].diff(await one[0].checkpoint())
    if any(change.path == identity.HOSTS for change in changes) and await _same_hosts(one[0], other[0]):
        changes = [change for change in changes if change.path != identity.HOSTS]
    differ += [change.path for change in changes[:MAX_NAMED]]
    differ += [f"{len(changes) - MAX_NAMED} more files"] if len(changes) > MAX_NAMED else []
    for _ in range(POLLS):
        if await _programs(one[0]) == await _programs(other[0]):
            return differ
        await asyncio.sleep(PAUSE)
    return [*differ, "programs that run"]


async def _same_hosts(*sandboxes: Any) -> bool:
    """Whether their /etc/hosts are equal but for the line with each one's own name."""
    texts = [await item.files.read(identity.HOSTS) for item in sandboxes]
    return len({identity.hosts_for(text, "same", fresh=False) for text in texts}) == 1


async def _programs(sandbox: AgentSandbox) -> list[str]:
    """Their names; none of an image without a shell."""
    try:
        result: ExecResult = await sandbox.exec(PROGRAMS, ends_turn=False)
        return sorted(result.text.split())
    except PagurusError:
        return []


def _written_down(what: str, fresh: Environment, state: bytes | None) -> CheckFinding:
    if state is None:
        text = "cannot be written down, so resets are not shared and episodes not continued: write `snapshot`"
        return CheckFinding(what=what, observed=text)
    fresh.load(state)
    same = fresh.snapshot() == state
    return CheckFinding(what=what, observed="loads" if same else "is another one once it was loaded", wrong=not same)


async def _forked(what: str, manager: EpisodeManager, env: Environment, sandbox: Any) -> CheckFinding:
    """A fork is compared with its checkpoint: files, processes, memory."""
    if sandbox.id == nowhere.NAME:
        return CheckFinding(what=what, observed="there is no sandbox")
    try:
        point = await sandbox.checkpoint()
        child = await manager.host.fork(point.id)
    except PagurusError as error:
        return CheckFinding(what=what, observed=f"{error.code}: {error}", wrong=env.shares_reset)
    await child.remove()
    return CheckFinding(
        what=what, observed="equal" if env.shares_reset else "equal; but it says that resets are not shared"
    )


# --------------------------------------------------------------------- agents


def _agents(environment: Callable[[], Environment]) -> dict[str, EngineOf]:
    def right(seed: int) -> list[str] | None:
        env, drawn = environment().of(seed)
        return env.oracle(drawn)

    def oracle(seed: int) -> Generator | None:
        actions = right(seed)
        return None if actions is None else Script(actions)

    return {
        ORACLE: oracle,
        NULL: lambda _: Script(),
        RANDOM: lambda seed: Aimless(seed, right(seed) or ()),
    }


async def _play(
    manager: EpisodeManager, who: str, seeds: Sequence[int], engine_of: EngineOf, report: Callable[[str], object]
) -> list[Trajectory]:
    played = []
    for number, seed in enumerate(seeds, 1):
        if (engine := engine_of(seed)) is not None:
            report(f"{who} plays seed {seed}, {number} of {len(seeds)}")
            spec = EpisodeSpec(prompt=f"check-{seed}", seed=seed)
            played.append(await play(dataclasses.replace(manager, engine=engine), spec, Sampling(max_tokens=ANSWER)))
    return played


def _judged(who: str, played: Sequence[Trajectory], pass_at: float) -> CheckFinding:
    if not played:
        return CheckFinding(what=who, observed="there is no oracle: define `oracle`, so that it can be tried")
    if lost := [item for item in played if not item.scored]:
        return CheckFinding(what=who, observed=f"{len(lost)} of {len(played)} not scored: {lost[0].reason}", wrong=True)
    rewards = [item.reward for item in played]
    said = f"reward {statistics.mean(rewards):.3f} over {len(played)} seeds"
    if who == ORACLE and min(rewards) < pass_at:
        seed = played[rewards.index(min(rewards))].seed
        return CheckFinding(
            what=who, observed=f"{said}; seed {seed} earns {min(rewards):g}: it cannot be solved", wrong=True
        )
    if who == NULL and max(rewards) >= pass_at:
        seed = played[rewards.index(max(rewards))].seed
        return CheckFinding(what=who, observed=f"{said}; seed {seed} is passed by doing nothing", wrong=True)
    return CheckFinding(what=who, observed=said)


# --------------------------------------------------------------------- what is left, what it took


async def _left(host: LabellingClient | None, before: set[str]) -> CheckFinding:
    sandboxes = [] if host is None else await host.left()
    left = [f"sandbox {item}" for item in sandboxes] + [f"process {item}" for item in sorted(_children() - before)]
    return CheckFinding(what="left behind", observed=", ".join(left) or "nothing", wrong=bool(left))


def _children() -> set[str]:
    """Processes of this machine that this one has started: number and name."""
    result = set()
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in path.read_text().split():
            with contextlib.suppress(OSError):  # it has ended since
                result.add(f"{pid} {Path(f'/proc/{pid}/comm').read_text().strip()}")
    return result


def _costs(resets: Sequence[float], played: Sequence[Trajectory]) -> Costs:
    turns = [turn for item in played for turn in item.turns]
    captured = [turn for turn in turns if turn.checkpoint_captured]
    return Costs(
        reset_s=_median(resets),
        turns=len(turns),
        turn_ms=1000 * sum(item.own_s for item in played) / max(1, len(turns)),
        verdicts=dict(Counter(turn.verdict for turn in turns)),
        frozen_ms=_median([turn.frozen_ms for turn in captured]),
        stored_bytes=_median([turn.stored_bytes for turn in captured if turn.stored_bytes]),
    )


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
