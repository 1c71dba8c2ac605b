"""A published version as a model directory of its own."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from pathlib import Path

from rollout.weights import adapter
from rollout.weights.mirror import STATE, Mirror
from rollout.weights.puller import Puller
from rollout.weights.source import DirectorySource
from rollout.weights.store import VersionStore, is_store
from sandbox.errors import Conflict, NotFound

READER = "export"
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}  # safetensors' names and torch's


def store_of(run: Path) -> VersionStore:
    """The versions of a run directory, or those in a directory itself."""
    for directory in (run / "weights", run):
        if is_store(directory):
            return VersionStore(directory)
    raise NotFound(f"{run} has no published weights", hint="name a run directory, such as runs/latest")


def put_together(store: VersionStore, directory: Path, version: int | None = None) -> Mirror:
    """A version (None: the newest), every piece checked."""

    async def pull() -> Mirror:
        puller = Puller(DirectorySource(store), Mirror(directory), name=READER)
        try:
            await puller.pull(version)
        finally:
            await puller.close()
            store.release(READER)
        return puller.mirror

    return asyncio.run(pull())


def export(run: Path, directory: Path, version: int | None = None) -> int:
    """A version of a run's weights as a Hugging Face directory; which one it is. An adapter is added to its base model.

    Raises NotFound, Conflict."""
    store = store_of(run)
    if directory.exists():
        raise Conflict(f"{directory} exists", hint="name a new directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as place:
        aside = Path(place) / "model"
        mirror = put_together(store, aside, version)
        (aside / STATE).unlink()
        if adapter.config_of(aside) is None:
            _declare(aside / "config.json", Counter(mirror.dtypes().values()).most_common(1)[0][0])
            aside.rename(directory)
        else:
            adapter.merge(aside, directory)
    assert mirror.version is not None, "it was pulled"
    return mirror.version


def _declare(path: Path, dtype: str) -> None:
    """Has a config say what its weights are: by it transformers and vLLM choose what they compute in, and the policy
    that a run began with may have said otherwise."""
    if dtype not in DTYPES or not path.exists():
        return
    content = json.loads(path.read_bytes())
    tables = [
        content,
        *(content[name] for name in ("text_config", "llm_config") if isinstance(content.get(name), dict)),
    ]
    for table in tables:
        table |= {key: DTYPES[dtype] for key in ("dtype", "torch_dtype") if key in table}
    path.write_text(json.dumps(content, indent=2) + "\n")
