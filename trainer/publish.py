"""Publication of weights: a complete, sealed, versioned folder appears in one rename, or does not appear.

Owns: `<run>/weights/vNNNNNN/`. Does not own: telling the engine (rollout), the seal's format (rollout.engine.manifest).
Guarantee: a folder named vNNNNNN is complete and its manifest holds the hash of each of its files; the version
that an engine serves is among the ones kept.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from rollout.engine.manifest import NAME as MANIFEST
from rollout.engine.manifest import verify_folder, write_manifest
from sandbox import durable
from sandbox.errors import Conflict, Invalid, NotFound
from trainer.models.load import export


def path_of(weights: Path, version: int) -> Path:
    return weights / f"v{version:06d}"


def publish(model: nn.Module, weights: Path, version: int, *, tokenizer: Path, keep: int = 3) -> Path:
    """Writes version `version` below `weights`, collects all but the last `keep`; returns its folder.

    `tokenizer` is a folder with the tokenizer's files; they travel with every version so that it loads alone.
    """
    need_finite(model.state_dict())
    weights.mkdir(parents=True, exist_ok=True)
    target = path_of(weights, version)
    aside = weights / f".{target.name}.new"
    shutil.rmtree(aside, ignore_errors=True)  # what an earlier crash left
    aside.mkdir()
    export(model, aside, base=tokenizer, untie=True)  # the head is untied for vLLM's reload, see save_model
    write_manifest(aside, version)
    if _same(aside, target):  # a resumed trainer publishes its version again, which is being served
        shutil.rmtree(aside)
        return target
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)
    durable.sync(weights)
    for old in versions(weights)[:-keep]:
        shutil.rmtree(path_of(weights, old), ignore_errors=True)
    return target


def _same(left: Path, right: Path) -> bool:
    """Whether two sealed folders hold the same files, by their seals."""
    return (right / MANIFEST).exists() and (left / MANIFEST).read_bytes() == (right / MANIFEST).read_bytes()


def need_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise Invalid, naming the first, if a weight is no number: such weights are neither saved nor published."""
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise Invalid(
                f"weight {name} is not finite after this step",
                remedy="go on from the last saved step with a lower learning rate",
            )


def export_newest(run: Path, folder: Path) -> int:
    """Copies the newest published version of a run to `folder`, its seal checked and left behind; which one it is."""
    found = versions(run / "weights")
    if not found:
        raise NotFound(f"{run} has published no weights", remedy="name a folder below runs/")
    if folder.exists():
        raise Conflict(f"{folder} exists", remedy="name a new folder")
    source = path_of(run / "weights", found[-1])
    verify_folder(source, found[-1])
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(MANIFEST))
    return found[-1]


def versions(weights: Path) -> list[int]:
    """Published versions, oldest first."""
    return sorted(int(path.name[1:]) for path in weights.glob("v[0-9]*"))
