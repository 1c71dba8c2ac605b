"""Ranks that compare a model that is cut with the same one whole. Not a test module."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rollout.experts import RoutedExperts
from trainer.batches.pack import PackedBatch, pack
from trainer.batches.sample import Sample
from trainer.distributed.blocks import load_scorer
from trainer.distributed.mesh import MeshLayout
from trainer.distributed.plans import EXPERT_COUNTS, PLANS
from trainer.distributed.ranks import Ranks, leave, make_meshes
from trainer.distributed.shard import local, norm_of
from trainer.models.balance import SCORING
from trainer.models.load import Lora, configuration, load
from trainer.models.scorer import Scorer

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class MeshCase:
    """Model directories, each cut over `ranks` by each of these sizes of the mesh."""

    directories: list[str]
    ranks: int
    meshes: list[dict[str, int]]
    recompute: bool = False
    lora: Lora | None = None


def spawn(target: Callable[..., None], case: MeshCase, home: Path) -> None:
    """Runs `target(rank, case, rendezvous)` on each rank; raises where one fails."""
    context = multiprocessing.get_context("spawn")
    rendezvous = str(home / "rendezvous")
    processes = [context.Process(target=target, args=(rank, case, rendezvous)) for rank in range(case.ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(900)
    for process in processes:
        process.kill()  # one that waits for ever
    assert [process.exitcode for process in processes] == [0] * case.ranks


def micro_batch(number: int, vocabulary: int, mixture: tuple[int, int, int] | None = None) -> PackedBatch:
    """Three trajectories, two of which begin alike, and a different number of tokens for each `number`.

    `mixture`: layers, experts, and how many of these each token goes to, as the batch says.
    """
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(3, vocabulary, (64,), generator=generator).tolist()
    lists = [tokens[:9] + tokens[20:26], tokens[:9] + tokens[30 : 35 + number], tokens[40 : 53 + number]]
    made = [
        Sample(tokens=item, mask=[0] * 4 + [1] * (len(item) - 4), logprobs=[-1.0] * len(item), temperature=0.8)
        for item in lists
    ]
    if mixture is not None:
        layers, experts, each = mixture
        order = torch.rand(len(made), 64, layers, experts, generator=generator).argsort(-1)[..., :each].numpy()
        order[1, :9] = order[0, :9]  # of the common beginning
        made = [
            msgspec.structs.replace(item, experts=[RoutedExperts.of(0, order[at, : len(item.tokens) - 1])])
            for at, item in enumerate(made)
        ]
    return pack(made, [(2, 9), (1, 0)])


def mixture_of(directory: Path) -> tuple[int, int, int] | None:
    """What :func:`micro_batch` needs for a model whose router is replayed."""
    content = configuration(directory)
    if content["model_type"] not in SCORING:
        return None
    count = next(content[name] for name in EXPERT_COUNTS if name in content)
    return content["num_hidden_layers"], count, content["num_experts_per_tok"]


def loss_of(scorer: Scorer, packed: PackedBatch) -> tuple[Tensor, Tensor]:
    """Scores [2 or 3, T], and a sum in which each has a weight of its own."""
    scores = scorer(packed)
    both = torch.stack([scores.new, scores.entropy, *([] if scores.balance is None else [scores.balance])])
    weights = torch.linspace(-1.0, 2.0, both.numel()).view_as(both)
    return both, (both * weights).sum()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(rank: int, case: MeshCase, rendezvous: str) -> None:
    """Scores and gradients of all micro-batches of a round, cut and whole."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=case.ranks)
    for sizes in case.meshes:
        layout = MeshLayout(ranks=case.ranks, **sizes)
        ranks = Ranks(rank, case.ranks, CPU, layout, make_meshes(CPU, layout))
        for directory in map(Path, case.directories):
            if layout.expert > 1 and "experts" not in PLANS[configuration(directory)["model_type"]].values():
                continue
            try:
                compare_model(directory, case, ranks)
            except AssertionError as error:
                raise AssertionError(f"{directory.name}, {sizes}") from error
    leave()


def spread_adapters(module: torch.nn.Module) -> None:
    """Their second matrices begin with zeros, for which the first ones have no gradient."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if ".lora_B." in name:
                local(parameter).fill_(0.1)


def compare_model(directory: Path, case: MeshCase, ranks: Ranks) -> None:
    mixture = mixture_of(directory)
    about = {"balance": mixture is not None, "replay": mixture is not None}
    torch.manual_seed(0)
    expected = Scorer(load(directory, lora=case.lora), **about)
    torch.rand(1 + ranks.rank)  # what else has drawn by then changes no adapter
    cut = load_scorer(directory, ranks, lora=case.lora, recompute=case.recompute, **about)
    for module in (expected, cut):
        spread_adapters(module)
    total, scores = torch.zeros(()), {}
    for number in range(ranks.batches):
        scores[number], loss = loss_of(expected, micro_batch(number, expected.vocabulary, mixture))
        total = total + loss
    total.backward()
    got, loss = loss_of(cut, micro_batch(ranks.batch, cut.vocabulary, mixture))
    (loss * ranks.averaged).backward()
    assert torch.allclose(got, scores[ranks.batch], rtol=1e-5, atol=1e-5), (got - scores[ranks.batch]).abs().max()
    gradients = {name: parameter.grad for name, parameter in expected.named_parameters() if parameter.grad is not None}
    assert gradients
    for name, parameter in cut.named_parameters():
        if (ours := parameter.grad) is None:
            assert name not in gradients, name
            continue
        difference = (whole(ours) - gradients[name]).norm()
        assert difference <= 1e-5 * gradients[name].norm() + 1e-7, (name, difference, gradients[name].norm())
    norm = norm_of([parameter.grad for parameter in cut.parameters() if parameter.grad is not None], ranks)
    exact = torch.nn.utils.get_total_norm(list(gradients.values()))
    assert torch.allclose(norm, exact, rtol=1e-5), (norm, exact)
