"""How much memory and time a run will take, before it starts: what `--dry-run` prints.

What is left out: to find what changed since the last version takes up to 26 bytes for each word of a segment (32 MiB of
weights at most), not 8, when most of them changed, as at rates far above those of large models.

Activations are counted, not guessed: the model is made without memory (torch's fake tensors), reads a micro-batch as
large as the budget allows, and every tensor that autograd keeps for the backward pass is added up.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rollout.weights.layout import SEGMENT_WORDS
from trainer.batches.pack import pack
from trainer.batches.sample import Sample
from trainer.models.logprobs import CHUNK
from trainer.models.scorer import Scorer

FP32, BF16 = 4, 2  # bytes
STATE = {"adamw": 8, "muon": 4, "adamw8bit": 2}  # bytes of an optimiser for each trained weight, at least
ENCODED = 8  # bytes for each word of a segment that is compressed
FLOPS_PER_WEIGHT = 6  # and token: forward 2, backward 4
RECOMPUTED = 8  # with activations computed again


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Bytes, and seconds of a step."""

    parameters: int
    trained: int  # of these
    weights: int  # of a model that is only read too
    gathered: int  # what a rank of several has complete at a time, of weights and of gradients
    gradients: int
    optimiser: int
    published: int  # a copy of the version that engines have, with which the next one is compared
    saved: int  # the copy that a save is written from
    encoding: int  # of a segment of the next version, during a save
    activations: int  # of one micro-batch
    scratch: int  # logits of a chunk and the like
    step_s: float

    @property
    def peak(self) -> int:
        """In a backward pass; or in the update, whose temporary copies are as large as the gradients; or in a save,
        when there are no gradients, and the next version is copied too."""
        step = self.gradients + max(self.gathered + self.activations + self.scratch, self.gradients)
        save = self.published + self.encoding + self.saved
        return self.weights + self.optimiser + self.published + max(step, save)


def estimate(
    model: nn.Module,
    *,
    budget: int,
    longest: int,
    tokens: int,
    recompute: bool,
    flops: float,
    ranks: int = 1,
    bf16: bool = False,
    reference: int = 0,
) -> Estimate:
    """For a model made under `ghostly()`, and one of `ranks` that share it.

    `tokens` of a step, `longest` trajectory, `flops` that the machine does, for all ranks that are on it. `reference`:
    weights of a model that is only read.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    length = min(longest, budget)
    scorer = Scorer(model, recompute=recompute, bf16=bf16)
    shard = FP32 * trained // ranks
    per_weight = RECOMPUTED if recompute else FLOPS_PER_WEIGHT
    activations = retained(scorer, length=length, count=max(1, budget // length))
    return Estimate(
        parameters=parameters,
        trained=trained,
        weights=FP32 * (parameters + reference) // ranks,
        gathered=gathered(scorer) if ranks > 1 else 0,
        gradients=shard,
        optimiser=2 * shard,
        published=BF16 * trained // ranks,
        saved=3 * shard,
        encoding=ENCODED * min(SEGMENT_WORDS, trained // ranks),
        activations=activations,
        scratch=3 * FP32 * min(CHUNK, budget * scorer.vocabulary),
        step_s=per_weight * parameters * tokens / flops,
    )


def resident(model: nn.Module, *, ranks: int, optimiser: str) -> int:
    """Bytes that a rank never does without during an update: weights, gradients, and the optimiser's state."""
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return (FP32 * total + (FP32 + STATE[optimiser]) * trained) // ranks


def gathered(scorer: Scorer) -> int:
    """Bytes of weights and gradients that a rank has complete at a time, in fp32: two layers, and what is in none."""

    def largest(*, trained: bool) -> int:
        def count(module: nn.Module) -> int:
            return sum(item.numel() for item in module.parameters() if item.requires_grad or not trained)

        layers = [count(layer) for layer in scorer.layers()]
        return 2 * max(layers) + count(scorer) - sum(layers)

    return FP32 * (largest(trained=False) + largest(trained=True))


def ghostly() -> FakeTensorMode:
    """``with ghostly(): model = Qwen3(configuration)``: shapes, kinds and operations as ever, no memory."""
    return FakeTensorMode()


def retained(scorer: Scorer, *, length: int, count: int) -> int:
    """Bytes that autograd keeps of `count` packed trajectories of `length` tokens, weights not counted."""
    one = Sample(tokens=[0] * length, mask=[0] + [1] * (length - 1), logprobs=[0.0] * length)
    packed = pack([one] * count)
    own = {parameter.untyped_storage()._cdata for parameter in scorer.parameters()}
    result: dict[int, tuple[int, Tensor]] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            result[storage._cdata] = (storage.nbytes(), tensor)  # the tensor is held, so that its number stays its own
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        scorer(packed)
    return sum(size for size, _ in result.values())


def measure_flops(*, size: int = 768, seconds: float = 0.3, bf16: bool = False) -> float:
    """What this machine does in a product of matrices, per second, now."""
    left = right = torch.ones(size, size, dtype=torch.bfloat16 if bf16 else torch.float32)
    done, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < seconds:
        left @ right
        done += 1
    return done * 2 * size**3 / took


def table(result: Estimate) -> list[tuple[str, str]]:
    """As a person reads it."""

    def size(count: int) -> str:
        return f"{count / 2**20:.1f} MiB"

    return [
        ("parameters", f"{result.parameters:,}, trained: {result.trained:,}"),
        ("weights, gradients", f"{size(result.weights)}, {size(result.gradients)}"),
        ("complete at a time, of several ranks", size(result.gathered)),
        ("optimiser", size(result.optimiser)),
        ("copies: published last and next, for a save", f"twice {size(result.published)}, {size(result.saved)}"),
        ("activations of a micro-batch", size(result.activations)),
        ("peak memory of a rank", size(result.peak)),
        ("a step, at most", f"{result.step_s:.1f} s"),
    ]
