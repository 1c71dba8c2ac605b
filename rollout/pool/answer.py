"""An answer that is put together from the streams of one or several servers.

Pure: no I/O. Guarantee: each token has the log-probability that came with it, and the one version that sampled it. vLLM
reports versions with the last piece of a stream alone. Where a stream breaks off before that, its tokens are of the
version that it began with, up to the moment when the server began to take another one; those reported later may be of
either, and are dropped.
"""

from __future__ import annotations

import msgspec

from rollout.engine.client import Delta, Generation, Sampling, WeightSpan
from rollout.experts import RoutedExperts

PRIME = 1_000_003  # between the seeds of an answer's parts


class PartialGeneration:
    """``answer.begin(version); answer.add(delta); ...; answer.generation``"""

    def __init__(self, sampling: Sampling):
        self.sampling = sampling
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[WeightSpan] = []
        self.finish: str | None = None
        self.experts: RoutedExperts | None = None  # of the prompt and the answer: each report covers both
        self.enough = False
        self.parts = 0
        self._base = 0  # tokens of former servers
        self._oldest = -1
        self._doubted: int | None = None  # from this token on the version is known only where spans say so

    def begin(self, version: int) -> Sampling:
        """A server of `version` continues; how it is to sample the rest."""
        self.break_off()
        self._base, self._oldest = len(self.token_ids), version
        self.experts = None  # may be of tokens that were dropped; the next report covers all
        seed = self.sampling.seed
        seed = seed if seed is None or not self.parts else (seed + self.parts * PRIME) % (1 << 63)
        self.parts += 1
        return msgspec.structs.replace(self.sampling, max_tokens=self.sampling.max_tokens - self._base, seed=seed)

    def doubt(self) -> None:
        """The server takes another version from here on, or may: only it can say which one samples a token."""
        if self._doubted is None:
            self._doubted = len(self.token_ids)

    def add(self, delta: Delta) -> None:
        if not self.enough:
            self.token_ids += delta.token_ids
            self.logprobs += delta.logprobs
        self.experts = delta.experts or self.experts
        if delta.spans is not None:
            self.spans = [span for span in self.spans if span.end <= self._base]
            for span in delta.spans:
                self._cover(span.version, min(self._base + span.end, len(self.token_ids)))
        if delta.finish_reason is not None:
            self.finish = "stop" if self.enough else delta.finish_reason

    def cut(self, count: int) -> None:
        """Its first `count` tokens are enough: those that have come after them are no part of it, nor what comes."""
        del self.token_ids[count:], self.logprobs[count:]
        self.spans = [
            WeightSpan(item.version, item.start, min(item.end, count)) for item in self.spans if item.start < count
        ]
        self.enough = True
        self.finish = self.finish and "stop"

    def break_off(self) -> int:
        """The stream ended in the middle: keep what is certain. How many tokens are dropped."""
        certain = self.certain
        dropped = len(self.token_ids) - certain
        del self.token_ids[certain:], self.logprobs[certain:]
        self._doubted = None
        self.enough = self.enough and not dropped
        self._cover(self._oldest, certain)
        return dropped

    @property
    def certain(self) -> int:
        """So many of its tokens have a version that is known: they stay, whatever becomes of the server."""
        count = len(self.token_ids)
        return count if self._doubted is None else min(count, max(self._doubted, self._covered))

    @property
    def complete(self) -> bool:
        """Nothing is left to sample, although that was not reported before its stream broke."""
        return self.enough or len(self.token_ids) >= self.sampling.max_tokens

    @property
    def generation(self) -> Generation:
        self.break_off()
        finish = self.finish or ("stop" if self.enough else "length")
        return Generation(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            spans=self.spans,
            finish_reason=finish,  # type: ignore[arg-type]
            experts=self.experts,
        )

    @property
    def _covered(self) -> int:
        return self.spans[-1].end if self.spans else 0

    def _cover(self, version: int, end: int) -> None:
        start = self._covered
        if end <= start:
            return
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = WeightSpan(version, self.spans[-1].start, end)
        else:
            self.spans.append(WeightSpan(version, start, end))
