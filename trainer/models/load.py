"""From a Hugging Face directory to a model that the trainer can use, and back.

Guarantee: what is exported loads in transformers and vLLM and computes what was trained: adapters are merged.

Our own Qwen3 reads directories of its kind (it starts in a second and is the engine's definition); transformers reads
the rest, with our attention in the place of its own.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from rollout.engine.embedded.model import ModelConfig, Qwen3, is_plain, load_model, save_model
from rollout.weights import adapter
from sandbox import durable
from sandbox.errors import Invalid, NotFound
from trainer.models import attention

TOKENIZER: tuple[str, ...] = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "merges.txt",
)
TOKENIZER += ("vocab.json", "tokenizer.model")
NEEDED = ("config.json", "tokenizer.json", "tokenizer_config.json")
ATTENTION = re.compile(r"\.\w*attn\w*\.|\.\w*attention\w*\.")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Train small matrices next to the frozen ones (LoRA, arXiv 2106.09685), by `peft`."""

    rank: int = 16
    alpha: int = 32

    def file(self, base: Path, model: nn.Module) -> bytes:
        """What lies next to a published adapter of `model`: its config, which names its base model."""
        config = adapter.AdapterConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            target_modules=_short([name for name, module in model.named_modules() if hasattr(module, "lora_A")], model),
            base_model_name_or_path=str(base.resolve()),
        )
        return json.dumps(msgspec.to_builtins(config), indent=1).encode()


def configuration(directory: Path) -> dict[str, Any]:
    """``config.json`` of a model directory."""
    try:
        content: dict[str, Any] = json.loads((directory / "config.json").read_bytes())
    except FileNotFoundError:
        raise NotFound(
            f"{directory} is no model: it has no config.json", hint="name a Hugging Face directory"
        ) from None
    except ValueError as error:
        raise Invalid(f"{directory}/config.json is damaged: {error}", hint="download the model again") from None
    return content


def load(directory: Path, *, lora: Lora | None = None, packs: bool = True) -> nn.Module:
    """The model of a directory, in fp32, ready for gradients. Unless it `packs`, with its own attention."""
    content = configuration(directory)
    if packs and is_plain(content) and (directory / "model.safetensors").exists():
        model: nn.Module = load_model(directory)
    else:
        model = _load_transformers(directory, packs=packs)
    if lora is not None:
        _adapt(model, lora)
        adapters = dict(model.named_parameters())
        with torch.no_grad():
            for name, values in drawn_adapters(model):
                adapters[name].copy_(values)
    return _ready(model, packs=packs)


def _ready(model: nn.Module, *, packs: bool) -> nn.Module:
    """In the mode in which it is trained."""
    if not packs:
        return model.eval()  # as it is evaluated: some families draw at random in training
    _without_chance(model)
    return model.train()


def _without_chance(model: nn.Module) -> None:
    """No dropout, wherever a module has its rate, and no jitter of routers: the engine has none either."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and any(part in name for part in ("drop", "jitter")):
                setattr(module, name, 0.0)


def take(start: Path, base: Path) -> None:
    """Takes a policy into the run directory, so that nothing outside is needed from then on. Raises Invalid,
    NotFound."""
    content = configuration(start)
    for name in NEEDED:
        if not (start / name).is_file():
            raise NotFound(f"{start} has no {name}", hint="name a Hugging Face directory with its tokenizer")
    weights = [path for pattern in WEIGHTS for path in sorted(start.glob(pattern))]
    if not weights:
        raise NotFound(f"{start} has no weights: no .safetensors", hint="save the model with safetensors")
    if is_plain(content):
        try:
            ModelConfig.load(start)
        except (ValueError, TypeError) as error:
            raise Invalid(f"a run cannot begin with {start}: {error}", hint="mend its config.json") from None
    aside = base.with_name(".policy.new")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    others = [start / name for name in ("generation_config.json", *TOKENIZER) if name not in NEEDED]
    for path in (*(start / name for name in NEEDED), *weights, *(item for item in others if item.is_file())):
        shutil.copyfile(path, aside / path.name)
    shutil.rmtree(base, ignore_errors=True)
    aside.rename(base)


def empty(directory: Path, *, lora: Lora | None = None, packs: bool = True, meta: bool = False) -> nn.Module:
    """The model of a directory without its weights: on the `meta` device, or made under `trainer.estimate.ghostly`."""
    content = configuration(directory)
    place = torch.device("meta") if meta or lora is not None else nullcontext()
    if packs and is_plain(content) and (directory / "model.safetensors").exists():
        with place:
            model: nn.Module = Qwen3(ModelConfig.load(directory))
    else:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM  # seconds to import

        existing = AutoConfig.from_pretrained(directory, local_files_only=True)
        MODEL_FOR_CAUSAL_LM_MAPPING.get(type(existing), None)  # its module has constants, not of `place`
        options = _attention(packs=packs)
        with place:
            model = AutoModelForCausalLM.from_config(existing, dtype=torch.float32, **options)
    if lora is not None:
        with place:
            _adapt(model, lora)
        if not meta:
            _leave_meta(model)
    return _ready(model, packs=packs)


def _leave_meta(model: nn.Module) -> None:
    """In place: `peft` moves what it adds, which fake tensors refuse, unless they are made on the meta device."""
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None:
                new = nn.Parameter(torch.empty(old.shape, dtype=old.dtype), requires_grad=old.requires_grad)
                module._parameters[name] = made.setdefault(id(old), (old, new))[1]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def _load_transformers(directory: Path, *, packs: bool) -> nn.Module:
    from transformers import AutoModelForCausalLM  # seconds to import

    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, local_files_only=True, **_attention(packs=packs)
        )
    except (OSError, ValueError, KeyError) as error:
        raise Invalid(f"transformers cannot load {directory}: {error}", hint="try it there first") from None
    if packs:
        need_exchangeable(model)
    return model


def _attention(*, packs: bool) -> dict[str, str]:
    """What transformers is to make a model with."""
    attention.register()
    return {"attn_implementation": attention.NAME} if packs else {}


def need_exchangeable(model: nn.Module) -> None:
    """Raises Invalid for a model of transformers that cannot run with our attention."""
    if not getattr(model, "_supports_attention_backend", False):
        raise Invalid(
            f"{type(model).__name__} has attention of its own",
            hint="use a model whose attention transformers can exchange",
        )


def _adapt(model: nn.Module, lora: Lora) -> None:
    """Adds adapters to the matrices and freezes everything else, in place."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise Invalid("LoRA needs peft", hint="pip install 'pagurus-rl[lora]'") from None
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    chosen = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=adaptable(model), lora_dropout=0.0)
    try:
        inject_adapter_in_model(chosen, model)
    except ValueError as error:
        raise Invalid(f"peft cannot adapt {type(model).__name__}: {error}", hint="train it without lora") from None


def drawn_adapters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Complete values that adapters begin with, by name: as `peft` draws them, but from a stream of their own. The seed
    of the process alone decides it, so that ranks that hold parts of them agree with one that holds all."""
    stream = torch.Generator().manual_seed(torch.initial_seed())
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            values = torch.empty(parameter.shape)
            nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=stream)
            yield name, values
        elif ".lora_B." in name:
            yield name, torch.zeros(parameter.shape)


def plain_name(name: str) -> str:
    """Of a weight in the model without adapters."""
    return name.replace(".base_layer.", ".")


def adaptable(model: nn.Module) -> list[str]:
    """The linear layers that get adapters: all but the head; of a mixture of experts those of attention alone.

    Engines compute experts as one tensor, and `peft` takes names such as ``gate_proj`` for theirs wherever they stand.
    Raises Invalid where there are none.
    """
    embeddings: Callable[[], nn.Module | None] = getattr(model, "get_output_embeddings", lambda: None)
    head = embeddings() or getattr(model, "lm_head", None)
    mixed = any(name.endswith(".experts") for name, _ in model.named_modules())
    result = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and not (mixed and not ATTENTION.search(name))
    ]
    if not result:
        raise Invalid(
            f"{type(model).__name__} has no linear layer that adapters can go beside", hint="train it without lora"
        )
    return result


def _short(names: Sequence[str], model: nn.Module) -> list[str]:
    """Last parts of the names where all layers that end so are meant, as others write them; else the whole names."""
    ends = {name.rpartition(".")[2] for name in names}
    others = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)} - set(names)
    clashes = {name.rpartition(".")[2] for name in others if ".base_layer" not in name and ".lora_" not in name} & ends
    return sorted(ends - clashes) + sorted(name for name in names if name.rpartition(".")[2] in clashes)


def merged(model: nn.Module, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The weights under the names of the model without adapters, which are added to what they adapt.

    `tensors`: the state of the model where it is not in the module itself (gathered from ranks).
    """
    state = {name: tensor.detach() for name, tensor in (tensors or model.state_dict()).items()}
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    result = {plain_name(name): tensor for name, tensor in state.items() if ".lora_" not in name}
    for name, module in layers.items():
        scaling: float = module.scaling["default"]
        down, up = (state[f"{name}.lora_{side}.default.weight"] for side in "AB")
        result[f"{name}.weight"] = result[f"{name}.weight"] + scaling * (up.float() @ down.float())
    return result


def published(model: nn.Module) -> dict[str, Tensor]:
    """As engines are given them: what is tied has one name.

    Where adapters are trained: these alone, under the names that `peft` gives them in a file.
    """
    if any(hasattr(module, "lora_A") for module in model.modules()):
        return {
            adapter.PREFIX + name.replace(".default.", "."): tensor.detach()
            for name, tensor in model.state_dict().items()
            if ".lora_" in name
        }
    state = merged(model)
    if model.config.tie_word_embeddings:  # type: ignore[union-attr]
        state.pop("lm_head.weight", None)
    return state


def export(model: nn.Module, directory: Path, *, base: Path, tensors: Mapping[str, Tensor] | None = None) -> Path:
    """Writes a Hugging Face directory that transformers and vLLM load, synced. `base`: where the tokenizer comes
    from."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER:
        if (base / name).exists():
            shutil.copyfile(base / name, directory / name)
    if isinstance(model, Qwen3):
        save_model(model, directory, tensors=merged(model, tensors))
    else:
        model.save_pretrained(directory, state_dict=merged(model, tensors))  # type: ignore[operator]
        for path in directory.iterdir():
            durable.sync(path)
    return directory
