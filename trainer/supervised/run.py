"""A supervised run: rows to tokens, epochs of steps, a measurement on rows that are not trained on, a model directory.

Guarantee: which rows are held out is a value of the data, never of the seed; a run that was killed continues with the
batch after its last save and ends with the weights that it would have had.

::

    rows ─▶ split by content ─▶ tokens ─▶ epochs, each in an order of its own ─▶ step ─▶ save ─▶ runs/X/model
                └▶ held out ─────────────────────────────────────────────────▶ measure ─▶ metrics.jsonl
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from rollout.environments import splits
from rollout.environments.rows import read_rows
from rollout.episode.renderer import ChatRenderer, has_template
from sandbox import durable
from sandbox.errors import Invalid
from trainer.batches.sample import Sample
from trainer.distributed import torchrun
from trainer.distributed.blocks import load_scorer
from trainer.distributed.ranks import ALONE, Ranks, join, leave
from trainer.distributed.shard import complete
from trainer.errors import TrainerFailed
from trainer.models.load import Lora, export, load, take
from trainer.models.verify import begin as verify_model
from trainer.resume import ResumeState, Saves
from trainer.supervised import data
from trainer.supervised.config import SupervisedConfig
from trainer.supervised.data import PreferencePair
from trainer.supervised.learner import SupervisedLearner

PLAN = "supervised.json"
MEASURED = 64  # units of a measurement at once

Unit = list[Sample] | PreferencePair  # what a row became


class SupervisedRun:
    """``SupervisedRun(config).run()`` returns the directory of the model."""

    def __init__(
        self,
        config: SupervisedConfig,
        *,
        directory: Path | None = None,
        report: Callable[[str], object] = print,
        ranks: Ranks = ALONE,
    ):
        self.config, self.ranks = config, ranks
        self.report = report if ranks.rank == 0 else lambda _: None
        if not has_template(config.model):
            raise Invalid(f"{config.model} has no chat template", hint="put its chat_template.jinja into the directory")
        rows, held = self._rows()
        self.directory = directory or self._directory()
        base = self.directory / "policy"
        if not base.exists():
            take(config.model, base)
        packs = verify_model(base, self.directory).packs
        renderer = ChatRenderer.load(base, options=config.template)
        lora = Lora(rank=config.lora, alpha=2 * config.lora) if config.lora else None
        torch.manual_seed(config.seed)
        scorer = load_scorer(base, ranks, lora=lora, packs=packs, bf16=config.bf16, recompute=config.recompute)
        reference = None
        if config.loss == "dpo":
            reference = load_scorer(base, ranks, packs=packs, trained=False, bf16=config.bf16)
        self.learner = SupervisedLearner(
            scorer, config.optimiser, reference=reference, preference=config.preference, ranks=ranks
        )
        self.left_out: dict[str, int] = {}
        self.units = self._units(renderer, rows, "row")
        self.held = self._units(renderer, held, "held-out row")
        if not self.units:
            raise Invalid(f"no row of {config.data} can be trained on: {self.left_out}", hint="see docs/supervised.md")
        self.saves = Saves(self.directory / "resume", ranks)
        self._plain = functools.partial(load, base, lora=lora, packs=packs)

    def run(self) -> Path:
        config = self.config
        per_epoch = -(-len(self.units) // config.batch)
        steps = config.steps or config.epochs * per_epoch
        state = self.saves.load(self.learner)
        done = 0 if state is None else state.step
        self.report(f"{self.directory}: {len(self.units)} trained on, {len(self.held)} held out, {steps} steps")
        if self.left_out:
            self.report(f"left out: {', '.join(f'{count}: {why}' for why, count in self.left_out.items())}")
        if not done:
            self._measure(0)
        for step in range(done, steps):
            began = time.monotonic()
            batch = self._batch(step, per_epoch)
            metrics = self.learner.step(batch, rate=config.optimiser.rate_at(step, steps))
            self._note(step + 1, metrics | {"seconds": time.monotonic() - began})
            if (step + 1) % config.save_every == 0 or step + 1 == steps:
                state = ResumeState(step=step + 1, version=step + 1, ranks=self.ranks.size)
                self.saves.save(self.learner, state)
            if step + 1 == steps or (config.evaluate_every and (step + 1) % config.evaluate_every == 0):
                self._measure(step + 1)
        made = self.directory / "model"
        self._export(made)
        self.report(f"the model is in {made}")
        return made

    def _export(self, made: Path) -> None:
        if self.ranks.alone:
            export(self.learner.scorer.model, made, base=self.directory / "policy")
            return
        tensors = complete(self.learner.scorer, self.ranks)
        if self.ranks.rank == 0:
            plain = self._plain()
            plain.load_state_dict(tensors, strict=False)  # a tied head follows what it is tied to
            export(plain, made, base=self.directory / "policy")
        self.ranks.barrier()

    # ------------------------------------------------------------------ parts

    def _rows(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Those that are trained on, and those that are not. Equal rows are on the same side."""
        config = self.config
        rows = read_rows(config.data, minimum=1)
        held = [] if config.held_out is None else read_rows(config.held_out, minimum=1)
        keys = [splits.key(row) for row in rows + held]
        items = splits.Items(part=str(config.data), kind="rows", keys=keys, evaluated=len(held))
        share = config.held_share if not held else config.held_share or splits.SHARE
        if not share or len(set(keys)) < 2:
            return rows, []
        (split,) = splits.make([items], share)
        everything = rows + held
        return [everything[at] for at in split.training], [everything[at] for at in split.held]

    def _directory(self) -> Path:
        config = self.config
        config.out.mkdir(parents=True, exist_ok=True)
        name = f"{config.loss}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        others = len([path for path in config.out.iterdir() if path.name.startswith(name)])  # of this second
        directory = config.out.resolve() / (f"{name}-{others}" if others else name)
        directory.mkdir()
        durable.publish(directory / PLAN, msgspec.json.format(msgspec.json.encode(config, enc_hook=str), indent=1))
        return directory

    def _units(self, renderer: ChatRenderer, rows: Sequence[dict[str, Any]], what: str) -> list[Unit]:
        """What rows became; those that are none, or too long, are counted by their reason."""
        made: list[Unit] = []
        limit = min(self.config.max_length, self.learner.scorer.positions or self.config.max_length)
        for number, row in enumerate(rows):
            try:
                unit = self._unit(renderer, row, f"{what} {number}")
            except Invalid as error:
                self._leave_out(error.message.removeprefix(f"{what} {number} "))
                continue
            samples = [unit.chosen, unit.rejected] if isinstance(unit, PreferencePair) else unit
            if max(len(sample.tokens) for sample in samples) > limit:
                self._leave_out(f"longer than {limit} tokens")
            else:
                made.append(unit)
        return made

    def _unit(self, renderer: ChatRenderer, row: dict[str, Any], name: str) -> Unit:
        if self.config.loss == "dpo":
            return data.preference(renderer, row, name=name)
        return data.samples(renderer, data.conversation(row), row.get("tools") or (), name=name)

    def _leave_out(self, why: str) -> None:
        self.left_out[why] = self.left_out.get(why, 0) + 1

    def _batch(self, step: int, per_epoch: int) -> list[Any]:
        epoch, place = divmod(step, per_epoch)
        order = np.random.default_rng([self.config.seed % (1 << 63), epoch]).permutation(len(self.units))
        return _flat([self.units[at] for at in order[place * self.config.batch : (place + 1) * self.config.batch]])

    def _measure(self, step: int) -> None:
        """Mean of each figure over the held-out units, each batch weighted by what its loss is a mean over."""
        if not self.held:
            return
        totals: dict[str, float] = {}
        weight = 0.0
        for at in range(0, len(self.held), MEASURED):
            batch = _flat(self.held[at : at + MEASURED])
            metrics = self.learner.measure(batch)
            here = metrics.get("tokens", float(len(batch)))
            weight += here
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + value * (1.0 if name == "tokens" else here)
        result = {name: value if name == "tokens" else value / weight for name, value in totals.items()}
        self._note(step, {f"held_out/{name}": value for name, value in result.items()})
        self.report(f"step {step}: held-out loss {result['loss']:.4f}")

    def _note(self, step: int, metrics: dict[str, float]) -> None:
        if self.ranks.rank:
            return
        with (self.directory / "metrics.jsonl").open("ab") as file:
            file.write(msgspec.json.encode({"step": step, **metrics}) + b"\n")


def run(directory: Path, ranks: int) -> Path:
    """A run that has its directory, to its end: here, or by processes of torchrun's that share its steps."""
    if ranks == 1:
        return resume(directory).run()
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "0"),
        *torchrun.own_files(directory),
        *("--nproc-per-node", str(ranks), "-m", "trainer.supervised.run", str(directory)),
    ]
    code = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
    if code:
        raise TrainerFailed(
            f"a rank ended with status {code}", hint=f"see above; --resume {directory} continues from the last save"
        )
    return directory / "model"


def resume(directory: Path, *, report: Callable[[str], object] = print, ranks: Ranks = ALONE) -> SupervisedRun:
    """The run of a directory, where it was."""
    return SupervisedRun(_read(directory), directory=directory.resolve(), report=report, ranks=ranks)


def _read(directory: Path) -> SupervisedConfig:
    try:
        return msgspec.json.decode((directory / PLAN).read_bytes(), type=SupervisedConfig, dec_hook=_path)
    except FileNotFoundError:
        raise Invalid(f"{directory} is no supervised run", hint="name a directory that `pagurus sft` made") from None


def _flat(units: Sequence[Unit]) -> list[Any]:
    return [item for unit in units for item in ([unit] if isinstance(unit, PreferencePair) else unit)]


def _path(kind: type, value: object) -> object:
    return kind(str(value))


def main(directory: Path) -> None:
    """One rank of torchrun's."""
    torch.set_num_threads(1)
    ranks = join(**msgspec.structs.asdict(_read(directory).mesh))
    try:
        resume(directory, ranks=ranks).run()
    finally:
        leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
