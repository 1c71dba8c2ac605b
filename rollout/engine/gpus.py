"""The GPUs that this process may use, as nvidia-smi lists them, and giving some of them to a program.

Blocks for as long as nvidia-smi takes (a second where no persistence daemon runs).
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from rollout.decide.engines.devices import Gpu

VISIBLE = "CUDA_VISIBLE_DEVICES"
TIMEOUT = 30.0  # seconds for nvidia-smi, which initialises the driver where no other program has
MIB = 1 << 20
GIB = 1 << 30
_FIELDS = "index,uuid,name,memory.total,memory.used,mig.mode.current"
# Lines of `nvidia-smi -L`, where MIG devices follow their GPU.
_GPU = re.compile(r"GPU \d+: (?P<name>.+) \(UUID: (?P<uuid>GPU-[^)]+)\)")
_MIG = re.compile(r"\s+MIG (?P<profile>\S+)\s+Device\s+\d+: \(UUID: (?P<uuid>MIG-[^)]+)\)")
_PROFILE_MEMORY = re.compile(r"\.(\d+)gb")  # of 1g.10gb


def visible(environment: Mapping[str, str] | None = None) -> list[Gpu]:
    """All GPUs, or those that CUDA_VISIBLE_DEVICES names; none where there is no driver. A GPU in MIG mode is not among
    them, but its MIG devices are: CUDA uses those only."""
    existing = listed(_output(f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"))
    chosen = allowed(existing, (os.environ if environment is None else environment).get(VISIBLE))
    if not any(gpu.mig for gpu in chosen):
        return chosen
    return divided(chosen, mig_devices(_output("-L"), first=1 + max((gpu.index for gpu in existing), default=-1)))


def _output(*arguments: str) -> str:
    """What nvidia-smi prints; nothing where there is none, or a driver without devices."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout


def listed(text: str) -> list[Gpu]:
    """What nvidia-smi printed. A device that says "[N/A]" of its memory, such as one that shares the host's, has 0."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines())]
    return [
        Gpu(int(row[0]), row[1], row[2], _bytes(row[3]), _bytes(row[4]), mig=row[5] == "Enabled")
        for row in rows
        if len(row) == 6 and row[0].isdigit()
    ]


def mig_devices(text: str, *, first: int) -> dict[str, list[Gpu]]:
    """What ``nvidia-smi -L`` printed: the MIG devices of each GPU, by its UUID, counted from `first` on. Their memory
    is what the profile's name says, of which the driver keeps some; whether a program has them is not printed."""
    result: dict[str, list[Gpu]] = {}
    name, devices = "", []
    for line in text.splitlines():
        if hit := _GPU.match(line):
            name, devices = hit["name"], result.setdefault(hit["uuid"], [])
        elif hit := _MIG.match(line):
            size = _PROFILE_MEMORY.search(hit["profile"])
            memory = int(size[1]) * GIB if size else 0
            devices.append(Gpu(first, hit["uuid"], f"{name} MIG {hit['profile']}", memory, 0, mig=True))
            first += 1
    return result


def divided(gpus: Sequence[Gpu], devices: Mapping[str, Sequence[Gpu]]) -> list[Gpu]:
    """The same with the MIG devices of each GPU in its place; of those that were named by UUID, what is known."""
    named = {item.uuid: item for items in devices.values() for item in items}
    result: list[Gpu] = []
    for gpu in gpus:
        cut = gpu.mig and not gpu.uuid.startswith("MIG-")
        result += devices.get(gpu.uuid, ()) if cut else [named.get(gpu.uuid, gpu)]
    return result


def allowed(gpus: Sequence[Gpu], chosen: str | None) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES names, by index or by the beginning of a UUID; as CUDA, up to the first that
    is not there."""
    if chosen is None:
        return list(gpus)
    result: list[Gpu] = []
    for part in (item.strip() for item in chosen.split(",")):
        if part.startswith("MIG-"):  # a part of a GPU, which CUDA knows by this name and the list does not
            result.append(Gpu(len(result), part, "MIG", 0, 0, mig=True))
            continue
        matching = [gpu for gpu in gpus if part and (str(gpu.index) == part or gpu.uuid.startswith(part))]
        if len(matching) != 1:
            break
        result += matching
    return result


def environment(uuids: Sequence[str], existing: Sequence[Gpu]) -> dict[str, str]:
    """For a program that is to use these GPUs. Nothing where they are not here: the placement, such as
    Ray, has chosen."""
    present = {gpu.uuid for gpu in existing}
    return {VISIBLE: ",".join(uuids)} if uuids and present.issuperset(uuids) else {}


def _bytes(mebibytes: str) -> int:
    return int(mebibytes) * MIB if mebibytes.isdigit() else 0
