"""Whether what is placed on each GPU fits into its memory, before anything starts.

Pure. Guarantee: only what cannot fit is refused. A part's need is a lower bound: activations, caches of keys and
values, and what CUDA itself takes come on top of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from rollout.decide.engines.devices import GIB, DevicePlacement, Gpu
from sandbox.errors import Invalid


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What a part takes at least of each of its GPUs, in bytes."""

    rank: int  # weights, gradients and optimiser of one rank
    server: int  # weights of an engine server
    reserved: float = 0.0  # share of a GPU that a server takes when it starts and never gives back, as vLLM does

    def of_server(self, gpu: Gpu) -> int:
        return max(self.server, int(self.reserved * gpu.memory))


def need_memory(
    placement: DevicePlacement, gpus: Sequence[Gpu], demand: Demand, *, ranks: int = 1, parallel: int = 1
) -> None:
    """Refuses a placement of `ranks` ranks and of servers on `parallel` GPUs each that cannot fit. GPUs whose memory
    is not known are not judged.

    Raises Invalid with the first GPU that has too little, and what to change.

    >>> one = [Gpu(0, "GPU-0", "H20", 96 * GIB, 0)]
    >>> need_memory(DevicePlacement(["GPU-0"]), one, Demand(rank=90 * GIB, server=0))
    """
    for gpu, trainers, servers in _used(placement, gpus):
        limit = int((demand.reserved or 1.0) * gpu.memory)
        if servers and demand.server > limit:
            raise Invalid(
                f"the weights of a server take {_gib(demand.server)} of each of its GPUs, and it may use "
                f"{_gib(limit)} of {_name(gpu)}",
                hint=f"pool.parallel = {_power_of_two(demand.server * parallel / limit)} or more, or a smaller model",
            )
        if trainers * demand.rank > gpu.memory:
            needed_ranks = math.ceil(demand.rank * ranks / gpu.memory)
            raise Invalid(
                f"weights, gradients and optimiser of a rank take {_gib(demand.rank)}, more than {_name(gpu)} has",
                hint=f"ranks = {needed_ranks} or more, offload = true, or lora = 16",
            )
        if trainers * demand.rank + servers * demand.of_server(gpu) > gpu.memory:
            raise Invalid(_shared(gpu, trainers, servers, demand), hint=_hint(gpu, trainers, servers, demand))


def describe_memory(placement: DevicePlacement, gpus: Sequence[Gpu], demand: Demand) -> list[tuple[str, str]]:
    """Rows for people: (GPU, what its parts take at least).

    >>> describe_memory(DevicePlacement(["GPU-0"]), [Gpu(0, "GPU-0", "H20", 96 * GIB, 0)], Demand(rank=GIB, server=0))
    [('memory of GPU 0', 'at least 1.0 GiB of 96.0 GiB')]
    """
    return [
        (
            f"memory of GPU {gpu.index}",
            f"at least {_gib(trainers * demand.rank + servers * demand.of_server(gpu))} of {_gib(gpu.memory)}",
        )
        for gpu, trainers, servers in _used(placement, gpus)
    ]


def _used(placement: DevicePlacement, gpus: Sequence[Gpu]) -> list[tuple[Gpu, int, int]]:
    """GPUs of known memory that a part has, each with its ranks and its servers."""
    groups = [*placement.engines, placement.evaluation]
    counted = [(gpu, placement.ranks.count(gpu.uuid), sum(gpu.uuid in group for group in groups)) for gpu in gpus]
    return [(gpu, ranks, servers) for gpu, ranks, servers in counted if gpu.memory and ranks + servers]


def _shared(gpu: Gpu, trainers: int, servers: int, demand: Demand) -> str:
    parts = [f"{trainers} ranks take {_gib(trainers * demand.rank)}"] if trainers else []
    parts += [f"{servers} servers {_gib(servers * demand.of_server(gpu))}"]
    return f"what shares {_name(gpu)} does not fit: {', '.join(parts)}"


def _hint(gpu: Gpu, trainers: int, servers: int, demand: Demand) -> str:
    own = "give each GPUs of its own, with `gpus` and `pool.gpus`"
    share = math.floor(100 * (gpu.memory - trainers * demand.rank) / gpu.memory / servers) / 100
    if demand.reserved and 0 < share < demand.reserved and demand.server <= share * gpu.memory:
        return (
            f"pool.options = {{gpu_memory_utilization = {share:.2f}}} or less, as a server keeps its memory while it "
            f"rests; or {own}"
        )
    return f"{own}; or more ranks, offload = true, lora = 16"


def _power_of_two(quotient: float) -> int:
    return 1 << max(0, math.ceil(math.log2(quotient)))


def _name(gpu: Gpu) -> str:
    return f"GPU {gpu.index} ({gpu.name}, {gpu.memory // GIB} GiB)"


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
