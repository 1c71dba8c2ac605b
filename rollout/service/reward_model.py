"""A reward model as a scorer: ``python -m rollout.service.reward_model DIRECTORY FD``.

Guarantee: a score is that of transformers' own forward pass at the last token, of one transcript at a time, so that
nothing is padded; a transcript that is longer than the model's positions is an error, never cut.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import torch

from rollout.episode.renderer import ChatRenderer, has_template
from rollout.rewards import worker
from rollout.rewards.messages import RewardMessage, Score, ScoringRequest
from rollout.rewards.transcript import Said, by_turn, transcripts
from rollout.rewards.worker import PoolConnection
from rollout.tokenizer import load as load_tokenizer
from sandbox.errors import Invalid


class RewardModel:
    """``RewardModel(directory).score([{"role": "user", ...}, ...])``"""

    def __init__(self, directory: Path):
        from transformers import AutoModelForSequenceClassification

        model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
        if model.config.num_labels != 1:
            raise Invalid(f"{directory} has {model.config.num_labels} labels", hint="a reward model has one number")
        self._model = model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
        self._renderer = ChatRenderer.load(directory) if has_template(directory) else None
        self._tokenizer = load_tokenizer(directory)

    def tokens(self, messages: Said) -> list[int]:
        """By the model's template; without one, the texts line by line."""
        if self._renderer is not None:
            return self._renderer.closed(messages)
        return self._tokenizer.encode("\n".join(message["content"] for message in messages))

    @torch.inference_mode()
    def score(self, messages: Said) -> float:
        ids = self.tokens(messages)
        limit = getattr(self._model.config, "max_position_embeddings", None)
        if limit and len(ids) > limit:
            raise ValueError(f"{len(ids)} tokens, and the reward model has {limit} positions")
        rows = torch.tensor([ids], device=self._model.device)
        logits: Any = self._model(input_ids=rows, attention_mask=torch.ones_like(rows)).logits
        return float(logits[0, 0])

    async def answer(self, link: PoolConnection, request: ScoringRequest) -> RewardMessage:
        await worker.begin(link, request)
        turns = bool(request.scoring.options.get("turns"))
        try:
            said = [await asyncio.to_thread(self.score, item) for item in transcripts(request, turns=turns)]
        except (ValueError, RuntimeError, Invalid) as error:
            return RewardMessage(id=request.id, error=f"{type(error).__name__}: {error}"[: worker.MAX_ERROR])
        return RewardMessage(id=request.id, score=by_turn(said) if turns else Score(reward=said[-1]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    worker.main(int(sys.argv[2]), RewardModel(Path(sys.argv[1])).answer)
