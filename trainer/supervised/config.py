"""Settings of a supervised run: imitation of conversations, or preferences between answers."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from rollout.decide.ranges import Count, Natural, Positive
from sandbox.errors import Invalid, NotFound
from trainer.distributed.mesh import MeshLayout
from trainer.distributed.plans import need_cuttable
from trainer.model_directory import model_content
from trainer.settings import MeshSettings, OptimiserSettings, Table, need_existing, override

RATE = {"sft": 2e-5, "dpo": 1e-6}


class PreferenceSettings(Table, frozen=True, kw_only=True):
    beta: Positive = 0.1  # how strongly the reference holds
    kind: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"  # DPO, SLiC, IPO
    smoothing: Annotated[float, msgspec.Meta(ge=0.0, lt=0.5)] = 0.0  # share of labels that are taken to be wrong


class SupervisedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Of `pagurus sft` and `pagurus dpo`. Example: ``SupervisedConfig(loss="sft", data=..., model=...)``"""

    loss: Literal["sft", "dpo"]
    data: Path  # rows: .jsonl, .json, .csv, .parquet, or a data set on disk
    model: Path  # what training begins with: a Hugging Face directory with a chat template
    held_out: Path | None = None  # rows to measure on
    held_share: Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)] = 0.05  # of `data`, where no file is named
    out: Path = Path("runs")
    seed: int = 0
    epochs: Count = 1
    steps: Natural = 0  # instead of epochs
    batch: Count = 16  # conversations, or pairs, of a step
    max_length: Count = 4096  # tokens; longer ones are left out and counted
    evaluate_every: Natural = 0  # steps between measurements; 0: at the end
    save_every: Count = 50  # steps
    optimiser: OptimiserSettings = OptimiserSettings()
    preference: PreferenceSettings = PreferenceSettings()  # of `pagurus dpo`
    template: dict[str, Any] = {}  # for the chat template
    lora: Natural = 0  # rank of adapters; they are merged into the model that is written
    ranks: Count = 1  # processes that share the steps
    mesh: MeshSettings = MeshSettings()  # what ranks share
    bf16: bool = False
    recompute: bool = False


def gather(loss: str, what: Path, options: Mapping[str, Any], settings: Sequence[str] = ()) -> SupervisedConfig:
    """A configuration of a TOML file, or of a file of rows; options overrule it, and `key=value` both."""
    content: dict[str, Any] = {"data": str(what)}
    if what.suffix == ".toml":
        content = _read(what)
    content |= options
    for text in settings:
        override(content, text)
    content = {"loss": loss, **content}
    need_existing("configuration", content, SupervisedConfig)
    content["optimiser"] = {"rate": RATE[loss], **content.get("optimiser", {})}
    if "model" not in content:
        raise Invalid("no model is named", hint="--model FOLDER, a Hugging Face directory with a chat template")
    try:
        made = msgspec.convert(content, SupervisedConfig, dec_hook=_path)
    except msgspec.ValidationError as error:
        raise Invalid(f"configuration: {error}", hint="see docs/supervised.md") from None
    layout = MeshLayout(ranks=made.ranks, **msgspec.structs.asdict(made.mesh))
    if layout.cuts:
        need_cuttable(model_content(made.model), layout, adapters=made.lora > 0)
    return made


def _read(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise NotFound(f"no configuration {path}", hint="name a .toml file or rows") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Invalid(f"{path} is no TOML: {error}", hint="see docs/supervised.md") from None
    for name in ("data", "model", "held_out", "out"):
        if isinstance(content.get(name), str):
            content[name] = str((path.parent / content[name]).resolve())
    return content


def _path(kind: type, value: object) -> object:
    if kind is Path:
        return Path(str(value))
    raise NotImplementedError(kind)
