"""Trees of rollouts and independent ones learn on a twin by the real controller and trainer."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.harness.tree_learning import compared, difference, measure


async def test_trees_spend_less_of_the_environment_on_as_many_leaves(tmp_path: Path) -> None:
    options = argparse.Namespace(seeds=[0], steps=1, held_out=4, every=3, example="finish_the_migration", by="turns")
    (run,) = (await measure(tmp_path, options))["tree_learning"]
    assert run["share"] < 0.9 and run["token_share"] < 0.9
    assert set(run["trees"]["reward"]) == {0, 1} and run["independent"]["cost"][1] > 64


def test_the_cost_of_reaching_the_same_reward() -> None:
    independent = {"reward": {0: 0.3, 3: 0.5, 6: 0.7}, "cost": {0: 0, 3: 100, 6: 200}, "tokens": 10}
    trees = {"reward": {0: 0.8, 3: 0.6, 6: 0.7}, "cost": {0: 0, 3: 50, 6: 100}, "tokens": 6}
    assert compared(trees, independent) | {"token_share": 0} == {
        "independent_reward": 0.7,
        "trees_reward": 0.7,
        "equal_cost_reward": 0.5,
        "share": 0.5,
        "token_share": 0,
        "share_to_reach": 0.5,
    }
    late = compared({**trees, "reward": {0: 0.8, 3: 0.6, 6: 0.6}}, independent)
    assert late["share_to_reach"] is None


def test_the_difference_of_pairs_has_the_interval_of_students_t() -> None:
    assert difference([-1.0, 0.0, 1.0]) == {"mean": 0.0, "low": -2.4841, "high": 2.4841}  # 4.3027 / sqrt(3)
