"""Which GPU does what: ranks of the trainer and engine servers, each with devices of its own.

Pure. The list of GPUs comes from :mod:`rollout.engine.gpus`; their names there (UUIDs) mean the same in every process,
whatever order a library counts them in.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sandbox.errors import Invalid

BUSY = 0.1  # of a GPU's memory in use: another program has it
GIB = 1 << 30
MIG_HINT = "a MIG device is for ranks = 1, or for a server of pool.parallel = 1; `nvidia-smi -mig 0` joins them again"


class Gpu(msgspec.Struct, frozen=True):
    """One GPU of this machine, or one MIG device: a slice of a GPU. Memory in bytes.

    A process sees one MIG device at most, and NCCL does not support them: such a device is for a part that needs one.
    """

    index: int  # as nvidia-smi counts; MIG devices are counted behind the GPUs
    uuid: str
    name: str
    memory: int
    used: int
    mig: bool = False  # a MIG device; of a GPU that nvidia-smi lists: it is cut into these

    @property
    def free(self) -> bool:
        return self.used <= BUSY * self.memory


class DevicePlacement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """UUIDs of the GPUs of each part. Empty lists: the part computes on the CPU."""

    ranks: list[str] = []  # one for each rank of the trainer
    engines: list[list[str]] = []  # of each server that the run starts
    evaluation: list[str] = []  # of the server for evaluations that run while it trains


def place(
    gpus: Sequence[Gpu],
    *,
    ranks: int,
    engines: int,
    parallel: int = 1,
    taking_turns: bool = False,
    small: bool = False,
    trainer: Sequence[int] = (),
    servers: Sequence[Sequence[int]] = (),
    evaluation: bool = False,
) -> DevicePlacement:
    """Ranks first, then engines of `parallel` neighbouring GPUs of one kind. `taking_turns`: engines rest while the
    trainer steps, so both may have the same GPUs. `small`: engines take what they need and no more, so that they share
    GPUs where there are too few. `trainer`, `servers`: what the user has chosen, by index; GPUs may stand there several
    times and may be in use. `evaluation`: one more engine, for evaluations.

    Raises Invalid where a machine that has GPUs has too few of them.

    >>> pair = [Gpu(n, f"GPU-{n}", "H20", 96 * GIB, 0) for n in range(2)]
    >>> place(pair, ranks=1, engines=1)
    DevicePlacement(ranks=['GPU-0'], engines=[['GPU-1']])
    """
    if not gpus and not trainer and not servers:
        return DevicePlacement()
    named = {gpu.index: gpu for gpu in gpus}
    chosen = [_named(named, index) for index in trainer]
    groups = [[_named(named, index) for index in group] for group in servers]
    engines += evaluation
    _check(chosen, groups, ranks=ranks, engines=engines, parallel=parallel)
    free = sorted((gpu for gpu in gpus if gpu.free), key=lambda gpu: gpu.mig)
    if not trainer:
        served = [gpu for group in groups for gpu in group]
        chosen = [gpu for gpu in free if gpu not in served and (ranks == 1 or not gpu.mig)][:ranks]
    if not servers:
        left = free if taking_turns else [gpu for gpu in free if gpu not in chosen]
        groups = _neighbours(left, engines, parallel)
        if small and len(groups) < engines and (shared := left or chosen):
            groups = [[shared[number % len(shared)]] for number in range(engines)]
    if len(chosen) < ranks or len(groups) < engines:
        raise Invalid(_too_few(gpus, len(free), ranks, engines, parallel), hint=_hint(gpus, taking_turns))
    placed = [[gpu.uuid for gpu in group] for group in groups]
    last = placed.pop() if evaluation else []
    return DevicePlacement([gpu.uuid for gpu in chosen], placed, last)


def resized(
    placement: DevicePlacement, gpus: Sequence[Gpu], *, ranks: int, taking_turns: bool = False
) -> DevicePlacement:
    """The same for another number of ranks: they keep their GPUs, the first ones where there are fewer, and get free
    ones that no server has. A placement on CPUs or on another machine stays as it is.

    Raises Invalid where there are too few.

    >>> four = [Gpu(n, f"GPU-{n}", "H20", 96 * GIB, 0) for n in range(4)]
    >>> resized(DevicePlacement(["GPU-0"], [["GPU-1"]]), four, ranks=2).ranks
    ['GPU-0', 'GPU-2']
    """
    named = {gpu.uuid: gpu for gpu in gpus}
    if not placement.ranks or not named.keys() >= set(placement.ranks):
        return placement
    servers = [] if taking_turns else [*placement.engines, placement.evaluation]
    taken = {*placement.ranks, *(uuid for group in servers for uuid in group)}
    more = [gpu.uuid for gpu in gpus if gpu.free and not gpu.mig and gpu.uuid not in taken]
    chosen = [*placement.ranks, *more][:ranks]
    if len(chosen) < ranks:
        raise Invalid(
            f"{ranks} ranks do not fit: the run has {len(placement.ranks)} GPUs for ranks, and {len(more)} are free",
            hint=f"resume with {len(chosen)} ranks or fewer",
        )
    if ranks > 1 and any(named[uuid].mig for uuid in chosen):
        raise Invalid("the rank of this run has a MIG device, which computes alone", hint=MIG_HINT)
    return msgspec.structs.replace(placement, ranks=chosen)


def describe(placement: DevicePlacement, gpus: Sequence[Gpu]) -> list[tuple[str, str]]:
    """Rows for people: (part, its GPUs).

    >>> describe(DevicePlacement(["GPU-0"], [["GPU-0"]]), [Gpu(0, "GPU-0", "H20", 96 * GIB, 0)])
    [('trainer', 'GPU 0 (H20, 96 GiB)'), ('engine 0', 'GPU 0 (H20, 96 GiB), shared with the trainer')]
    """
    named = {gpu.uuid: gpu for gpu in gpus}

    def shown(uuids: Sequence[str]) -> str:
        shown_gpus = [named[uuid] for uuid in uuids if uuid in named]
        return ", ".join(f"GPU {gpu.index} ({gpu.name}, {gpu.memory // GIB} GiB)" for gpu in shown_gpus) or "CPU"

    rows = [("trainer", shown(placement.ranks))]
    parts = [(f"engine {number}", group) for number, group in enumerate(placement.engines)]
    parts += [("evaluation", placement.evaluation)] if placement.evaluation else []
    for name, group in parts:
        both = ", shared with the trainer" if set(group) & set(placement.ranks) else ""
        rows.append((name, shown(group) + both))
    return rows


def _neighbours(free: Sequence[Gpu], engines: int, parallel: int) -> list[list[Gpu]]:
    """Groups of GPUs of one kind, in their order: neighbours are linked best where links differ."""
    kinds = list(dict.fromkeys(gpu.name for gpu in free))
    groups = []
    for kind in kinds:
        same = [gpu for gpu in free if gpu.name == kind and (parallel == 1 or not gpu.mig)]
        groups += [same[at : at + parallel] for at in range(0, len(same) - parallel + 1, parallel)]
    return groups[:engines]


def _named(gpus: dict[int, Gpu], index: int) -> Gpu:
    if index not in gpus:
        there = ", ".join(str(number) for number in gpus) or "none"
        raise Invalid(f"there is no GPU {index} here", hint=f"this process may use: {there}; see `nvidia-smi -L`")
    return gpus[index]


def _check(chosen: Sequence[Gpu], groups: Sequence[Sequence[Gpu]], *, ranks: int, engines: int, parallel: int) -> None:
    if chosen and len(chosen) != ranks:
        raise Invalid(f"`gpus` names {len(chosen)} GPUs for {ranks} ranks", hint="name one GPU for each rank")
    if chosen and len({gpu.uuid for gpu in chosen}) != ranks:
        raise Invalid("`gpus` names a GPU twice: NCCL has one rank on each", hint="fewer ranks")
    together = [*(chosen if ranks > 1 else []), *(gpu for group in groups for gpu in group if parallel > 1)]
    if cut := [gpu for gpu in together if gpu.mig]:
        raise Invalid(f"GPU {cut[0].index} is a MIG device, which computes alone", hint=MIG_HINT)
    if groups and (len(groups) != engines or any(len(group) != parallel for group in groups)):
        raise Invalid(
            f"`pool.gpus` must have {engines} lists of {parallel}",
            hint="a list for each engine, and one for evaluation.background, as long as pool.parallel",
        )


def _too_few(gpus: Sequence[Gpu], free: int, ranks: int, engines: int, parallel: int) -> str:
    several = f"{engines} engines" + (f" of {parallel} each" if parallel > 1 else "")
    used = [gpu for gpu in gpus if not gpu.free]
    busy = f"; in use: {', '.join(str(gpu.index) for gpu in used)}" if used else ""
    return f"{ranks} ranks and {several} do not fit on {free} free GPUs of {len(gpus)}{busy}"


def _hint(gpus: Sequence[Gpu], taking_turns: bool) -> str:
    cut = f"; {MIG_HINT}" if any(gpu.mig for gpu in gpus) else ""
    turns = "" if taking_turns else "`handover = true` has them take turns; "
    return (
        f"fewer ranks or engines; {turns}gpus = [0] and pool.gpus = [[0]] share; CUDA_VISIBLE_DEVICES= uses none{cut}"
    )
