"""`EngineClient`: one client for every engine that speaks vLLM's token protocol, embedded or vLLM.

Guarantee: `reload` and `apply` return only when the engine serves exactly that version (I9); when they raise, the
engine is left paused or refusing, never serving half of an update.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, TypeVar, overload

import aiohttp
import msgspec

from rollout.engine import protocol as wire
from rollout.engine.computed import computed_hashes
from rollout.engine.tls import calling
from rollout.experts import RoutedExperts
from sandbox.errors import EngineFailed, Invalid, Timeout

T = TypeVar("T", bound=msgspec.Struct)
EMPTY = hashlib.sha256().hexdigest()
VLLM_VOCABULARY_MULTIPLE = 64
KEEP_ALIVE = 3.0  # seconds; below uvicorn's five, so that we never write into a connection that it is closing
UNTRIED = "see the engine's log; a version of vLLM that was not tried may answer otherwise"


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample. Example: ``Sampling(max_tokens=24, stop_token_ids=[3])``."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 64
    temperature: Annotated[float, msgspec.Meta(ge=0.0)] = 1.0
    stop_token_ids: list[int] = []
    seed: int | None = None
    ignore_eos: bool = False
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0  # nucleus sampling; 1: all
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0  # 0: all

    @property
    def complete(self) -> bool:
        """Any token may be sampled: log-probabilities are those of the model at this temperature."""
        return self.top_p == 1.0 and self.top_k == 0


class TurnSampling(Sampling, frozen=True, kw_only=True):
    """How to sample one answer of a sequence that has answers."""

    routed: int = 0  # tokens at the beginning of the prompt whose experts need not be reported again

    @classmethod
    def of(cls, sampling: Sampling, **changed: int | list[int] | None) -> TurnSampling:
        return cls(**{**msgspec.structs.asdict(sampling), **changed})


class WeightSpan(msgspec.Struct, frozen=True):
    """Tokens ``[start, end)`` of a generation were sampled under weights `version`."""

    version: int
    start: int
    end: int


class Generation(msgspec.Struct, kw_only=True):
    """What an engine sampled. A stop token is included. Lengths of token_ids and logprobs are equal."""

    token_ids: list[int]
    logprobs: list[float]
    spans: list[WeightSpan]
    finish_reason: wire.FinishReason
    experts: RoutedExperts | None = None  # of the prompt and the answer, where the engine reports them


class Delta(msgspec.Struct, kw_only=True):
    """What is new in an answer on its way. `spans` cover the whole answer so far, where the engine reports them."""

    token_ids: list[int]
    logprobs: list[float]
    spans: list[WeightSpan] | None = None
    finish_reason: wire.FinishReason | None = None
    experts: RoutedExperts | None = None  # of the prompt and the answer so far; with the last piece alone


class PublishResult(msgspec.Struct, kw_only=True):
    """What it took an engine to serve a version. Seconds of the phases are sums over parts that went on together."""

    version: int
    seconds: float  # of fetching, checking, taking
    paused_s: float  # of these, while the engine sampled nothing
    bytes: int = 0  # that were fetched
    fetch_s: float = 0.0
    write_s: float = 0.0
    check_s: float = 0.0


class EngineClient:
    """``async with EngineClient("http://127.0.0.1:8000") as engine: await engine.generate([1, 2], Sampling())``"""

    def __init__(self, url: str, *, timeout: float = 600.0, tls: Path | None = None):
        """`tls`: the directory of the key that the server wants to see (rollout.engine.tls)."""
        self.url = url.rstrip("/")
        self._trust = True if tls is None else calling(tls)
        self._timeout = aiohttp.ClientTimeout(total=None, connect=5, sock_read=timeout)
        self._flights: collections.Counter[int] = collections.Counter()  # requests of each adapter that are not over
        self._loaded: set[int] = set()  # adapters that the server has
        self.adapter: int | None = None  # the version of the adapter that requests ask for (vLLM), if it is one
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        self._closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "", priority: int = 0
    ) -> Generation:
        with self._flight() as adapter:
            request = _request(prompt_ids, sampling, request_id, priority=priority, adapter=adapter)
            result = generation(await self._post(wire.GENERATE, request, wire.GenerateResponse), sampling)
        if adapter is not None:  # it answers with the requested one, whatever the server is labelled by now
            result.spans = [WeightSpan(adapter, 0, len(result.token_ids))] if result.token_ids else []
        return result

    async def stream(
        self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "", priority: int = 0
    ) -> AsyncGenerator[Delta, None]:
        """The answer as it comes; the last delta has the finish reason and spans. Closing it ends the request."""
        with self._flight() as adapter, _named(self.url + wire.GENERATE):
            body = msgspec.json.encode(
                _request(prompt_ids, sampling, request_id, stream=True, priority=priority, adapter=adapter)
            )
            async with self._open().post(self.url + wire.GENERATE, data=body) as response:
                if response.status >= 400:
                    raise _refusal(self.url + wire.GENERATE, response.status, await response.read())
                count, ended = 0, False
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        delta = _delta(line[6:], count, sampling)
                        count += len(delta.token_ids)
                        ended = ended or delta.finish_reason is not None
                        if adapter is not None:
                            delta.spans = [WeightSpan(adapter, 0, count)] if count else []
                        yield delta
                if not ended:
                    raise EngineFailed(
                        f"engine {self.url} ended the stream of {request_id} in the middle",
                        hint="see the engine's log; the request may be sent again",
                    )

    async def reload(self, directory: Path, version: int, *, timeout: float = 120.0) -> float:
        """Load all weights of a directory in flight. Seconds of the pause.

        `directory` is absolute: an engine has a working directory of its own.

        Requests in flight continue with the new weights from their next token; their caches are computed again.
        """
        request = wire.RpcRequest(method="reload_weights", kwargs={"weights_path": str(directory)})
        return await self._change(lambda: self._post(wire.RPC, request), directory, version, timeout)

    async def patch(self, file: Path, directory: Path, version: int, *, timeout: float = 120.0) -> float:
        """Have each worker of a vLLM server write the changes of a file into its weights. As `reload` otherwise.

        `directory`: the mirror that has this version.
        """

        async def write() -> None:
            await self._request("POST", wire.START_UPDATE)
            await self._post(wire.UPDATE, wire.UpdateRequest({"file": str(file)}))
            await self._request("POST", wire.FINISH_UPDATE)

        return await self._change(write, directory, version, timeout)

    async def loaded(self, version: int) -> None:
        """Inform the workers of a vLLM server which version they have loaded, so that changes can build on it."""
        await self._post(wire.BEGIN_TRANSFER, wire.BeginTransfer({"version": version}))

    async def _change(self, act: Callable[[], Awaitable[None]], directory: Path, version: int, timeout: float) -> float:
        """Change the weights in flight: pause(keep), act, drop caches, label, check, resume."""
        try:
            async with asyncio.timeout(timeout):
                await self.pause("keep")
                paused = time.monotonic()
                await act()
                await self._request("POST", wire.RESET_CACHE, params={"reset_running_requests": "true"})
                await self.set_version(version)
                await self.check(directory, version, reloaded=True)
                await self.resume()
        except TimeoutError:
            raise Timeout(
                f"engine {self.url} did not take version {version} within {timeout:g} s and stays paused",
                hint="restart the engine with the last published weights",
            ) from None
        return time.monotonic() - paused

    async def pause(self, mode: wire.PauseMode = "keep") -> None:
        await self._request("POST", wire.PAUSE, params={"mode": mode})

    async def rest(self) -> None:
        """Do nothing until `resume`: what was on its way is ended, the cache is empty."""
        await self.pause("abort")
        await self._request("POST", wire.RESET_CACHE)

    async def resume(self) -> None:
        await self._request("POST", wire.RESUME)

    async def is_paused(self) -> bool:
        return (await self._get(wire.IS_PAUSED, wire.PauseInfo)).is_paused

    async def abort(self, request_ids: list[str] | None = None) -> None:
        """End these requests; their `generate` returns what they have, with finish_reason abort. None: all."""
        named = [name for item in request_ids or [] for name in (item, wire.VLLM_PREFIX + item)]
        await self._post(wire.ABORT, wire.AbortRequest(request_ids=named))

    async def version(self) -> int:
        return label((await self._get(wire.WEIGHT_INFO, wire.WeightInfo)).weight_version)

    async def set_version(self, version: int) -> None:
        await self._post(wire.SET_VERSION, wire.VersionRequest(str(version)))

    async def pull(self, version: int | None = None) -> wire.PullTimings:
        """Have the engine fetch a version (None: the newest) while it generates. Of an engine with --weights."""
        return await self._post(wire.PULL_WEIGHTS, wire.WeightPull(version), wire.PullTimings)

    async def apply(self, version: int, *, recompute: bool = True) -> wire.ApplyResult:
        """Serve a version that was pulled, from the next token on. Requests in flight continue."""
        return await self._post(wire.APPLY_WEIGHTS, wire.ApplyRequest(version, recompute), wire.ApplyResult)

    @contextlib.contextmanager
    def _flight(self) -> Iterator[int | None]:
        """A request of the adapter of now, which stays loaded until it is over."""
        adapter = self.adapter
        if adapter is not None:
            self._flights[adapter] += 1
        try:
            yield adapter
        finally:
            if adapter is not None:
                self._flights[adapter] -= 1

    async def load_adapter(self, directory: Path, version: int) -> list[int]:
        """Have vLLM load a version of an adapter; requests from now on use it, those in flight continue with theirs.

        vLLM reads `directory` again where it has evicted the adapter: it must stay until the version is unloaded, which
        is with the first call after its last request. Returns the versions that are loaded.
        """
        try:
            await self._post(wire.LOAD_ADAPTER, wire.AdapterRequest(adapter_name(version), str(directory)))
        except Invalid as error:
            if "already been loaded" not in str(error):  # by a process before this one
                raise
        self._loaded.add(version)
        await self.set_version(version)
        self.adapter = version
        for old in [item for item in self._loaded if item != version and not self._flights[item]]:
            with contextlib.suppress(EngineFailed):  # the server does not know it any more
                await self._post(wire.UNLOAD_ADAPTER, wire.AdapterRequest(adapter_name(old)))
            self._loaded.discard(old)
        return sorted(self._loaded)

    async def healthy(self) -> bool:
        try:
            await self._request("GET", wire.HEALTH)
        except EngineFailed:
            return False
        return True

    async def checksums(self) -> dict[str, str]:
        return (await self._post(wire.WEIGHT_CHECKER, wire.CheckerRequest(), wire.Checksums)).checksums

    async def statistics(self) -> wire.EngineStatistics:
        """Of the embedded engine, in part of a vLLM that is co-located; others have no such route (EngineFailed,
        404)."""
        return await self._get(wire.STATISTICS, wire.EngineStatistics)

    async def take(self, version: int) -> PublishResult:
        """Pull a version and apply it. Of an engine with --weights."""
        began = time.monotonic()
        pulled = await self.pull(version)
        applied = await self.apply(version)
        return PublishResult(
            version=version,
            seconds=time.monotonic() - began,
            paused_s=applied.paused_s,
            bytes=pulled.bytes,
            fetch_s=pulled.fetch_s,
            write_s=pulled.write_s,
            check_s=pulled.check_s,
        )

    async def check(self, directory: Path, version: int, *, reloaded: bool = False) -> None:
        """Raise unless the engine computes with the weights of this directory, as far as it lets us see (I9).

        The embedded engine shows all. vLLM fuses and prepacks linear layers (their digest is of no bytes at all) and
        pads embedding and head of a vocabulary that is no multiple of 64, and splits them among several GPUs: what
        remains are the norms, and these two where they are whole.
        """
        reported = await self.checksums()
        live = {name.rpartition(":")[2]: digest for name, digest in reported.items()}
        fused = any("qkv_proj" in name for name in live)
        names = {name for name, digest in live.items() if digest != EMPTY}
        if fused and (len(live) < len(reported) or _config(directory)["vocab_size"] % VLLM_VOCABULARY_MULTIPLE):
            names -= {"model.embed_tokens.weight", "lm_head.weight"}
        if fused and reloaded and _config(directory).get("tie_word_embeddings"):
            raise EngineFailed(
                f"engine {self.url} keeps a tied head of its own, which a reload does not change; it stays paused",
                hint="reload an untied mirror, or restart the engine with the directory",
            )
        expected = await asyncio.to_thread(computed_hashes, directory, names)
        wrong = sorted(name for name, digest in expected.items() if live[name] != digest)
        if wrong:  # unless it computes in the dtype of the directory
            same = await asyncio.to_thread(computed_hashes, directory, wrong, widen=False)
            wrong = [name for name in wrong if live[name] != same[name]]
        if wrong or not expected:
            what = f"{', '.join(wrong[:4])} differ" if wrong else "no parameter could be compared"
            raise EngineFailed(
                f"engine {self.url} does not serve version {version}: {what}", hint="restart the engine with it"
            )

    async def _get(self, path: str, kind: type[T]) -> T:
        return _decode(await self._request("GET", path), kind, path)

    @overload
    async def _post(self, path: str, body: msgspec.Struct) -> None: ...
    @overload
    async def _post(self, path: str, body: msgspec.Struct, kind: type[T]) -> T: ...
    async def _post(self, path: str, body: msgspec.Struct, kind: type[T] | None = None) -> T | None:
        raw = await self._request("POST", path, data=msgspec.json.encode(body))
        return None if kind is None else _decode(raw, kind, path)

    async def _request(
        self, method: str, path: str, *, data: bytes | None = None, params: dict[str, str] | None = None
    ) -> bytes:
        with _named(self.url + path):
            async with self._open().request(method, self.url + path, data=data, params=params) as response:
                raw = await response.read()
        if response.status >= 400:
            raise _refusal(self.url + path, response.status, raw)
        return raw

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            raise EngineFailed(f"engine {self.url} is gone", hint="read the engine's log")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=self._timeout,
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE, ssl=self._trust),
                headers={"content-type": "application/json"},
            )
        return self._session


def adapter_name(version: int) -> str:
    """How a server knows this version: a name of its own, so that nothing cached of another is used for it."""
    return f"policy-{version}"


def _request(
    prompt_ids: list[int],
    sampling: Sampling,
    request_id: str,
    *,
    stream: bool = False,
    priority: int = 0,
    adapter: int | None = None,
) -> wire.GenerateRequest:
    return wire.GenerateRequest(
        model=None if adapter is None else adapter_name(adapter),
        token_ids=prompt_ids,
        request_id=request_id,
        stream=stream,
        priority=priority,
        sampling_params=wire.SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            stop_token_ids=sampling.stop_token_ids,
            seed=sampling.seed,
            ignore_eos=sampling.ignore_eos,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            logprobs=0,
            detokenize=False,
            routed_experts_prompt_start=_routed(sampling),
        ),
    )


@contextlib.contextmanager
def _named(where: str) -> Iterator[None]:
    """Failures of a connection, as ours."""
    try:
        yield
    except TimeoutError as error:
        raise EngineFailed(f"engine {where} did not answer: {error}", hint="read the engine's log") from error
    except aiohttp.ClientError as error:
        raise EngineFailed(
            f"engine {where} is gone: {type(error).__name__}: {error}", hint="read the engine's log"
        ) from error


def _refusal(where: str, status: int, raw: bytes) -> EngineFailed | Invalid:
    kind = Invalid if status == 400 else EngineFailed
    return kind(f"engine {where} answered {status}: {raw[:500].decode('utf-8', 'replace')}")


def _experts(choice: wire.Choice, sampling: Sampling, request_id: str) -> RoutedExperts | None:
    """Of the prompt, where they are not known, and the answer."""
    if choice.routed_experts is None:
        return None
    try:
        return RoutedExperts.read(choice.routed_experts, _routed(sampling))
    except ValueError as error:
        raise EngineFailed(f"request {request_id}: its experts cannot be read: {error}", hint=UNTRIED) from error


def _routed(sampling: Sampling) -> int:
    return sampling.routed if isinstance(sampling, TurnSampling) else 0


def _delta(line: bytes, count: int, sampling: Sampling) -> Delta:
    """One line of a streamed answer, of which `count` tokens were there before."""
    chunk = _decode(line, wire.StreamChunk, wire.GENERATE)
    if chunk.error is not None:
        raise EngineFailed(f"request {chunk.request_id}: {chunk.error.message}", hint="see the engine's log")
    if len(chunk.choices) != 1:
        return Delta(token_ids=[], logprobs=[])
    choice = chunk.choices[0]
    ids = choice.token_ids or []
    content = (choice.logprobs.content or []) if choice.logprobs is not None else []
    if [entry.token_id for entry in content] != ids:
        raise EngineFailed(f"request {chunk.request_id}: logprobs do not match the token ids", hint=UNTRIED)
    if not all(math.isfinite(entry.logprob) for entry in content):
        raise EngineFailed(f"request {chunk.request_id}: a log-probability is not finite", hint=UNTRIED)
    if choice.finish_reason not in (None, "stop", "length", "abort"):
        raise EngineFailed(f"request {chunk.request_id}: finish reason {choice.finish_reason!r}", hint=UNTRIED)
    if choice.finish_reason is None and choice.weight_versions is None:
        spans = None
    else:
        spans = _spans(choice.weight_versions or [], count + len(ids), chunk.request_id)
    return Delta(
        token_ids=ids,
        logprobs=[entry.logprob for entry in content],
        spans=spans,
        finish_reason=choice.finish_reason,  # type: ignore[arg-type]
        experts=_experts(choice, sampling, chunk.request_id),
    )


def _spans(result: list[wire.VersionSpan], count: int, request_id: str) -> list[WeightSpan]:
    """Spans that cover `count` tokens without a gap, or an error."""
    spans = [WeightSpan(label(span.version), span.start, span.end) for span in result]
    edges = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != edges[:-1] or edges[-1] != count:
        raise EngineFailed(f"request {request_id}: weight-version spans {spans} do not cover the tokens", hint=UNTRIED)
    return spans


def _config(directory: Path) -> dict[str, Any]:
    return msgspec.json.decode((directory / "config.json").read_bytes(), type=dict[str, Any])


def label(version: str) -> int:
    """vLLM's labels are strings; ours are integers. An engine without a version has -1."""
    return int(version) if version.lstrip("-").isdigit() else -1


def generation(response: wire.GenerateResponse, sampling: Sampling) -> Generation:
    """Check an answer's shape: every token has a log-probability and exactly one version."""
    choice = response.choices[0] if len(response.choices) == 1 else None
    if choice is None or choice.token_ids is None:
        raise EngineFailed(
            f"request {response.request_id}: the engine's answer has no single choice with token ids", hint=UNTRIED
        )
    content = (choice.logprobs.content or []) if choice.logprobs is not None else []
    if [entry.token_id for entry in content] != choice.token_ids:
        raise EngineFailed(f"request {response.request_id}: logprobs do not match the token ids", hint=UNTRIED)
    spans = _spans(choice.weight_versions or [], len(choice.token_ids), response.request_id)
    if not all(math.isfinite(entry.logprob) for entry in content):
        raise EngineFailed(f"request {response.request_id}: a log-probability is not finite", hint=UNTRIED)
    finish = choice.finish_reason
    if finish not in ("stop", "length", "abort"):
        raise EngineFailed(f"request {response.request_id}: finish reason {finish!r}", hint=UNTRIED)
    return Generation(
        token_ids=choice.token_ids,
        logprobs=[entry.logprob for entry in content],
        spans=spans,
        finish_reason=finish,  # type: ignore[arg-type]
        experts=_experts(choice, sampling, response.request_id),
    )


async def wait_healthy(client: EngineClient, *, every: float = 0.1) -> None:
    """Return when the engine answers its health route. The caller sets the deadline and watches the process."""
    while not await client.healthy():  # noqa: ASYNC110 - the event is another process's
        await asyncio.sleep(every)


def _decode(raw: bytes, kind: type[T], path: str) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise EngineFailed(f"engine route {path} answered nonsense: {error}: {raw[:200]!r}", hint=UNTRIED) from error
