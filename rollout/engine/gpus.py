"""The GPUs that this process may use, as nvidia-smi lists them, and giving some of them to a program.

Blocks for as long as nvidia-smi takes (a second where no persistence daemon runs).
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from rollout.decide.engines.devices import Gpu

VISIBLE = "CUDA_VISIBLE_DEVICES"
TIMEOUT = 30.0  # seconds for nvidia-smi, which initialises the driver where no other program has
MIB = 1 << 20
_FIELDS = "index,uuid,name,memory.total,memory.used"


def visible(environment: Mapping[str, str] | None = None) -> list[Gpu]:
    """All GPUs, or those that CUDA_VISIBLE_DEVICES names; none where there is no driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        done = subprocess.run(
            [tool, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:  # a driver without devices
        return []
    return allowed(listed(done.stdout), (os.environ if environment is None else environment).get(VISIBLE))


def listed(text: str) -> list[Gpu]:
    """What nvidia-smi printed. A device that says "[N/A]" of its memory, such as one that shares the host's, has 0."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines())]
    return [
        Gpu(int(row[0]), row[1], row[2], _bytes(row[3]), _bytes(row[4]))
        for row in rows
        if len(row) == 5 and row[0].isdigit()
    ]


def allowed(gpus: Sequence[Gpu], chosen: str | None) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES names, by index or by the beginning of a UUID; as CUDA, up to the first that
    is not there."""
    if chosen is None:
        return list(gpus)
    result: list[Gpu] = []
    for part in (item.strip() for item in chosen.split(",")):
        if part.startswith("MIG-"):  # a part of a GPU, which CUDA knows by this name and the list does not
            result.append(Gpu(len(result), part, "MIG", 0, 0))
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
