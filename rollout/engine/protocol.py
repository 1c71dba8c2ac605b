"""Every struct that crosses to or from an engine server, headed "A -> B"; equal to vLLM 0.32's JSON.

Field names and shapes are vLLM's (``/inference/v1/generate`` and its RL routes); fields that we do not use are absent,
and a server that sends more is fine. An engine that receives a sampling parameter which it does not implement must
refuse it: silence would change the sampled distribution.
"""

from __future__ import annotations

from typing import Literal

import msgspec

GENERATE = "/inference/v1/generate"
HEALTH = "/health"
PAUSE = "/pause"
RESUME = "/resume"
IS_PAUSED = "/is_paused"
ABORT = "/abort_requests"
RPC = "/collective_rpc"
SET_VERSION = "/update_weight_version"
WEIGHT_INFO = "/weight_info"
WEIGHT_CHECKER = "/weight_checker"
RESET_CACHE = "/reset_prefix_cache"
LOAD_ADAPTER = "/v1/load_lora_adapter"  # vLLM only, as the next
UNLOAD_ADAPTER = "/v1/unload_lora_adapter"
BEGIN_TRANSFER = "/init_weight_transfer_engine"  # vLLM only, as the next three
START_UPDATE = "/start_weight_update"
UPDATE = "/update_weights"
FINISH_UPDATE = "/finish_weight_update"
PULL_WEIGHTS = "/weights/pull"  # embedded engine only, as the next
APPLY_WEIGHTS = "/weights/apply"
STATISTICS = "/statistics"  # of the embedded engine, and in part of a vLLM that is co-located; others have /metrics

VLLM_PREFIX = "generate-tokens-"  # vLLM puts it before the ids of requests; unknown ids are aborted without an error

PauseMode = Literal["abort", "wait", "keep"]
FinishReason = Literal["stop", "length", "abort"]

# --------------------------------------------------------------------------- client -> engine


class SamplingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the embedded engine implements of vLLM's ``SamplingParams``.

    Nothing is left out on the wire: a server has defaults of its own (vLLM fills an absent max_tokens up to its
    longest sequence). `logprobs` 0 asks for the sampled token's log-probability alone.
    """

    max_tokens: int
    temperature: float = 1.0
    stop_token_ids: list[int] = []
    seed: int | None = None
    ignore_eos: bool = False
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    logprobs: int | None = None
    n: int = 1
    detokenize: bool = True
    routed_experts_prompt_start: int = 0  # of the prompt, tokens whose experts are not reported


class GenerateRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """client -> engine: POST /inference/v1/generate"""

    token_ids: list[int]
    sampling_params: SamplingParams
    request_id: str = ""
    model: str | None = None
    stream: bool = False
    priority: int = 0  # lower goes first; vLLM takes others than 0 under --scheduling-policy priority alone


class AbortRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """client -> engine: POST /abort_requests. No ids: all."""

    request_ids: list[str] = []


class RpcRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """client -> engine: POST /collective_rpc, e.g. ``reload_weights`` with ``weights_path``."""

    method: str
    kwargs: dict[str, str] = {}
    timeout: float | None = None


class VersionRequest(msgspec.Struct):
    """client -> engine: POST /update_weight_version"""

    new_version: str


class WeightPull(msgspec.Struct):
    """client -> engine: POST /weights/pull. Fetch a version and have it ready; None: the newest."""

    version: int | None = None


class ApplyRequest(msgspec.Struct):
    """client -> engine: POST /weights/apply. Serve a version that is ready, from the next token on."""

    version: int
    recompute: bool = True  # the cache of requests in flight; else they continue with keys and values of older weights


class BeginTransfer(msgspec.Struct):
    """client -> engine: POST /init_weight_transfer_engine. The weights were loaded, as this version."""

    init_info: dict[str, int]


class UpdateRequest(msgspec.Struct):
    """client -> engine: POST /update_weights. The message to our engine in vLLM's workers: a file of changes."""

    update_info: dict[str, str]


class AdapterRequest(msgspec.Struct, omit_defaults=True):
    """client -> engine: POST /v1/load_lora_adapter, /v1/unload_lora_adapter. Requests ask for it by `lora_name`."""

    lora_name: str
    lora_path: str = ""


class CheckerRequest(msgspec.Struct):
    """client -> engine: POST /weight_checker"""

    action: Literal["checksum"] = "checksum"


# --------------------------------------------------------------------------- engine -> client


class TokenLogprob(msgspec.Struct, omit_defaults=True):
    token_id: int
    logprob: float


class Logprobs(msgspec.Struct):
    content: list[TokenLogprob] | None = None


class VersionSpan(msgspec.Struct):
    """Output tokens ``[start, end)`` were sampled by weights labelled `version`."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct, kw_only=True):
    index: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    routed_experts: str | None = None  # base64 of a .npy, [prompt and output but the last token, layers, experts]
    weight_versions: list[VersionSpan] | None = None


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    total_tokens: int = 0


class GenerateResponse(msgspec.Struct, kw_only=True):
    """engine -> client"""

    request_id: str
    choices: list[Choice]
    created: int = 0
    model: str = ""
    usage: Usage | None = None


class EngineErrorBody(msgspec.Struct):
    """engine -> client: the body of a refused request, as OpenAI and vLLM shape it."""

    message: str
    type: str
    code: int


class StreamChunk(msgspec.Struct, kw_only=True):
    """engine -> client: one ``data:`` line of a streamed answer; the line after the last one is ``[DONE]``.

    `token_ids` and `logprobs` are what is new. `weight_versions` covers the whole answer so far: vLLM sends it with the
    last chunk alone, the embedded engine with each. `routed_experts` comes with the last one, and covers prompt
    and answer.
    """

    request_id: str = ""
    choices: list[Choice] = []
    error: EngineErrorBody | None = None


class WeightInfo(msgspec.Struct):
    """engine -> client: GET /weight_info"""

    weight_version: str


class PullTimings(msgspec.Struct, kw_only=True):
    """engine -> client: what a pull took. The engine kept generating."""

    version: int
    bytes: int
    seconds: float
    fetch_s: float  # these are sums over segments that were under way together
    write_s: float
    check_s: float
    complete: bool  # all weights will be written, not changes


class ApplyResult(msgspec.Struct):
    """engine -> client: seconds in which it computed nothing."""

    version: int
    paused_s: float


class PauseInfo(msgspec.Struct):
    """engine -> client: GET /is_paused"""

    is_paused: bool


class Checksums(msgspec.Struct):
    """engine -> client: sha256 of the bytes of each parameter, by its name inside the engine."""

    checksums: dict[str, str]


class ErrorResponse(msgspec.Struct):
    error: EngineErrorBody


class EngineStatistics(msgspec.Struct, kw_only=True):
    """embedded engine -> client: GET /statistics. Counts since start. A co-located vLLM reports `version`, `running`,
    `waiting` and `colocates`."""

    version: str = ""
    paused: bool = False
    running: int = 0
    waiting: int = 0
    requests: int = 0
    finished: int = 0
    aborted: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0  # of the prompt tokens, taken from the cache of an earlier request
    prefilled_tokens: int = 0  # run through the model, recomputation after a weight change included
    generated_tokens: int = 0
    busy_s: float = 0.0
    weight_updates: int = 0
    preemptions: int = 0  # requests that were put back because the cache was full
    colocates: int = 0  # rollouts for which users leave room
    sequences: int = 0  # requests that are computed at once, at most
