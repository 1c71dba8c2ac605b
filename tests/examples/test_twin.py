"""The twin prints what the sandbox prints: random sequences of the example's commands on both, compared."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from examples.fix_the_service.demonstrations import script
from examples.fix_the_service.environment import FixTheService, observe
from examples.fix_the_service.scenario import FOLDER, PORTS, Scenario, scenario
from examples.fix_the_service.twin import Twin
from sandbox import Sandbox
from sandbox.messages import ExecResult
from tests.support.daemon_host import IMAGE, Daemon, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "-")

SEQUENCES = 12
LENGTH = 7


def command(case: Scenario, rng: random.Random) -> str:
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


# The twin starts a service in no time: wait until each that was started listens or has given up. What is left are
# this shell and one process for each listening socket.
SETTLED = """
until [ "$(pgrep -c -x 'sh|serve')" -eq $((1 + $(grep -c ' 0A ' /proc/net/tcp))) ]; do sleep 0.02; done
"""


async def test_same_words_on_random_sequences(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    try:
        daemon.start()
        async with daemon.client() as host:
            for number in range(SEQUENCES):
                case, rng, twin = scenario(number), random.Random(number), Twin()
                async with host.create(IMAGE) as sandbox:
                    await sandbox.exec(case.install, cwd=FOLDER)
                    await twin.exec(case.install, cwd=FOLDER)
                    for _ in range(LENGTH):
                        line = command(case, rng)
                        simulated = await twin.exec(line, cwd=FOLDER)
                        real = await sandbox.exec(line, cwd=FOLDER, timeout=3.0 if simulated.timed_out else 240.0)
                        assert observe(real) == observe(simulated), (number, line)
                        if line.endswith("&"):
                            assert (await sandbox.exec(SETTLED, timeout=240.0)).exit_code == 0
    finally:
        daemon.clean()


async def test_an_episode_holds_all_four_verdicts_and_earns_its_reward(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    seen: dict[str, set[str]] = {}
    results: list[tuple[str, str]]
    try:
        daemon.start()
        async with daemon.client() as host:
            for seed in range(4):
                environment = FixTheService()
                async with host.create(IMAGE) as sandbox:
                    await environment.reset(sandbox, seed)
                    await sandbox.checkpoint()
                    results = []
                    recorded = Recorded(sandbox, results)
                    for line in script(seed, sloppy=False):
                        observation = await environment.step(recorded, line)
                    assert observation.done
                    assert observation.reward == 1.0
                for line, verdict in results:
                    seen.setdefault(line.split(" ")[0] + (" >log" if ">log" in line else ""), set()).add(verdict)
    finally:
        daemon.clean()
    assert seen["cat"] == {"none"}
    assert seen["sed"] == {"files"}
    assert seen["./serve >log"] <= {"both", "processes"}  # the shell may end before its child has opened the log
    assert seen["./serve"] == {"processes"}
    assert seen["./ask"] <= {"both", "processes"}  # then its log belongs to the next turn


class Recorded:
    """A sandbox whose commands and verdicts are written down."""

    def __init__(self, sandbox: Sandbox, results: list[tuple[str, str]]) -> None:
        self.sandbox, self.results = sandbox, results

    async def exec(self, line: Any, **options: Any) -> ExecResult:
        result = await self.sandbox.exec(line, **options)
        if options.get("ends_turn", True):
            self.results.append((line, str(result.verdict)))
        return result
