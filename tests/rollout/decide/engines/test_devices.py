"""Which GPU does what, and what a vLLM server is told of it."""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.decide.engines.devices import GIB, DevicePlacement, Gpu, describe, place, resized
from rollout.decide.engines.options import arguments, check_options
from rollout.engine import gpus
from rollout.engine.launch import embedded, on_gpus, vllm
from sandbox.errors import Invalid

SMI = """0, GPU-aa11, NVIDIA H800, 81559, 4, Disabled
1, GPU-bb22, NVIDIA H800, 81559, 70000, Disabled
2, GPU-cc33, NVIDIA GB10, [N/A], [N/A], [N/A]
"""
SMI_MIG = """0, GPU-aa11, NVIDIA H100 80GB HBM3, 81559, 4, Disabled
1, GPU-bb22, NVIDIA H100 80GB HBM3, 81559, 4, Enabled
2, GPU-cc33, NVIDIA H100 80GB HBM3, 81559, 4, Enabled
"""
SMI_LIST = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aa11)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bb22)
  MIG 3g.40gb     Device  0: (UUID: MIG-d1)
  MIG 1g.10gb+me  Device  1: (UUID: MIG-d2)
GPU 2: NVIDIA H100 80GB HBM3 (UUID: GPU-cc33)
"""


def machine(count: int, *, busy: tuple[int, ...] = (), kinds: str = "") -> list[Gpu]:
    kinds = kinds or "a" * count
    return [Gpu(n, f"GPU-{n}", kinds[n], 80 * GIB, 40 * GIB if n in busy else 0) for n in range(count)]


def indexes(placement: DevicePlacement) -> tuple[list[int], list[list[int]]]:
    number = {f"GPU-{n}": n for n in range(64)}
    return [number[item] for item in placement.ranks], [[number[item] for item in group] for group in placement.engines]


def test_an_evaluation_has_gpus_of_its_own() -> None:
    placement = place(machine(4), ranks=1, engines=2, evaluation=True)
    assert (indexes(placement), placement.evaluation) == (([0], [[1], [2]]), ["GPU-3"])
    assert describe(placement, machine(4))[-1] == ("evaluation", "GPU 3 (a, 80 GiB)")
    with pytest.raises(Invalid, match="3 engines do not fit"):
        place(machine(3), ranks=1, engines=2, evaluation=True)


@pytest.mark.parametrize(
    ("gpus", "options", "ranks", "engines"),
    [
        (machine(0), {"ranks": 2, "engines": 4}, [], []),
        (machine(5), {"ranks": 1, "engines": 4}, [0], [[1], [2], [3], [4]]),
        (machine(8), {"ranks": 4, "engines": 2, "parallel": 2}, [0, 1, 2, 3], [[4, 5], [6, 7]]),
        (machine(4, busy=(0,)), {"ranks": 1, "engines": 2}, [1], [[2], [3]]),
        (machine(2), {"ranks": 2, "engines": 2, "taking_turns": True}, [0, 1], [[0], [1]]),
        (machine(1), {"ranks": 1, "engines": 2, "small": True}, [0], [[0], [0]]),
        (machine(3), {"ranks": 1, "engines": 3, "small": True}, [0], [[1], [2], [1]]),
        (machine(4, kinds="aabb"), {"ranks": 1, "engines": 1, "parallel": 2}, [0], [[2, 3]]),
        (machine(2), {"ranks": 1, "engines": 1, "trainer": [1]}, [1], [[0]]),
        (machine(2), {"ranks": 1, "engines": 1, "servers": [[0]]}, [1], [[0]]),
        (machine(1, busy=(0,)), {"ranks": 1, "engines": 1, "trainer": [0], "servers": [[0]]}, [0], [[0]]),
        (machine(2), {"ranks": 2, "engines": 0}, [0, 1], []),
    ],
)
def test_placement(gpus: list[Gpu], options: dict, ranks: list[int], engines: list[list[int]]) -> None:
    assert indexes(place(gpus, **options)) == (ranks, engines)


@pytest.mark.parametrize(
    ("gpus", "options", "says"),
    [
        (machine(4), {"ranks": 1, "engines": 4}, "1 ranks and 4 engines do not fit on 4 free GPUs of 4"),
        (machine(4, busy=(1, 2)), {"ranks": 1, "engines": 2}, "2 free GPUs of 4; in use: 1, 2"),
        (machine(3), {"ranks": 1, "engines": 1, "parallel": 3}, "1 engines of 3 each do not fit"),
        (machine(1), {"ranks": 2, "engines": 1, "small": True}, "do not fit"),
        (machine(2), {"ranks": 1, "engines": 1, "trainer": [7]}, "no GPU 7"),
        ([], {"ranks": 1, "engines": 1, "trainer": [0]}, "no GPU 0"),
        (machine(2), {"ranks": 2, "engines": 0, "trainer": [0]}, "1 GPUs for 2 ranks"),
        (machine(2), {"ranks": 2, "engines": 0, "trainer": [0, 0]}, "twice"),
        (machine(4), {"ranks": 1, "engines": 1, "parallel": 2, "servers": [[1]]}, "1 lists of 2"),
    ],
)
def test_too_few_or_wrong(gpus: list[Gpu], options: dict, says: str) -> None:
    with pytest.raises(Invalid, match=says):
        place(gpus, **options)


@given(
    busy=st.lists(st.booleans(), min_size=1, max_size=16),
    kinds=st.text("ab", min_size=16, max_size=16),
    ranks=st.integers(1, 6),
    engines=st.integers(0, 6),
    parallel=st.integers(1, 4),
)
def test_nobody_shares_unless_it_is_said(busy: list[bool], kinds: str, ranks: int, engines: int, parallel: int) -> None:
    there = machine(len(busy), busy=tuple(n for n, of in enumerate(busy) if of), kinds=kinds)
    try:
        placement = place(there, ranks=ranks, engines=engines, parallel=parallel)
    except Invalid:
        return
    used = [*placement.ranks, *chain.from_iterable(placement.engines)]
    named = {gpu.uuid: gpu for gpu in there}
    assert len(used) == len(set(used)) == ranks + engines * parallel
    assert all(named[uuid].free for uuid in used)
    assert all(len({named[uuid].name for uuid in group}) == 1 for group in placement.engines)
    assert len(describe(placement, there)) == 1 + engines


def test_what_nvidia_smi_prints() -> None:
    listed = gpus.listed(SMI)
    assert [gpu.index for gpu in listed] == [0, 1, 2]
    assert (listed[0].name, listed[0].memory, listed[0].free) == ("NVIDIA H800", 81559 << 20, True)
    assert not listed[1].free and listed[2].memory == 0 and listed[2].free


@pytest.mark.parametrize(
    ("chosen", "indexes"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("1", [1]),
        ("2,0", [2, 0]),
        ("GPU-bb", [1]),
        ("0,9,1", [0]),
        ("-1", []),
        ("G", []),
        ("MIG-7,1", [0, 1]),
    ],
)
def test_only_what_cuda_may_see(chosen: str | None, indexes: list[int]) -> None:
    assert [gpu.index for gpu in gpus.allowed(gpus.listed(SMI), chosen)] == indexes


@pytest.mark.parametrize(("script", "count"), [(f"cat <<'E'\n{SMI}E", 3), ("echo no devices; exit 6", 0)])
def test_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, count: int) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    assert len(gpus.visible()) == count
    monkeypatch.setenv(gpus.VISIBLE, "")
    assert gpus.visible() == []


@pytest.mark.parametrize(
    ("chosen", "uuids"),
    [
        (None, ["GPU-aa11", "MIG-d1", "MIG-d2"]),
        ("1", ["MIG-d1", "MIG-d2"]),
        ("2", []),
        ("MIG-d2,0", ["MIG-d2", "GPU-aa11"]),
        ("MIG-of-an-older-driver", ["MIG-of-an-older-driver"]),
    ],
)
def test_a_gpu_in_mig_mode_is_its_mig_devices(
    chosen: str | None, uuids: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nif [ $1 = -L ]; then cat <<'E'\n{SMI_LIST}E\nelse cat <<'E'\n{SMI_MIG}E\nfi\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    seen = gpus.visible({} if chosen is None else {gpus.VISIBLE: chosen})
    assert [gpu.uuid for gpu in seen] == uuids
    sizes = {gpu.uuid: (gpu.index, gpu.memory // GIB, gpu.mig) for gpu in seen}
    assert sizes.get("MIG-d1", (3, 40, True)) == (3, 40, True)
    assert sizes.get("MIG-d2", (4, 10, True)) == (4, 10, True)
    assert gpus.environment(["MIG-d1"], seen) == ({gpus.VISIBLE: "MIG-d1"} if "MIG-d1" in uuids else {})


def test_mig_devices_are_for_parts_that_need_one() -> None:
    cut = [Gpu(9 - n, f"GPU-{9 - n}", "slice", 10 * GIB, 0, mig=True) for n in range(3)]
    assert indexes(place([*cut, *machine(1)], ranks=1, engines=2)) == ([0], [[9], [8]])
    assert indexes(place([*cut, *machine(2)], ranks=2, engines=1)) == ([0, 1], [[9]])
    assert indexes(place([*cut, *machine(3)], ranks=1, engines=1, parallel=2)) == ([0], [[1, 2]])
    assert indexes(place(cut, ranks=1, engines=2, trainer=[8], servers=[[7], [9]])) == ([8], [[7], [9]])
    with pytest.raises(Invalid, match=r"2 ranks and 1 engines do not fit.*a MIG device is for ranks = 1"):
        place(cut, ranks=2, engines=1)
    with pytest.raises(Invalid, match=r"1 engines of 2 each do not fit.*a MIG device is for"):
        place([*cut, *machine(1)], ranks=1, engines=1, parallel=2)
    with pytest.raises(Invalid, match="GPU 8 is a MIG device, which computes alone"):
        place(cut, ranks=2, engines=1, trainer=[8, 9])
    with pytest.raises(Invalid, match="GPU 9 is a MIG device, which computes alone"):
        place([*cut, *machine(1)], ranks=1, engines=1, parallel=2, servers=[[9, 8]])


def test_another_number_of_ranks_keeps_gpus_and_takes_free_ones() -> None:
    first = place(machine(5), ranks=2, engines=1)
    assert indexes(resized(first, machine(5, busy=(0, 1, 2, 3)), ranks=3)) == ([0, 1, 4], [[2]])
    assert indexes(resized(first, machine(5, busy=(0, 1, 2)), ranks=1)) == ([0], [[2]])
    shared = place(machine(2), ranks=1, engines=2, taking_turns=True)
    assert indexes(resized(shared, machine(2), ranks=2, taking_turns=True)) == ([0, 1], [[0], [1]])
    elsewhere = DevicePlacement(["GPU-of-another-machine"])
    assert resized(elsewhere, machine(5), ranks=2) == elsewhere
    assert resized(DevicePlacement(), machine(5), ranks=2) == DevicePlacement()
    with pytest.raises(Invalid, match=r"5 ranks do not fit: the run has 2 GPUs for ranks, and 1 are free.*3 ranks or"):
        resized(first, machine(5, busy=(3,)), ranks=5)
    cut = [Gpu(n, f"GPU-{n}", "slice", 10 * GIB, 0, mig=True) for n in range(3)]
    with pytest.raises(Invalid, match="a MIG device"):
        resized(DevicePlacement(["GPU-0"], [["GPU-1"]]), [*cut, *machine(5)[3:]], ranks=2)


def test_a_server_has_its_own_gpus() -> None:
    here = gpus.listed(SMI)
    launch = on_gpus(embedded(), gpus.environment(["GPU-aa11"], here))
    assert launch.command(Path("model"), 1).env[gpus.VISIBLE] == "GPU-aa11"
    assert launch.standby is not None and launch.standby.env[gpus.VISIBLE] == "GPU-aa11"
    assert gpus.environment(["GPU-of-another-machine"], here) == gpus.environment([], here) == {}


@pytest.mark.parametrize(
    ("options", "there", "not_there"),
    [
        ({}, ["--enforce-eager", "--dtype float32"], []),
        ({"gpu": True}, ["--dtype bfloat16"], ["--enforce-eager"]),
        ({"gpu": True, "dtype": "float32"}, ["--dtype float32"], []),
        ({"options": {"gpu_memory_utilization": 0.8}}, ["--gpu-memory-utilization 0.8"], []),
        ({"parallel": 4}, ["--tensor-parallel-size 4"], ["UniProcExecutor"]),
    ],
)
def test_what_vllm_is_told(options: dict, there: list[str], not_there: list[str]) -> None:
    words = " ".join(vllm(python=Path(sys.executable), **options).command(Path("model"), 1).argv)
    assert all(part in words for part in there) and not any(part in words for part in not_there)


def test_options_that_the_run_decides_are_refused() -> None:
    for name, key in (("max_model_len", "max_length"), ("tensor-parallel-size", "pool.parallel")):
        with pytest.raises(ValueError, match=key):
            check_options({name: 1})
    with pytest.raises(ValueError, match="no name"):
        check_options({"--port 1": 1})
    assert arguments({"enable_expert_parallel": True, "served": ["a", "b"]}) == [
        "--enable-expert-parallel",
        "--served",
        "a",
        "b",
    ]
    with pytest.raises(Invalid, match="cannot be None"):
        arguments({"block_size": None})
