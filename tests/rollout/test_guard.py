"""The gate before every command, and what happens when a sandbox dies."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout.episode.guard import MAX_RESTORES, MAX_SAME_COMMAND, GuardedSandbox, KilledItself, ReplayDivergence
from sandbox.errors import Interrupted, NotEqual
from tests.support.rollout_fakes import FakeSandbox


async def test_a_command_waits_until_the_last_turn_is_captured() -> None:
    sandbox = FakeSandbox()
    guarded = GuardedSandbox(sandbox)
    await guarded.exec("echo a >> f")
    sandbox.capture_gate = asyncio.Event()
    guarded.start_settling()
    held = asyncio.create_task(guarded.exec("cat f"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert sandbox.commands == ["echo a >> f"]
    sandbox.capture_gate.set()
    assert (await held).text == "a\n"
    assert guarded.executed[0].waited_s > 0
    await guarded.close()


async def test_death_between_turns_costs_nothing_but_a_restore() -> None:
    sandbox = FakeSandbox()
    guarded = GuardedSandbox(sandbox)
    await guarded.exec("echo a >> f")
    await guarded.finalized()
    sandbox.die()
    assert (await guarded.exec("cat f")).text == "a\n"
    assert [(one.equal, one.replayed) for one in guarded.recoveries] == [(True, 0)]


async def test_the_interrupted_command_runs_once_more_and_only_once() -> None:
    sandbox = FakeSandbox()
    deaths = iter([True])

    def inject(command: str) -> None:
        if "b" in command and next(deaths, False):
            sandbox.die()

    sandbox.after_command = inject
    guarded = GuardedSandbox(sandbox)
    await guarded.exec("echo a >> f")
    await guarded.exec("echo b >> f")
    assert (await guarded.exec("cat f")).text == "a\nb\n"
    assert guarded.deaths == 1 and sandbox.commands == ["echo a >> f", "echo b >> f", "echo b >> f", "cat f"]


async def test_a_turn_whose_checkpoint_died_with_the_sandbox_is_replayed() -> None:
    sandbox = FakeSandbox()
    guarded = GuardedSandbox(sandbox)
    await guarded.exec("echo a >> f")
    await guarded.exec("cat f")
    sandbox.fail_captures = 1
    await guarded.exec("echo b >> f")
    sandbox.die()
    assert (await guarded.exec("cat f")).text == "a\nb\n"
    assert guarded.recoveries[0].replayed == 1
    assert guarded.executed[2].info is not None  # the replay's checkpoint stands for it


async def test_a_failed_checkpoint_is_taken_again_while_the_sandbox_lives() -> None:
    sandbox = FakeSandbox()
    sandbox.fail_captures = 1
    guarded = GuardedSandbox(sandbox)
    await guarded.exec("echo a >> f")
    await guarded.finalized()
    info = guarded.executed[0].info
    assert info is not None and info.error is None


async def test_checks_that_end_no_turn_are_replayed_too() -> None:
    sandbox = FakeSandbox()
    guarded = GuardedSandbox(sandbox)
    await guarded.exec("echo a >> f", ends_turn=False)
    sandbox.die()
    assert (await guarded.exec("cat f")).text == "a\n"


async def test_unequal_restores_are_told_apart() -> None:
    sandbox = FakeSandbox()
    sandbox.unequal = True
    guarded = GuardedSandbox(sandbox)
    sandbox.die()
    await guarded.exec("true")
    assert [(one.equal, one.differences) for one in guarded.recoveries] == [(False, ["memory"])]


async def test_a_restore_that_comes_out_unequal_is_tried_again() -> None:
    class Flaky(FakeSandbox):
        failures = 2

        async def restore(self, to: Any = None, *, verify: bool = False) -> Any:
            if self.failures:
                self.failures -= 1
                raise NotEqual("memory differs", sandbox=self.id)
            return await super().restore(to, verify=verify)

    sandbox = Flaky()
    guarded = GuardedSandbox(sandbox)
    sandbox.die()
    await guarded.exec("true")
    assert [(one.equal, one.attempts) for one in guarded.recoveries] == [(True, 3)]
    sandbox.die()
    sandbox.failures = MAX_RESTORES
    with pytest.raises(NotEqual):
        await guarded.exec("true")


async def test_a_command_that_kills_its_sandbox_from_an_equal_state_each_time_did_it_itself() -> None:
    sandbox = FakeSandbox()
    sandbox.after_command = lambda _: sandbox.die()
    guarded = GuardedSandbox(sandbox)
    with pytest.raises(KilledItself):
        await guarded.exec("echo a >> f")
    assert len(sandbox.commands) == MAX_SAME_COMMAND
    await guarded.close()


async def test_what_is_executed_again_must_say_what_the_agent_has_read() -> None:
    """The state of the second command was never captured, and its repetition says something else."""
    sandbox = FakeSandbox()
    guarded = GuardedSandbox(sandbox)
    await guarded.exec("echo a >> f")
    await guarded.finalized()
    sandbox.fail_captures = 2
    assert (await guarded.exec("echo b >> f")).text == ""
    assert (await guarded.exec("cat f")).text == "a\nb\n"
    sandbox.die()
    sandbox.checkpoints[1][1]["f"] = "other\n"  # of the first command, from which it is repeated
    with pytest.raises(ReplayDivergence, match="stdout"):
        await guarded.exec("cat f")


async def test_what_cannot_be_captured_does_not_end_an_episode() -> None:
    sandbox = FakeSandbox()
    guarded = GuardedSandbox(sandbox)
    await guarded.exec("echo a >> f")
    await guarded.finalized()
    sandbox.fail_captures = 3
    await guarded.exec("echo b >> f")
    assert (await guarded.exec("cat f")).text == "a\nb\n"
    assert "refused" in guarded.executed[1].uncaptured and not guarded.clean
    sandbox.die()
    assert (await guarded.exec("cat f")).text == "a\nb\n"
    assert guarded.recoveries[0].replayed == 2


async def test_a_daemon_that_died_during_a_command_is_a_death_of_the_state_not_of_the_episode() -> None:
    sandbox = FakeSandbox()
    guarded = GuardedSandbox(sandbox)
    await guarded.exec("echo a >> f")
    await guarded.finalized()
    lost = iter([True])

    def forget(command: str) -> None:
        if next(lost, False):
            raise Interrupted("the daemon ended meanwhile")

    sandbox.after_command = forget
    await guarded.exec("echo b >> f")
    assert (await guarded.exec("cat f")).text == "a\nb\n"
