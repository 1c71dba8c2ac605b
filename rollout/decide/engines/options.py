"""Options of a vLLM server that the user names as vLLM does: ``{gpu_memory_utilization = 0.8, enforce_eager = true}``.

Pure. vLLM itself knows which exist.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from sandbox.errors import Invalid

_NAME = re.compile(r"[a-z][a-z0-9_-]*")
#: Options that the run decides, and the key that does.
OURS = {
    "model": "model",
    "served-model-name": "model",
    "host": "pool",
    "port": "pool",
    "max-model-len": "max_length",
    "max-num-seqs": "pool.slots",
    "dtype": "pool.dtype",
    "tensor-parallel-size": "pool.parallel",
    "data-parallel-size": "pool.engines",
    "logprobs-mode": "sampling",
    "scheduling-policy": "pool",
    "stream-interval": "pool",
    "weight-transfer-config": "pool.transfer",
    "worker-extension-cls": "pool.transfer",
    "enable-return-routed-experts": "objective.router_replay",
    "enable-lora": "lora",
    "max-lora-rank": "lora",
    "max-loras": "lora",
}


def check_options(options: Mapping[str, Any]) -> None:
    """Raises ValueError for a name that cannot be one, or that another key decides."""
    for name in options:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of an option of vLLM")
        if (key := OURS.get(name.replace("_", "-"))) is not None:
            raise ValueError(f"{name} follows from `{key}`")


def arguments(options: Mapping[str, Any]) -> list[str]:
    """Words of vLLM's command line.

    >>> arguments({"gpu_memory_utilization": 0.8, "enable_prefix_caching": False, "compilation_config": {"level": 3}})
    ['--gpu-memory-utilization', '0.8', '--no-enable-prefix-caching', '--compilation-config', '{"level": 3}']
    """
    words: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{flag}")
        elif isinstance(value, dict):
            words += [f"--{flag}", json.dumps(value)]
        elif isinstance(value, list):
            words += [f"--{flag}", *(str(item) for item in value)]
        elif isinstance(value, (str, int, float)):
            words += [f"--{flag}", str(value)]
        else:
            raise Invalid(f"{name} of vLLM cannot be {value!r}", hint="a number, text, true, false, a list or a table")
    return words
