"""The twin prints what the sandbox prints: random sequences of the example's commands on both, compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from examples import finish_the_migration as migration
from examples import fix_the_service as service
from examples.finish_the_migration.environment import AUDIT
from examples.finish_the_migration.scenario import NEW, STEPS
from examples.finish_the_migration.scenario import Scenario as Migration
from examples.finish_the_migration.scenario import scenario as migration_scenario
from examples.fit import Example
from examples.fix_the_service.scenario import DIRECTORY, PORTS, Scenario, scenario
from rollout.environments.shell import TwinShell, observe
from sandbox import Sandbox
from sandbox.messages import ExecResult
from tests.support.daemon_host import IMAGE, Daemon, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "-")

SEQUENCES = 12
LENGTH = 7


def service_command(case: Scenario, rng: random.Random) -> str:
    """Any of the example's commands, right and wrong ones."""
    files = ["app.conf", "log", f"data/{case.data}", f"spare/{case.data}", "nothing"]
    start = "./serve" + rng.choice((" >log 2>&1", " >/dev/null 2>&1"))
    return rng.choice(
        (
            f"cat {rng.choice(files)}",
            f"ls {rng.choice(('data', 'spare', 'nowhere'))}",
            case.repair,
            f"sed -i s/{case.port}/{rng.choice(PORTS)}/ app.conf",
            f"sed -i s/{case.stale or 'data'}/{case.greet}/ {rng.choice(files)}",
            f"cp spare/{case.data} data/{case.data}",
            f"cp data/{case.others[0]} data/{case.data}",
            start,
            f"{start} &",
            f"{start} &",
            f"./ask {case.port}",
            f"./ask {rng.choice(PORTS)}",
            "frobnicate now",
        )
    )


def migration_command(case: Migration, rng: random.Random) -> str:
    step = f"steps/{rng.choice(STEPS)}"
    files = ["schema", "rows", "done", "lock", "steps/*", "spare/*", "nowhere/*", step]
    faulty = [at for at, fault in enumerate(case.faults) if fault is not None]
    return rng.choice(
        (
            f"cat {rng.choice(files)}",
            f"ls {rng.choice(('steps', 'spare', 'nowhere'))}",
            case.repair(rng.choice(faulty)),
            case.repair(rng.choice(faulty)),
            f"sed -i s/{rng.choice(case.old)}/{rng.choice(NEW)}/ {step}",
            f"sed -i s/{rng.choice(case.old)}/{rng.choice(NEW)}/ schema",
            f"cp {rng.choice(('schema', 'steps/1', 'spare/2'))} {step}",
            f"rm {rng.choice(('lock', 'lock', 'lock', step))}",
            "./migrate",
            "./migrate",
            "./check",
            "frobnicate now",
        )
    )


# The twin starts a service in no time: wait until each that was started listens or has given up. What is left are
# this shell and one process for each listening socket.
FINALIZED = """
until [ "$(pgrep -c -x 'sh|serve')" -eq $((1 + $(grep -c ' 0A ' /proc/net/tcp))) ]; do sleep 0.02; done
"""


@pytest.mark.parametrize("example", ["service", "migration"])
async def test_same_words_on_random_sequences(example: str, tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    try:
        daemon.start()
        async with daemon.client() as host:
            for number in range(SEQUENCES):
                async with host.create(IMAGE) as sandbox:
                    if example == "service":
                        case = scenario(number)
                        await _compare(number, sandbox, service.Twin(), case.install, partial(service_command, case))
                    else:
                        made = migration_scenario(number)
                        await _compare(
                            number, sandbox, migration.Twin(), made.install, partial(migration_command, made), [AUDIT]
                        )
    finally:
        daemon.clean()


async def _compare(
    number: int,
    sandbox: Sandbox,
    twin: TwinShell,
    install: list[str],
    command: Callable[[random.Random], str],
    then: Sequence[list[str]] = (),
) -> None:
    """Some commands on both, after `install`; `then` are commands of the environment's own."""
    rng = random.Random(number)
    await sandbox.exec(install, cwd=DIRECTORY)
    await twin.exec(install, cwd=DIRECTORY)
    for line in [*(command(rng) for _ in range(LENGTH)), *then]:
        simulated = await twin.exec(line, cwd=DIRECTORY)
        real = await sandbox.exec(line, cwd=DIRECTORY, timeout=3.0 if simulated.timed_out else 240.0)
        assert observe(real) == observe(simulated), (number, line)
        if isinstance(line, list):
            assert real.text == simulated.text
        if line[-1] == "&":
            assert (await sandbox.exec(FINALIZED, timeout=240.0)).exit_code == 0


@pytest.mark.parametrize("example", ["service", "migration"])
async def test_a_scripted_episode_earns_its_reward_and_has_the_verdicts_that_were_meant(
    example: str, tmp_path: Path
) -> None:
    loaded = Example.of({"service": "fix_the_service", "migration": "finish_the_migration"}[example])
    daemon = Daemon(tmp_path)
    observed: dict[str, set[str]] = {}
    try:
        daemon.start()
        async with daemon.client() as host:
            for seed in range(4):
                environment = loaded.environment()
                async with host.create(IMAGE) as sandbox:
                    first = await environment.reset(sandbox, seed)
                    texts = loaded.demonstrate(seed, sloppy=False)
                    assert texts.pop(0) == (first.text, False)
                    await sandbox.checkpoint()
                    results: list[tuple[str, str]] = []
                    recorded = Recorded(sandbox, results)
                    for text, action in texts:
                        if action:
                            observation = await environment.step(recorded, text)
                        else:
                            assert observation.text == text, "the twin said something else"
                    assert observation.done
                    assert observation.reward == 1.0
                for line, verdict in results:
                    observed.setdefault(line.split(" ")[0] + (" >log" if ">log" in line else ""), set()).add(verdict)
    finally:
        daemon.clean()
    assert observed["cat"] == {"none"}
    assert observed["sed"] == {"files"}
    if example == "migration":
        assert observed["./migrate"] == {"files", "none"}  # none where a lock keeps it from everything
        assert observed["./check"] == {"none"}
        return
    assert observed["./serve >log"] <= {"both", "processes"}  # the shell may end before its child has opened the log
    assert observed["./serve"] == {"processes"}
    assert observed["./ask"] <= {"both", "processes"}  # then its log belongs to the next turn


class Recorded:
    """A sandbox whose commands and verdicts are written down."""

    def __init__(self, sandbox: Sandbox, results: list[tuple[str, str]]) -> None:
        self.sandbox, self.results = sandbox, results

    async def exec(self, line: Any, **options: Any) -> ExecResult:
        result = await self.sandbox.exec(line, **options)
        if options.get("ends_turn", True):
            self.results.append((line, str(result.verdict)))
        return result
