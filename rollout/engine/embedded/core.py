"""The embedded engine's core: model, cache, scheduler and sampling, one `step()` at a time, in one thread.

Called from one thread only. Guarantee: every sampled token carries the log-probability of the distribution that it was
drawn from and the version of the weights that computed it *and the whole prefix before it*: when weights change, the
cache of requests in flight is computed again (keys and values of old weights never mix with new ones).
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from rollout.decide.engines.colocation import Colocation
from rollout.decide.engines.parallel import Planner
from rollout.engine.embedded.adapter import load_served
from rollout.engine.embedded.apply import StagedChanges
from rollout.engine.embedded.colocation import share
from rollout.engine.embedded.model import Qwen3
from rollout.engine.embedded.paged import PagedModel
from rollout.engine.embedded.pretrained import facts, layers
from rollout.engine.embedded.routers import ExpertRecord
from rollout.engine.embedded.rows import Rows
from rollout.engine.embedded.scheduler import CacheCopy, EngineStep, Scheduler, Sequence, finish_reason
from rollout.engine.protocol import EngineStatistics, VersionSpan
from rollout.experts import RoutedExperts
from sandbox.errors import EngineFailed, Invalid


@dataclass(eq=False)
class SamplingSequence(Sequence):
    """A sequence and what sampling adds to it."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    routed: int = 0  # of its prompt, tokens whose experts are not reported
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish: str | None = None  # stop, length, abort, or error
    experts: RoutedExperts | None = None  # of its tokens but the last, once it has ended
    reported: int = 0  # of its sampled tokens, how many its stream got
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.random = random.Random(self.seed)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt :]

    def append(self, token: int, logprob: float, version: str) -> None:
        at = len(self.logprobs)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1].end = at + 1
        else:
            self.spans.append(VersionSpan(version, at, at + 1))


class Core:
    """`step()` until `idle`. Example: ``core.add(SamplingSequence("a", [1, 2], 8)); core.step()``."""

    def __init__(
        self,
        directory: Path,
        *,
        version: str,
        slots: int,
        length: int,
        retained: int | None = None,
        base: Path | None = None,
        colocation: Colocation | None = None,
        cache: int | None = None,
        device: str = "cpu",
        dtype: str = "float32",
        paged: bool = False,
        experts: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`base`: the model that an adapter in `directory` belongs to, where it is not where the adapter says.
        `colocation`:
        requests of a priority above 0 get what the others leave. `cache`: tokens of all that run together; how many
        these are follows from how often it is too small (rollout.decide.engines.parallel). `dtype`: float32 or
        bfloat16. `paged`: also of our own model. `experts`: answers name those of each token of a mixture. Raises
        Invalid for a model that has none."""
        self.directory = directory
        self.version = version
        self.broken: str | None = None  # why no weights are served
        self.model, self.weights = load_served(directory, base, device=device, dtype=dtype, paged=paged)
        self.model.eval()  # weights: what versions change, by published name
        self.facts = facts(self.model)
        length = min(length, self.facts.length or length)
        retained = 2 * slots if retained is None else retained
        self.cache: Rows | PagedModel
        if isinstance(self.model, Qwen3):
            if experts:
                raise Invalid("a dense Qwen3 has no experts", hint="leave out objective.router_replay")
            self.cache = Rows(self.model, rows=slots + retained, length=length)
        else:
            record = ExpertRecord(self.model) if experts else None
            capacity = {"rows": slots + retained, "slots": slots, "length": length, "cache": cache or slots * length}
            self.cache = PagedModel(self.model, layers(self.model), record=record, **capacity)
        self.scheduler = Scheduler(
            slots=slots,
            retained=retained,
            length=length,
            colocates=colocation is not None,
            cache=self.cache.tokens or cache,
            held=self.cache.held,
        )
        self._planner, self._preempted = Planner(slots), 0
        self.colocation, self._clock, self.experts = colocation, clock, experts
        self.requests: dict[str, SamplingSequence] = {}
        self.statistics = EngineStatistics(version=version)

    def add(self, request: SamplingSequence) -> None:
        if self.broken is not None:
            raise EngineFailed(f"no weights are served: {self.broken}", hint="load a version, or restart the engine")
        if request.id in self.requests:
            raise ValueError(f"request id {request.id} is in flight already")
        top = self.facts.vocabulary
        if any(not 0 <= token < top for token in request.tokens):
            raise ValueError(f"token ids must be in 0..{top - 1}")
        if self.colocation is not None and self.colocation.frozen and request.colocated:
            raise EngineFailed("users need all of this engine until its next version", hint="ask another one")
        request.since = request.since or self._clock()
        self.scheduler.add(request)
        self.requests[request.id] = request
        self.statistics.requests += 1
        self.statistics.prompt_tokens += request.prompt

    def abort(self, ids: list[str]) -> list[SamplingSequence]:
        """End these requests (all, when none is named) with what they have."""
        chosen = [self.requests[name] for name in (ids or list(self.requests)) if name in self.requests]
        for request in chosen:
            self._report_experts(request)
            self._copy(self.scheduler.abort(request))
            del self.requests[request.id]
            request.finish = "abort"
            self.statistics.aborted += 1
        return chosen

    def step(self) -> list[SamplingSequence]:
        """Compute one step; the requests that it finished."""
        if self.colocation is None:
            return self._compute(self.scheduler.schedule())
        began = self._clock()
        step = share(self.colocation, self.scheduler, began)
        ended = self.abort([request.id for request in self.requests.values() if request.colocated]) if step.cut else []
        plan = self.scheduler.schedule(step)
        ended += self._compute(plan)
        read = sum(piece.end - piece.start for piece in plan.prefill)
        self.colocation.took(len(plan.decode), read, self._clock() - began)
        return ended

    def _compute(self, plan: EngineStep) -> list[SamplingSequence]:
        self._copy(plan.copies)
        self.statistics.steps += 1
        self.statistics.preemptions, self.statistics.reused_tokens = self.scheduler.preemptions, self.scheduler.reused
        if not plan.decode and not plan.prefill:
            return []
        logits = self.cache.compute(plan, self.scheduler)
        for sequence in plan.decode:
            sequence.computed += 1
        for piece in plan.prefill:
            self.statistics.prefilled_tokens += piece.end - piece.start
            piece.sequence.computed = piece.end
        ended = [*plan.decode, *(piece.sequence for piece in plan.prefill)]
        drawn = [*(True for _ in plan.decode), *(piece.complete for piece in plan.prefill)]
        chosen = [at for at, complete in enumerate(drawn) if complete]
        return self._sample([ended[at] for at in chosen], logits[chosen]) if chosen else []  # type: ignore[misc]

    def adopt(self, prepared: StagedChanges, version: int, *, recompute: bool) -> None:
        """Serve what `prepared` makes of the weights. Not `recompute`: keys and values of older weights stay in use."""
        try:
            prepared.apply()
        except (RuntimeError, ValueError) as error:
            self.broken = f"version {version} was written in part: {error}"
            raise EngineFailed(self.broken, hint="restart the engine; it serves nothing now") from error
        self.broken = None
        self.version = self.statistics.version = str(version)
        self.statistics.weight_updates += 1
        self._next_version()
        if recompute:
            self.forget()

    def label(self, version: str) -> None:
        """Name the weights."""
        self.version = self.statistics.version = version
        self._next_version()

    def _next_version(self) -> None:
        """A step of the run is over."""
        scheduler = self.scheduler
        if self.colocation is not None:
            self.colocation.frozen = False
        self._planner.ended(scheduler.preemptions - self._preempted)
        self._preempted = scheduler.preemptions
        scheduler.sequences = max(1, scheduler.slots // self._planner.degree)

    def checksums(self) -> dict[str, str]:
        """sha256 of every parameter's bytes under its published name, and of the head where it is the embedding's."""
        named = {tensor.data_ptr() for tensor in self.weights.values()}
        others = {name: item for name, item in self.model.state_dict().items() if item.data_ptr() not in named}
        digests = {
            name: hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()).hexdigest()
            for name, tensor in {**others, **self.weights}.items()
        }
        head = digests.get("model.embed_tokens.weight")
        return digests if head is None else {"lm_head.weight": head, **digests}

    def forget(self) -> None:
        """Nothing that is cached is valid: running requests are computed again."""
        self.scheduler.invalidate()
        self.cache.forget()

    def _copy(self, copies: list[CacheCopy]) -> None:
        self.cache.copy(copies, self.scheduler)

    def _report_experts(self, request: SamplingSequence) -> None:
        if self.experts and isinstance(self.cache, PagedModel) and request.row >= 0 and request.computed:
            chosen = self.cache.experts(request.row, request.computed)
            request.experts = RoutedExperts.of(0, chosen.cpu().numpy())

    def _sample(self, requests: list[SamplingSequence], logits: Tensor) -> list[SamplingSequence]:
        """A token of each, from logits [requests, V], on the device where these are."""
        logits, device = logits.float(), logits.device
        temperature = torch.tensor([request.temperature or 1.0 for request in requests], device=device)
        logprobs = torch.log_softmax(logits / temperature[:, None], dim=-1)
        if any(request.top_p < 1 or request.top_k for request in requests):
            top_k = torch.tensor([request.top_k or logits.shape[1] for request in requests], device=device)
            top_p = torch.tensor([request.top_p for request in requests], dtype=torch.float64, device=device)
            logprobs = likeliest(logprobs, top_k, top_p)
        cumulative = logprobs.double().exp().cumsum(dim=-1)
        drawn = [request.random.random() for request in requests]
        uniform = torch.tensor(drawn, dtype=torch.float64, device=device)
        sampled = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)[:, 0]
        greedy = torch.tensor([request.temperature == 0 for request in requests], device=device)
        tokens = torch.where(greedy, logits.argmax(dim=-1), sampled.clamp_(max=logits.shape[1] - 1))
        chosen = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
        finished, now = [], self._clock()
        for request, token, logprob in zip(requests, tokens.tolist(), chosen, strict=True):
            if logprob != logprob or logprob == float("-inf"):
                request.finish = "error"
                self.cache.wipe(request.row)
            else:
                request.append(token, logprob, self.version)
                request.since = now
                request.finish = finish_reason(request, self.scheduler.length)
                self.statistics.generated_tokens += 1
            if request.finish is not None:
                self._report_experts(request)
                self._copy(self.scheduler.finish(request, retain=request.finish != "error"))
                del self.requests[request.id]
                self.statistics.finished += 1
                finished.append(request)
        return finished


def likeliest(logprobs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Distributions [n, vocabulary] of which only the likeliest tokens are left: first so many, then so many of these
    that the ones before each have less than the share `top_p`. The others have -inf, the sum is 1 again."""
    values, order = logprobs.double().sort(dim=-1, descending=True)
    left = torch.arange(values.shape[1], device=values.device) < top_k[:, None]
    values = values.masked_fill(~left, float("-inf")).log_softmax(dim=-1)
    shares = values.exp()
    before = shares.cumsum(dim=-1) - shares
    left &= (before < top_p[:, None]) | (top_p[:, None] >= 1)
    left[:, 0] = True
    values = values.masked_fill(~left, float("-inf")).log_softmax(dim=-1)
    return torch.empty_like(logprobs).scatter_(1, order, values.to(logprobs.dtype))
