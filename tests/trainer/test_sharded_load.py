"""Each rank reads its own shard of a model alone, whichever library defines it; what it computes does not change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollout.engine.embedded.model import ModelConfig, Qwen3, save_model
from sandbox.errors import Invalid, NotFound
from tests.support.families import build
from tests.support.meshes import MeshCase, compare, spawn
from tests.support.small_model import model
from tests.trainer.test_distributed import alone, near, plan, record
from trainer.distributed.blocks import load_scorer
from trainer.distributed.launch import Fleet
from trainer.distributed.ranks import Ranks, leave
from trainer.distributed.shard import local
from trainer.models.empty import EmptyModel
from trainer.models.load import Lora, load
from trainer.models.weight_files import INDEX, MAPPED, SINGLE, Bounds, WeightFiles
from trainer.settings import OptimiserSettings

CPU = torch.device("cpu")
LORA = Lora(rank=2, alpha=4)
WIDE = ModelConfig(
    vocab_size=4096, hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, head_dim=128, max_position_embeddings=64,
)  # fmt: skip


def split(directory: Path) -> Path:
    """Into two files and an index: transformers' way for large models, and not that of our own Qwen3."""
    tensors = load_file(directory / SINGLE)
    names = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(names.values()):
        save_file({name: tensors[name] for name, other in names.items() if other == file}, directory / file)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (directory / SINGLE).unlink()
    return directory


def complete(tensor: Tensor) -> tuple[Tensor, Bounds]:
    return tensor.detach(), [(0, size) for size in tensor.shape]


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize(
    "family", ["cohere", "gemma2", "gpt2", "gpt_oss", "lfm2", "llama dynamic", "mixtral", "phi3", "qwen3", "qwen3_moe"]
)
def test_an_empty_model_that_is_filled_is_what_transformers_loads(family: str, packs: bool, tmp_path: Path) -> None:
    directory = split(build(family, tmp_path / "base"))
    expected = load(directory, packs=packs)
    empty = EmptyModel(directory, packs=packs)
    assert all(parameter.is_meta for parameter in empty.model.parameters())
    empty.fill(empty.model, CPU, complete)
    for left, right in (
        (dict(expected.named_parameters()), dict(empty.model.named_parameters())),
        (dict(expected.named_buffers()), dict(empty.model.named_buffers())),
    ):
        assert left.keys() == right.keys()  # what is tied has one name
        assert [name for name in left if not torch.equal(left[name], right[name])] == []


def test_scores_and_gradients_are_those_of_one_rank(tmp_path: Path) -> None:
    """Of a Qwen3 by transformers, a tied and a mixed family that no plan cuts, and with adapters."""
    directories = [
        str(split(build("qwen3", tmp_path / "qwen3"))),
        str(build("gemma2", tmp_path / "gemma2")),
        str(split(build("mixtral", tmp_path / "mixtral"))),
    ]
    spawn(compare, MeshCase(directories=directories, ranks=2, meshes=[{}]), tmp_path)
    save_model(model(), tmp_path / "own")
    adapted = [*directories, str(tmp_path / "own")]
    (tmp_path / "lora").mkdir()
    spawn(compare, MeshCase(directories=adapted, ranks=2, meshes=[{}], lora=LORA), tmp_path / "lora")


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_run_goes_on_with_another_number_of_ranks(lora: Lora | None, tmp_path: Path) -> None:
    split(build("qwen3", tmp_path / "base"))
    options = {
        "settings": OptimiserSettings(rate=1e-2, budget=64, epsilon=1e-2), "steps": 3, "lora": lora
    }  # fmt: skip
    expected = alone(tmp_path, **options)
    for step, ranks in enumerate((2, 1, 2), 1):
        with Fleet(plan(tmp_path, "changing", **options), ranks=ranks) as fleet:
            record(fleet, step, since=step - 1)
            assert fleet.wait(step).saved
            weights = fleet.weights(step)
    trained = {name for name in expected if lora is None or ".lora_" in name}
    assert near(weights, {name: expected[name] for name in trained})


def test_a_rank_never_holds_much_more_than_its_shard(tmp_path: Path) -> None:
    """Also while it loads: half of 256 MB and little beyond."""
    config = WIDE.to_json() | {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}
    save_model(Qwen3(WIDE), tmp_path / "base")
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))  # no Qwen3 of ours
    save_model(model(), tmp_path / "own")
    directories = [str(split(build("qwen3", tmp_path / "small"))), str(tmp_path / "base")]
    spawn(need_little, MeshCase(directories=directories, ranks=2, meshes=[{}]), tmp_path)


def need_little(rank: int, case: MeshCase, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    ranks = Ranks(rank, 2)
    small, large = map(Path, case.directories)
    for lora in (None, LORA):
        load_scorer(small, ranks, lora=lora)  # libraries load their code once
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        before = status("VmRSS")
        scorer = load_scorer(large, ranks, lora=lora)
        shard = sum(local(parameter).nbytes for parameter in scorer.parameters())
        assert shard > 100e6
        grown = status("VmHWM") - before
        assert grown < 1.1 * shard + MAPPED + (16 << 20), (lora, grown / shard)
        del scorer
    leave()


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def test_what_no_file_fills_is_refused(tmp_path: Path) -> None:
    directory = build("llama", tmp_path / "base")
    tensors = load_file(directory / SINGLE)
    left = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}
    save_file(left, directory / SINGLE)
    with pytest.raises(Invalid, match=r"has no model\.norm\.weight"):
        EmptyModel(directory)
    save_file(tensors | {"model.norm.weight": torch.ones(3)}, directory / SINGLE)
    with pytest.raises(Invalid, match=r"model\.norm\.weight is of shape \[3\], by config\.json \[32\]"):
        EmptyModel(directory)
    (directory / SINGLE).write_bytes(b"{}")
    with pytest.raises(Invalid, match=r"model\.safetensors cannot be read"):
        EmptyModel(directory)
    (directory / SINGLE).unlink()
    torch.save(tensors, directory / "pytorch_model.bin")
    with pytest.raises(NotFound, match=r"has no model\.safetensors and no model\.safetensors\.index\.json"):
        EmptyModel(directory)


def test_tied_weights_that_differ_are_refused(tmp_path: Path) -> None:
    directory = build("gemma2", tmp_path / "base")
    tensors = load_file(directory / SINGLE)
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, directory / SINGLE)
    empty = EmptyModel(directory)
    empty.fill(empty.model, CPU, complete)
    made: Any = empty.model
    assert made.lm_head.weight is made.model.embed_tokens.weight
    save_file(tensors | {"lm_head.weight": embedding + 1}, directory / SINGLE)
    with pytest.raises(Invalid, match=r"differ, and config\.json says that they are tied"):
        EmptyModel(directory)
    content = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(content | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(Invalid, match="is quantised"):
        EmptyModel(directory)


def test_a_slice_is_read_of_the_file_that_has_it(tmp_path: Path) -> None:
    values = torch.arange(24.0).view(4, 6)
    save_file({"a": values, "b": torch.tensor(3.0)}, tmp_path / SINGLE)
    files = WeightFiles(tmp_path)
    assert torch.equal(files.read("a", [(1, 3), (2, 5)]), values[1:3, 2:5])
    assert (files.read("b").item(), files.read("b", []).item(), files.shape("a"), files.names) == (
        3.0, 3.0, (4, 6), {"a", "b"}
    )  # fmt: skip
