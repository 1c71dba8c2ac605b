"""The best version by a figure stays as a model directory, whenever the trainer is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.errors import Invalid
from trainer.evaluation import best
from trainer.evaluation.best import FILE, NAME, BestKeeper, BestVersion, read


@pytest.fixture(autouse=True)
def exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are one file with the version in it."""

    def write(run: Path, directory: Path, version: int) -> int:
        directory.mkdir()
        (directory / "weights").write_text(str(version))
        return version

    monkeypatch.setattr(best, "export", write)


def held(value: float) -> dict[str, object]:
    return {"reward_held_out": value, "held_out_episodes": 9, "reward_held_out_by_part": {"repair": 1 - value}}


def weights(run: Path) -> str:
    return (run / NAME / "weights").read_text()


def test_only_a_greater_figure_replaces_it(tmp_path: Path) -> None:
    keeper = BestKeeper(tmp_path, "reward_held_out")
    for version, value in enumerate((0.5, 0.4, 0.7, 0.7, float("nan"), 0.1)):
        keeper.consider(held(value), step=version, version=version)
    assert weights(tmp_path) == "2"
    assert read(tmp_path) == BestVersion(figure="reward_held_out", value=0.7, step=2, version=2)
    again = BestKeeper(tmp_path, "reward_held_out")
    assert again.consider(held(0.6), step=9, version=9) is None and weights(tmp_path) == "2"
    assert again.consider(held(0.8), step=10, version=10) is not None and weights(tmp_path) == "10"
    assert sorted(path.name for path in tmp_path.iterdir()) == [NAME]


def test_a_figure_may_be_of_a_part_and_must_be_there(tmp_path: Path) -> None:
    keeper = BestKeeper(tmp_path, "reward_held_out_by_part/repair")
    for version, value in enumerate((0.5, 0.2, 0.9)):
        keeper.consider(held(value), step=version, version=version)
    assert weights(tmp_path) == "1"
    with pytest.raises(Invalid, match="no figure 'rewards'"):
        BestKeeper(tmp_path, "rewards").consider(held(1.0), step=1, version=1)
    assert BestKeeper(tmp_path / "none", "").consider(held(1.0), step=1, version=1) is None


@pytest.mark.parametrize("instant", ["exporting", "described", "old moved", "new moved"])
def test_a_kill_leaves_a_complete_one(instant: str, tmp_path: Path) -> None:
    BestKeeper(tmp_path, "reward_held_out").consider(held(0.5), step=1, version=1)
    new = tmp_path / ".best-new"
    new.mkdir()
    (new / "weights").write_text("2")
    if instant != "exporting":
        text = (tmp_path / NAME / FILE).read_text().replace("0.5", "0.9")
        (new / FILE).write_text(text)
    if instant in ("old moved", "new moved"):
        (tmp_path / NAME).rename(tmp_path / ".best-old")
    if instant == "new moved":
        new.rename(tmp_path / NAME)
    keeper = BestKeeper(tmp_path, "reward_held_out")
    assert keeper.current is not None
    assert (weights(tmp_path), keeper.current.value) == (("2", 0.9) if "moved" in instant else ("1", 0.5))
    assert sorted(path.name for path in tmp_path.iterdir()) == [NAME]
