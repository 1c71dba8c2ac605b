"""What a model directory says about itself, and which ones a run refuses before it begins. Without torch, but for
`need_embedded`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from rollout.environments.base import Environment
from sandbox.errors import Invalid, NotFound


def need_model(directory: Path, *target: type[Environment], length: int = 1) -> None:
    """Refuses a directory that is no model, one that cannot take what these environments say to a model, or one that
    has no positions for trajectories of this length."""
    from rollout.episode.renderer import has_template

    if not (directory / "config.json").is_file():
        raise NotFound(
            f"{directory} is no model: it has no config.json",
            hint="name a Hugging Face directory; a model of a hub is downloaded first: hf download NAME --local-dir .",
        )
    positions = _positions(directory)
    if positions is not None and length > positions:
        raise Invalid(
            f"max_length is {length}, and {directory} has {positions} positions", hint=f"set max_length = {positions}"
        )
    for item in target:
        if (item.system or item.tools) and not has_template(directory):
            reported = "a system prompt" if item.system else "tools"
            raise Invalid(
                f"{item.__name__} has {reported} for a chat model, and {directory} has no chat template",
                hint="name an instruction-tuned model, or put its chat_template.jinja into the directory",
            )


def _positions(directory: Path) -> int | None:
    """Tokens of the longest sequence that a model directory says it can read, if it says so."""
    content = model_content(directory)
    text = content.get("text_config") or content
    result = text.get("max_position_embeddings") or text.get("n_positions")
    return result if isinstance(result, int) and result > 0 else None


def model_content(directory: Path) -> dict[str, Any]:
    """The ``config.json`` of a model directory."""
    try:
        return msgspec.json.decode((directory / "config.json").read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise Invalid(f"{directory}/config.json is damaged: {error}", hint="download the model again") from None


def need_embedded(directory: Path) -> None:
    """Refuses what the embedded engine cannot serve."""
    from rollout.engine.embedded.pretrained import refuse  # with torch

    try:
        refuse(directory)
    except (ValueError, TypeError) as error:
        raise Invalid(f"the embedded engine does not serve {directory}: {error}", hint="--engine vllm") from None
