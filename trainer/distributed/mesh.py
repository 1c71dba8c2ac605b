"""`MeshLayout`: how many ways the ranks of a trainer share its work, and each rank's place in that. Pure.

Guarantee: sizes that do not make up the number of ranks, or that a model cannot be cut by, are refused before a rank
starts.

::

    rank = ((copy * shards + shard) * context + part) * tensor + slice

    weights of a layer   replicate x (shards x context) x tensor        sharded by FSDP2 over the middle one
    experts of a layer   replicate x (what is left)     x expert        the same ranks, cut otherwise
    a micro-batch        (replicate x shards) x context x tensor        the first one says which
"""

from __future__ import annotations

from dataclasses import dataclass

from sandbox.errors import Invalid


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshLayout:
    """Example: ``MeshLayout(ranks=8, tensor=2, context=2).batches == 2``."""

    ranks: int = 1
    replicate: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        product = self.replicate * self.context * self.tensor
        if self.ranks % product:
            raise Invalid(
                f"mesh: replicate {self.replicate} x context {self.context} x tensor {self.tensor} does not divide "
                f"{self.ranks} ranks",
                hint=f"set ranks to a multiple of {product}",
            )
        if self.ranks // self.replicate % self.expert:
            raise Invalid(
                f"mesh: expert {self.expert} does not divide the {self.ranks // self.replicate} ranks of a copy",
                hint="set mesh.expert to a divisor of ranks / mesh.replicate",
            )

    @property
    def cuts(self) -> bool:
        """Whether a model needs a plan for it."""
        return self.tensor > 1 or self.expert > 1

    @property
    def shards(self) -> int:
        """Ranks that share a copy of the weights, and compute different micro-batches."""
        return self.ranks // (self.replicate * self.context * self.tensor)

    @property
    def batches(self) -> int:
        """Micro-batches that are computed at the same time."""
        return self.replicate * self.shards

    @property
    def averaged(self) -> int:
        """Ranks over whose gradients sharding takes the mean."""
        return self.batches * self.context

    @property
    def dense_sizes(self) -> tuple[int, int, int]:
        return self.replicate, self.shards * self.context, self.tensor

    @property
    def expert_sizes(self) -> tuple[int, int, int]:
        return self.replicate, self.ranks // self.replicate // self.expert, self.expert

    @property
    def batch_sizes(self) -> tuple[int, int, int]:
        return self.batches, self.context, self.tensor

    def batch_of(self, rank: int) -> int:
        """The micro-batch of a round that this rank works on."""
        return rank // (self.context * self.tensor)


def fitting_hosts(limit: int, ranks: int, **sizes: int) -> int:
    """How many hosts of so many ranks each make up a mesh of these sizes, at most `limit`; 0: none.

    >>> fitting_hosts(3, 2, tensor=4), fitting_hosts(1, 2, tensor=4)
    (2, 0)
    """
    for count in range(limit, 0, -1):
        try:
            MeshLayout(ranks=ranks * count, **sizes)
        except Invalid:
            continue
        return count
    return 0
