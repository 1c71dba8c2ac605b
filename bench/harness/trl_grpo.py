"""TRL's GRPOTrainer on the task of bench.harness.comparison: one JSON object, of rewards and seconds by step.

``PYTHONPATH=.prefix/trl python -m bench.harness.trl_grpo '{"model": ..., "steps": 30, ...}'``, as bench.learning does.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import torch

from bench.harness.comparison import number, question


def main(options: dict[str, Any]) -> dict[str, Any]:
    import pyarrow
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    torch.manual_seed(options["seed"])
    spent: dict[str, list[float]] = {"sampled_s": [], "step_s": [], "tokens": []}
    asked = [question(seed) for seed in options["questions"]]
    rows = [{"prompt": [{"role": "user", "content": text}], "target": str(max(a, b))} for text, a, b in asked]

    def right(completions: list[Any], target: list[str], **_: Any) -> list[float]:
        said = [item[0]["content"] for item in completions]
        return [float(number(text) == goal) for text, goal in zip(said, target, strict=True)]

    class Measured(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            began = time.perf_counter()
            made = super()._generate_and_score_completions(inputs)
            spent["sampled_s"].append(time.perf_counter() - began)
            read = made["prompt_mask"].sum() + made["completion_mask"].sum()
            spent["tokens"].append(float(read))
            return made

        def training_step(self, *arguments: Any, **more: Any) -> Any:
            began = time.perf_counter()
            loss = super().training_step(*arguments, **more)
            spent["step_s"].append(time.perf_counter() - began)
            return loss

    with tempfile.TemporaryDirectory() as directory:
        config = GRPOConfig(
            output_dir=directory, per_device_train_batch_size=options["groups"] * options["size"],
            num_generations=options["size"], max_completion_length=options["max_tokens"], max_steps=options["steps"],
            learning_rate=options["rate"], lr_scheduler_type="constant", loss_type="dr_grpo", scale_rewards="none",
            beta=0.0, temperature=1.0, top_k=0, top_p=1.0, max_grad_norm=1.0, weight_decay=0.0, adam_beta2=0.95,
            logging_steps=1, save_strategy="no", report_to=[], seed=options["seed"], use_cpu=True, bf16=False,
            gradient_checkpointing=False, shuffle_dataset=False, disable_tqdm=True,
        )  # fmt: skip
        trainer = Measured(
            model=options["model"],
            reward_funcs=[right],
            args=config,
            train_dataset=Dataset(pyarrow.Table.from_pylist(rows), fingerprint="larger"),
        )
        trainer.train()
        rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    computed = [whole - sampled for whole, sampled in zip(spent["step_s"], spent["sampled_s"], strict=True)]
    return {"batch": rewards, "step_tokens_per_s": round(sum(spent["tokens"]) / sum(computed), 1), **spent}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
