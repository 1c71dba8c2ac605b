"""Does a real language model learn here, and as TRL does? SmolLM2-135M with GRPO on comparing numbers, in sandboxes.

`make setup-models setup-trl`, then `pagurus bench learning --seeds 0 1 2 --trl --json`: each seed is a whole run of
`pagurus train` (held-out reward before and after, the batches' mean rewards), then TRL's GRPOTrainer with the same
model, prompts, sizes, rate and objective (Dr. GRPO, no KL). `step_tokens_per_s` are the batch's tokens for each second
of forward, backward and update, sampling not counted. Sized for two slow cores: an hour of processor time a seed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.harness import command, comparison, real_training
from bench.harness.own_daemon import IMAGE
from rollout.engine.client import Sampling
from sandbox.errors import NotFound
from sandbox.paths import CHECKOUT
from trainer.config import TrainConfig
from trainer.settings import ObjectiveSettings, OptimiserSettings

MODEL = CHECKOUT / ".prefix" / "models" / "SmolLM2-135M-Instruct"
TRL = CHECKOUT / ".prefix" / "trl"
TASK = Path(comparison.__file__)
MAX_TOKENS = 12  # of an answer
LAST = 5  # steps of which the mean reward is compared


def plan(options: argparse.Namespace, seed: int) -> TrainConfig:
    return TrainConfig(
        task=TASK, model=MODEL, seed=seed, steps=options.steps, groups=options.groups, size=options.size,
        held_out=options.held_out, pace=0.0, image=IMAGE, staleness=0, max_length=128, trackers=(),
        sampling=Sampling(max_tokens=MAX_TOKENS), objective=ObjectiveSettings(preset="dr_grpo", length=MAX_TOKENS),
        optimiser=OptimiserSettings(rate=options.rate, schedule="constant"),
    )  # fmt: skip


def beside(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """TRL's run, in a process that sees its packages."""
    first = 1_000_000 * seed
    asked = {
        "model": str(MODEL), "seed": seed, "steps": options.steps, "groups": options.groups, "size": options.size,
        "rate": options.rate, "max_tokens": MAX_TOKENS,
        "questions": list(range(first, first + options.steps * options.groups)),
    }  # fmt: skip
    path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH"), str(TRL)]))
    done = subprocess.run(
        [sys.executable, "-m", "bench.harness.trl_grpo", json.dumps(asked)],
        cwd=CHECKOUT, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"TRL ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    made: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps({"trl": seed, **made}), file=sys.stderr, flush=True)
    return made


def compared(ours: dict[str, Any], theirs: dict[str, Any] | None) -> dict[str, Any]:
    """A row of the figures: one seed."""
    rewards = list(ours["batch"].values())
    row = {
        "seed": ours["seed"],
        "held_out_before": round(ours["before"], 4),
        "held_out_after": round(ours["after"], 4),
        "batch_last": round(sum(rewards[-LAST:]) / len(rewards[-LAST:]), 4),
        "step_tokens_per_s": ours["step_tokens_per_s"],
        "wall_s": max(ours["wall_s"].values()),
    }
    if theirs is not None:
        last = theirs["batch"][-LAST:]
        row["trl_batch_last"] = round(sum(last) / len(last), 4)
        row["trl_step_tokens_per_s"] = theirs["step_tokens_per_s"]
        row["step_against_trl"] = round(ours["step_tokens_per_s"] / theirs["step_tokens_per_s"], 3)
    return row


def main(arguments: list[str] | None = None) -> None:
    words = command.parser(__name__, __doc__)
    words.add_argument("--seeds", type=int, nargs="+", default=[0], help="a run each")
    words.add_argument("--steps", type=int, default=12)
    words.add_argument("--groups", type=int, default=4, help="prompts of a step")
    words.add_argument("--size", type=int, default=8, help="answers to a prompt")
    words.add_argument("--held-out", type=int, default=64, help="episodes of each evaluation")
    words.add_argument("--rate", type=float, default=3e-5, help="of AdamW")
    words.add_argument("--trl", action="store_true", help="TRL's GRPOTrainer too (make setup-trl)")
    words.add_argument("--image", default="debian", help="an image of this host")
    options = words.parse_args(arguments)
    for directory, step in ((MODEL, "setup-models"), *([(TRL, "setup-trl")] if options.trl else [])):
        if not directory.is_dir():
            raise NotFound(f"{directory} is missing", hint=f"make {step}")
    rows = []
    with real_training.host(options.image) as host:
        for seed in options.seeds:
            ours = real_training.learn(host, plan(options, seed))
            rows.append(compared(ours, beside(options, seed) if options.trl else None))
    gains = [row["held_out_after"] - row["held_out_before"] for row in rows]
    command.show({"gain_least": round(min(gains), 4), "runs": rows}, options)


if __name__ == "__main__":
    main()
