"""A trainer that is killed on a recorded log of samples ends with the weights of one that is not, bit by bit."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from rollout import Trajectory
from rollout.store.samples import SampleStore
from rollout.weights.store import VersionStore
from tests.crash import recorded
from trainer.config import TrainConfig, open_run

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fix_the_service"
STEPS, GROUPS, SIZE, WORDS = 4, 2, 2, 64


def record(directory: Path) -> None:
    """A store with the batches of some steps, of trajectories that are seeded noise."""
    store, chance = SampleStore(directory), random.Random(5)
    fence = store.acquire("rollout")
    store.issue(range(STEPS * GROUPS), fence)
    for step in range(STEPS):
        leases = store.lease(GROUPS, fence)
        for lease in leases:
            for member in range(SIZE):
                made = Trajectory(prompt=lease.prompt, group=lease.prompt, index=member, reward=float(member))
                for _ in range(3):
                    made.put([chance.randrange(3, WORDS) for _ in range(4)])
                    said = [chance.randrange(3, WORDS) for _ in range(5)]
                    made.append(len(made.tokens), said, [1] * 5, [-chance.uniform(1, 4) for _ in said], [step] * 5, [])
                assert store.put(made, fence)
            store.buffer(lease.prompt, fence)
        store.take(step, [lease.prompt for lease in leases], fence, version=step, oldest=step - 1, members=SIZE)
    store.close()


async def test_a_trainer_that_is_killed_ends_with_the_same_weights(tmp_path: Path) -> None:
    fresh, _ = open_run(TrainConfig(task=EXAMPLE, steps=STEPS, held_out=1, concurrency=2, pace=0.0, out=tmp_path))
    record(fresh / "rollout")
    digests = {}
    for kills in (0, 2):
        run = tmp_path / f"killed-{kills}"
        shutil.copytree(fresh, run)
        assert await recorded.train(run, STEPS, kills=kills, seed=3, longest=0.3) == kills
        published = VersionStore(run / "weights")
        digests[kills] = published.digests(STEPS)
        assert published.digests(STEPS - 1) != digests[kills]
    assert digests[0] == digests[2]
