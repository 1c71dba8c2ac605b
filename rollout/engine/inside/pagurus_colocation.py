"""A scheduler for vLLM that gives rollouts what users leave, and the route that says how much that is.

Guarantee: a request of priority 0 or less is a user's, and is scheduled as vLLM does, but for prompts that are read in
pieces; all others are rollouts', and get in each step no more than `Colocation.step` says.

vLLM imports this module in its engine process (``--scheduler-cls pagurus_colocation.ColocationScheduler``, with the
promise in ``--additional-config``) and in its API server
(``--middleware pagurus_colocation.Telling``). The package `rollout`
needs much that vLLM's interpreter has not, so the two modules that decide and the log are loaded without it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import msgspec
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus


def _load(name: str) -> None:
    """A module of `rollout`, without the packages that it lies in."""
    path = Path(__file__).parents[2].joinpath(*name.split(".")).with_suffix(".py")
    spec = spec_from_file_location(f"rollout.{name}", path)
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


for _name in ("decide.engines.headroom", "decide.engines.colocation", "step_log"):
    _load(_name)

from rollout.decide.engines.colocation import Colocation  # noqa: E402
from rollout.decide.engines.headroom import Budget, EngineView, HeadroomStep, WaitingRequest  # noqa: E402
from rollout.step_log import StepLog  # noqa: E402

PROMISE, STEPS = "pagurus_colocation", "pagurus_steps"  # of --additional-config
ROUTE = "/statistics"


class ColocationScheduler(Scheduler):  # type: ignore[misc]
    def __init__(self, **given: Any):
        super().__init__(**given)
        if self.need_mamba_block_aligned_split or self.num_spec_tokens or self.use_pp:
            raise ValueError("colocation: no Mamba layers, no speculative decoding, no pipeline parallelism")
        if not hasattr(Scheduler, "_reserve_prefill_lookahead"):
            raise ValueError("colocation: this vLLM's scheduler does not ask how many tokens a request gets; take 0.32")
        reported = self.vllm_config.additional_config
        budget = msgspec.convert(reported[PROMISE], Budget)
        self.colocation = Colocation(
            budget, log=StepLog(Path(reported[STEPS]), budget).append if STEPS in reported else None
        )
        self.colocated_slots = max(1, self.max_num_active_reqs // 2)
        self._blocks = self.kv_cache_manager.block_pool.get_num_free_blocks()
        self._ended: list[tuple[int, EngineCoreOutput]] = []  # rollouts, and the clients that have to be notified
        self._left = HeadroomStep(0, 0, 0)  # of this step
        self._colocated = self._held = 0  # rollouts that run, blocks that they hold
        self._work = (0.0, 0, 0)  # when the step began, its answers, its tokens of prompts

    def add_request(self, request: Any) -> None:
        if self.colocation.frozen and request.priority > 0:
            self._report_end(request)
            return
        request.since = request.arrival_time  # later: when its last token came
        super().add_request(request)

    def has_requests(self) -> bool:
        return bool(self._ended) or super().has_requests()

    def next_version(self) -> None:
        self.colocation.frozen = False

    def colocates(self) -> int:
        """Rollouts at once."""
        return 0 if self.colocation.frozen else self.colocated_slots

    def schedule(self, throttle_prefills: bool = False) -> Any:
        began = time.time()  # the clock of `arrival_time`
        if self._pause_state != PauseState.PAUSED_ALL:
            self._decide(began)
        output = super().schedule(throttle_prefills)
        counts = output.num_scheduled_tokens.values()
        self._work = (began, sum(count == 1 for count in counts), sum(count for count in counts if count > 1))
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        now, (began, answers, read) = time.time(), self._work
        if answers or read:
            self.colocation.took(answers, read, now - began)
        for came in outputs.values():
            for item in came.outputs:
                if item.new_token_ids and (request := self.requests.get(item.request_id)) is not None:
                    request.since = now
        for client, ended in self._ended:
            outputs.setdefault(client, EngineCoreOutputs()).outputs.append(ended)
        self._ended = []
        return outputs

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """vLLM asks this before it gives tokens of a step to a request: so many of them. What it does not get now, it
        waits for; behind a request that may not begin, no other one begins."""
        left, runs = self._left, request.status == RequestStatus.RUNNING
        answer = runs and request.num_tokens - num_computed_tokens <= 1
        if request.priority <= 0:
            if not answer:
                num_new_tokens = min(num_new_tokens, left.users_prompt)
                self._left = msgspec.structs.replace(left, users_prompt=left.users_prompt - num_new_tokens)
        elif answer:
            num_new_tokens = min(num_new_tokens, left.rollouts)
            self._left = msgspec.structs.replace(left, rollouts=left.rollouts - num_new_tokens)
        else:
            num_new_tokens = min(num_new_tokens, left.rollout_prompt) if runs or self._may_begin(request) else 0
            self._left = msgspec.structs.replace(left, rollout_prompt=left.rollout_prompt - num_new_tokens)
            if num_new_tokens and not runs:
                self._colocated, self._held = self._colocated + 1, self._held + self._blocks_of(request.num_tokens + 1)
        given: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        return given

    def _may_begin(self, rollout: Any) -> bool:
        """Rollouts get at most half of the slots and of the cache."""
        capacity = self._held + self._blocks_of(rollout.num_tokens + 1) <= self._blocks // 2
        return self._colocated == 0 or (self._colocated < self.colocated_slots and capacity)

    def _decide(self, now: float) -> None:
        users = [item for item in self.requests.values() if item.priority <= 0 and not item.is_finished()]
        rollouts = [item for item in self.requests.values() if item.priority > 0 and not item.is_finished()]
        running = [item for item in rollouts if item.status == RequestStatus.RUNNING]
        self._colocated, self._held = len(running), sum(map(self._holds, running))
        self._left = self.colocation.step(self._view(users, rollouts), now)
        if self._left.cut:
            self.finish_requests([item.request_id for item in rollouts], RequestStatus.FINISHED_ABORTED)
            for item in rollouts:
                self._report_end(item)

    def _view(self, users: list[Any], rollouts: list[Any]) -> EngineView:
        unread = [item for item in users if not _ready(item)]
        unread.sort(key=lambda item: (item.status != RequestStatus.RUNNING, item.priority, item.arrival_time))
        waiting = [item for item in unread if item.status != RequestStatus.RUNNING]
        # Of slots and blocks those that are scarcer.
        slots = self.max_num_active_reqs - len(self.running), len(waiting), self._colocated
        target = sum(self._blocks_of(item.num_tokens + 1) - self._holds(item) for item in users)
        blocks = self.kv_cache_manager.block_pool.get_num_free_blocks(), target, self._held
        free, target, held = min(slots, blocks, key=lambda item: item[0] - item[1])
        return EngineView(
            waiting=[WaitingRequest(item.since, _unread(item)) for item in unread],
            last_tokens=[item.since for item in users if _ready(item)],
            rollouts=sum(map(_ready, rollouts)),
            rollout_prompt=sum(_unread(item) for item in rollouts if not _ready(item)),
            free=free,
            target=target,
            held=held,
            frozen=self.colocation.frozen,
        )

    def _blocks_of(self, tokens: int) -> int:
        return int(-(-tokens // self.block_size) * len(self.kv_cache_config.kv_cache_groups))

    def _holds(self, request: Any) -> int:
        return sum(map(len, self.kv_cache_manager.get_block_ids(request.request_id)))

    def _report_end(self, rollout: Any) -> None:
        ended = EngineCoreOutput(rollout.request_id, [], finish_reason=FinishReason.ABORT)
        self._ended.append((rollout.client_index, ended))


def _unread(request: Any) -> int:
    return int(request.num_tokens - request.num_computed_tokens)


def _ready(request: Any) -> bool:
    """The next step samples its next token, or reads the last one of its prompt."""
    return request.status == RequestStatus.RUNNING and _unread(request) <= 1


def _statistics(core: EngineCore) -> dict[str, Any]:
    """What rollout.engine.protocol.EngineStatistics has of it."""
    scheduler = core.scheduler
    running, waiting = scheduler.get_request_counts()
    return {
        "version": core.get_weight_version(),
        "running": running,
        "waiting": waiting,
        "colocates": scheduler.colocates(),
    }


def _set_weight_version(core: EngineCore, weight_version: str) -> None:
    SET_WEIGHT_VERSION(core, weight_version)
    core.scheduler.next_version()


SET_WEIGHT_VERSION = EngineCore.set_weight_version
EngineCore.set_weight_version = _set_weight_version
EngineCore.colocation_statistics = _statistics  # a utility: the API server calls it by its name


Channel = Callable[..., Awaitable[Any]]


class Telling:
    """``GET /statistics``, as the embedded engine has it. Everything else is passed on to vLLM."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Mapping[str, Any], receive: Channel, send: Channel) -> None:
        if scope["type"] != "http" or scope["path"] != ROUTE:
            await self.app(scope, receive, send)
            return
        core = scope["app"].state.engine_client.engine_core
        body = json.dumps(await core.call_utility_async("colocation_statistics")).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": body})
