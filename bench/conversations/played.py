"""Conversations of SmolLM2-135M over a pool, as the trainer would get them, and the check of what was told of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout.engine.client import Delta, Generation, Sampling
from rollout.episode.renderer import ChatRenderer, Message
from rollout.pool.pool import EnginePool
from sandbox.paths import CHECKOUT

MODEL = CHECKOUT / ".prefix" / "models" / "SmolLM2-135M-Instruct"
TOLERANCE = 1e-3
LENGTH = 2048  # tokens of the longest conversation
MAX_TURNS = 64
REQUESTED = [
    "List the files of this folder.",
    "Which of them is the largest?",
    "Write one line of shell that counts them.",
]


@dataclass
class Played:
    """One trajectory: its tokens, and the answers in it with the place where each begins."""

    ids: list[int] = field(default_factory=list)
    answers: list[tuple[int, Generation]] = field(default_factory=list)

    @property
    def replayed(self) -> bool:
        """Whether it went back: an answer that does not begin where the one before it ended, or later."""
        end = 0
        for at, generation in self.answers:
            if at < end:
                return True
            end = at + len(generation.token_ids)
        return False

    def tokens_of(self, version: int) -> list[tuple[int, float]]:
        """Where the tokens lie that this version sampled, and the log-probabilities that the engine told."""
        return [
            (at + i, generation.logprobs[i])
            for at, generation in self.answers
            for span in generation.spans
            if span.version == version
            for i in range(span.start, span.end)
        ]


def versions(home: Path, count: int) -> list[Path]:
    """The model, and the same with all its matrices moved a little, as versions 0, 1, ...; a folder of each."""
    import torch
    from transformers import AutoModelForCausalLM

    from rollout.weights.export import put_together
    from rollout.weights.store import VersionStore
    from trainer.weights import Publisher

    store = VersionStore(home / "weights")
    publisher = Publisher(store, keep=count)
    names = ("token", "chat_template", "generation", "config")
    files = {path.name: path.read_bytes() for path in MODEL.iterdir() if path.name.startswith(names)}
    for version in range(len(store.versions()), count):
        model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, local_files_only=True)
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2 and version:
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.add_(noise * parameter.std() * 0.02 * version)
        state = model.state_dict()
        state.pop("lm_head.weight", None)  # tied
        publisher.publish(version, state, files)
    publisher.close()
    directories = [home / f"v{version:06d}" for version in range(count)]
    for version, directory in enumerate(directories):
        put_together(store, directory, version)
    return directories


async def play(
    pool: EnginePool,
    renderer: ChatRenderer,
    number: int,
    played: Played,
    *,
    turns: int,
    tokens: int,
    over: asyncio.Event | None = None,
    exactly: Callable[[int, int], int] | None = None,
) -> None:
    """A chat of some turns, and of more until it is `over`; each next prompt is an exact extension of the tokens.

    `exactly`: how many tokens the answer of a conversation has in a turn, so that all lengths are the same each time.
    """
    messages: list[Message] = [{"role": "user", "content": f"Task {number}. {REQUESTED[number % len(REQUESTED)]}"}]
    played.ids = renderer.open(messages)
    sampling = Sampling(max_tokens=tokens, stop_token_ids=renderer.stops)
    for turn in range(MAX_TURNS):
        if exactly is not None:
            sampling = Sampling(max_tokens=exactly(number, turn), ignore_eos=True)
        at, before = len(played.ids), list(played.ids)
        generation = await _hear(pool, before, sampling)
        played.answers.append((at, generation))
        played.ids += generation.token_ids
        if turn + 1 >= turns and (over is None or over.is_set()):
            return
        messages.append(renderer.parse(generation.token_ids, before).message())
        new: Message = {"role": "user", "content": f"It said {number + turn}. Go on."}
        longer = renderer.bridge(played.ids, messages, [new])
        if longer is None or longer[: len(played.ids)] != played.ids:
            raise ValueError(f"turn {turn} of trajectory {number} is no extension of its tokens")
        if len(longer) + tokens > LENGTH:
            return
        played.ids = longer
        messages.append(new)


async def _hear(pool: EnginePool, ids: list[int], sampling: Sampling) -> Generation:
    """An answer, piece by piece, as it was told."""
    token_ids, logprobs, last = list[int](), list[float](), Delta(token_ids=[], logprobs=[])
    async for last in pool.stream(ids, sampling):
        token_ids += last.token_ids
        logprobs += last.logprobs
    return Generation(
        token_ids=token_ids,
        logprobs=logprobs,
        spans=last.spans or [],
        finish_reason=last.finish_reason or "abort",  # type: ignore[arg-type]
    )


def check(played: list[Played], directories: list[Path]) -> dict[str, Any]:
    """Each sampled token's log-probability against a forward pass of the version that its span names."""
    import torch
    from transformers import AutoModelForCausalLM

    errors: dict[int, list[float]] = {}
    for version, directory in enumerate(directories):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
        for item in played:
            target = item.tokens_of(version)
            if not target:
                continue
            places = [at for at, _ in target]
            with torch.no_grad():  # only as far, and the head only where, it is asked for
                hidden = model.model(torch.tensor([item.ids[: max(places)]])).last_hidden_state[0]
                logprobs = torch.log_softmax(model.lm_head(hidden[[at - 1 for at in places]]).float(), dim=-1)
            observed = logprobs[range(len(places)), [item.ids[at] for at in places]].tolist()
            errors.setdefault(version, []).extend(
                abs(reported - result) for (_, reported), result in zip(target, observed, strict=True)
            )
    every = [error for result in errors.values() for error in result]
    return {
        "checked_trajectories": len(played),
        "checked_tokens_by_version": {str(version): len(result) for version, result in sorted(errors.items())},
        "logprob_error_max": max(every, default=None),
        "logprob_wrong": sum(error > TOLERANCE for error in every),
    }
