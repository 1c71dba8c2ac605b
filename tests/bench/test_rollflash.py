"""What `pagurus bench scheduling --part flash` compares with: a group as one request, a batch that steps together."""

from __future__ import annotations

import asyncio
from typing import Any

from bench.harness.rollflash import SLOTS, CompleteGroups, Delayed
from rollout.engine.client import Generation, Sampling


class Held:
    """An engine whose answers end when they are told to."""

    def __init__(self) -> None:
        self.requested: list[tuple[int, asyncio.Event]] = []

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "") -> Any:
        end = asyncio.Event()
        self.requested.append((prompt_ids[0], end))
        await end.wait()
        return Generation(token_ids=[1], logprobs=[0.0], spans=[], finish_reason="length")

    @property
    def prompts(self) -> set[int]:
        return {prompt for prompt, _ in self.requested}


async def _finalize() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_group_keeps_its_slots_until_its_last_answer() -> None:
    size = SLOTS // 2  # an engine has room for two groups
    engines: Any = [Held(), Held()]
    groups = CompleteGroups(engines, size)
    tasks = [
        asyncio.create_task(groups.generate([prompt], Sampling())) for prompt in range(5) for _ in range(size)
    ]  # fmt: skip
    await _finalize()
    assert sorted(len(engine.prompts) for engine in engines) == [2, 2]
    assert not engines[0].prompts & engines[1].prompts, "a group is on one engine"
    waiting = ({0, 1, 2, 3, 4} - engines[0].prompts - engines[1].prompts).pop()
    first = min(engines[0].prompts)
    *limit, last = [end for prompt, end in engines[0].requested if prompt == first]
    for end in limit:
        end.set()
    await _finalize()
    assert waiting not in engines[0].prompts
    last.set()
    await _finalize()
    assert waiting in engines[0].prompts
    for _, end in [*engines[0].requested, *engines[1].requested]:
        end.set()
    assert len(await asyncio.gather(*tasks)) == 5 * size


async def test_who_steps_together_waits_for_the_last() -> None:
    together = asyncio.Barrier(2)
    environments = [Delayed(lambda seed, own=own: [own, 0.0], together) for own in (0.0, 0.05)]
    await asyncio.gather(*(item.reset(None, 0) for item in environments))
    quick = asyncio.create_task(environments[0].step(None, ""))
    await _finalize()
    assert not quick.done()
    slow = await environments[1].step(None, "")
    assert not slow.done and not (await quick).done
    assert all([(await item.step(None, "")).done for item in environments])
