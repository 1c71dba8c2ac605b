"""Adapters (LoRA) as versions: small matrices next to the weights of a base model, which never changes.

Guarantee: a version of an adapter holds nothing of the base model, and says in its config which one that is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec

from sandbox.errors import Invalid, NotFound

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every name in an adapter's file


class AdapterConfig(msgspec.Struct, kw_only=True):
    """adapter_config.json, as far as we need it. Fields are those of `peft`."""

    r: int
    lora_alpha: float
    target_modules: list[str]
    base_model_name_or_path: str
    peft_type: str = "LORA"
    task_type: str = "CAUSAL_LM"
    bias: str = "none"
    inference_mode: bool = True

    @property
    def scaling(self) -> float:
        return self.lora_alpha / self.r


def is_adapter(names: Iterable[str]) -> bool:
    """Whether tensors of these names are an adapter, and nothing else."""
    return all(name.startswith(PREFIX) and ".lora_" in name for name in names)


def names_of(module: str) -> tuple[str, str]:
    """How the two matrices of this module are called in an adapter's file."""
    return f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight"


def module_of(name: str) -> str:
    """The other way."""
    return name.removeprefix(PREFIX).rpartition(".lora_")[0]


def config_of(directory: Path) -> AdapterConfig | None:
    """Of a directory that holds an adapter; None: it holds a model."""
    try:
        raw = (directory / CONFIG).read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(raw, type=AdapterConfig)
    except msgspec.MsgspecError as error:
        raise Invalid(f"{directory / CONFIG} is no adapter: {error}", hint="publish it again") from None


def base_of(directory: Path, given: Path | None = None) -> Path | None:
    """The base model of the adapter in a directory (`given`, where it lies elsewhere on this host); None: no
    adapter."""
    config = config_of(directory)
    if config is None:
        return None
    base = given or Path(config.base_model_name_or_path)
    if not (base / "config.json").exists():
        raise NotFound(
            f"the adapter in {directory} wants the base model {base}, which is not here",
            hint="copy the model that the run began with, and name it with --base",
        )
    return base


def merge(adapter: Path, directory: Path, *, base: Path | None = None) -> None:
    """Write the model that an adapter and its base are together, into a new directory; in the dtype of the base."""
    from safetensors.torch import load_file, save_file  # torch takes seconds to import

    config, base = config_of(adapter), base_of(adapter, base)
    assert config is not None and base is not None, f"{adapter} is an adapter"
    content = json.loads((base / "config.json").read_bytes())
    weights: dict = {}  # type: ignore[type-arg]
    for path in sorted(base.glob("*.safetensors")):
        weights |= load_file(path)
    pairs = load_file(adapter / WEIGHTS)
    for module in sorted({module_of(name) for name in pairs}):
        down, up = (pairs[name].float() for name in names_of(module))
        target = weights[f"{module}.weight"]
        weights[f"{module}.weight"] = (target.float() + config.scaling * (up @ down)).to(target.dtype)
    if content.get("tie_word_embeddings"):
        weights.pop("lm_head.weight", None)
    shutil.copytree(base, directory, ignore=shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json"))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
