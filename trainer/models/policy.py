"""A policy directory in the Hugging Face layout, made from scratch: Qwen3 weights, tokenizer, configs.

Guarantee: `transformers`, vLLM and the embedded engine load the same directory; every byte string has tokens (words
that an environment names have one each, everything else is spelt in bytes), decoding what was encoded gives the same
text, and no text spells a special token; the same seed gives bit-identical weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import Unigram

from rollout.engine.embedded.model import ModelConfig, Qwen3, save_model

SPECIALS = PAD, BEGIN, END = ("<|pad|>", "<|begin|>", "<|end|>")  # ids 0, 1, 2; an action ends with END
PAD_ID, BEGIN_ID, END_ID = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The size of a policy. The default has about a million parameters."""

    width: int = 192
    layers: int = 2
    heads: int = 6
    inner: int = 576
    context: int = 1024  # tokens


def tokenizer(words: Sequence[str]) -> Tokenizer:
    """One token per word, then per printable character, bytes for the rest: the cheapest spelling wins.

    The scores make the spelling of a special token, or of a byte's own name, in characters the cheaper one.
    """
    pieces: list[tuple[str, float]] = [(special, -1000.0) for special in SPECIALS]
    pieces += [(f"<0x{byte:02X}>", -100.0) for byte in range(256)]
    characters = [chr(code) for code in range(0x20, 0x7F) if chr(code) not in words]
    pieces += [(character, -5.0) for character in characters]
    pieces += [(word, -1.0) for word in dict.fromkeys(words)]
    made = Tokenizer(Unigram(pieces, unk_id=PAD_ID, byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken(special, special=True, normalized=False) for special in SPECIALS])
    return made


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a policy directory. Text that spells a special token does not become one."""
    loaded = Tokenizer.from_file(str(directory / "tokenizer.json"))
    loaded.encode_special_tokens = True
    return loaded


def make(directory: Path, words: Sequence[str], *, seed: int, shape: Shape | None = None) -> Qwen3:
    """Writes a fresh policy with random weights into `directory` and returns its model."""
    shape = shape or Shape()
    directory.mkdir(parents=True, exist_ok=True)
    made = tokenizer(words)
    made.save(str(directory / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.context,
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(described, indent=1) + "\n")
    model = Qwen3(configuration(made.get_vocab_size(), shape))
    model.initialise(seed)
    save_model(model, directory)
    return model


def configuration(vocabulary: int, shape: Shape | None = None) -> ModelConfig:
    """Of a fresh policy of this size."""
    shape = shape or Shape()
    return ModelConfig(
        vocab_size=vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.width // shape.heads,
        max_position_embeddings=shape.context,
        pad_token_id=PAD_ID,
        bos_token_id=BEGIN_ID,
        eos_token_id=END_ID,
    )
