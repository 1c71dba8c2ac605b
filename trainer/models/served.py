"""Does an engine report what the trainer computes? Answers of an engine, scored again in the way that trains them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from rollout.engine.client import Sampling
from rollout.engine.launch import KINDS
from rollout.engine.supervisor import EngineSupervisor
from sandbox.errors import Invalid
from trainer.batches.pack import pack
from trainer.batches.sample import Sample
from trainer.models.load import configuration, load
from trainer.models.scorer import Scorer
from trainer.models.verify import probes_of

ANSWER = 24  # tokens


async def served(directory: Path, engine: str, *, packs: bool) -> float:
    """The largest difference in nats between an engine's log-probabilities of its own answers and the trainer's."""
    if engine not in KINDS:
        raise Invalid(f"no engine {engine!r}", hint="embedded or vllm")
    prompts = [sample.tokens[:16] for sample in probes_of(configuration(directory))]
    with tempfile.TemporaryDirectory(prefix="pagurus-verify-") as home:
        launch = KINDS[engine](length=64)
        async with EngineSupervisor(launch, directory, 0, log=Path(home) / "engine.log") as server:
            answers = [
                await server.generate(ids, Sampling(max_tokens=ANSWER, seed=number, ignore_eos=True))
                for number, ids in enumerate(prompts)
            ]
    samples = [
        Sample(
            tokens=[*ids, *answer.token_ids],
            mask=[0] * len(ids) + [1] * len(answer.token_ids),
            logprobs=[0.0] * len(ids) + answer.logprobs,
        )
        for ids, answer in zip(prompts, answers, strict=True)
    ]
    scorer = Scorer(load(directory, packs=packs), packs=packs)
    with torch.no_grad():
        packed = pack(samples)
        return float((scorer(packed).new - packed.engine).abs().max())
