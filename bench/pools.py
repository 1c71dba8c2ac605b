"""`pagurus bench pools`: a pool of engine servers under faults, and its router under 2,000 live trajectories.

Owns: the trajectories, the faults, the checks, the figures. Does not own: the pool.

Two parts. `synthetic`: servers that only wait, in this process, so that what is measured is the router and its loop.
`real`: two servers of SmolLM2-135M (`make setup-models`; vLLM by `make setup-vllm`); weights change three times while
trajectories of several turns are under way, one server is killed, one is stopped with SIGSTOP; afterwards each sampled
token's log-probability is compared with a plain forward pass of the version that its span names.
`engine_efficiency` is the same requests, sent bare to the same servers, over the time that the stack took.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness import command
from rollout.calm import calm
from rollout.decide.routing import RoutingRules
from rollout.engine.client import Delta, EngineClient, Generation, Published, Sampling, Span
from rollout.engine.launch import vllm
from rollout.engine.supervisor import EngineSupervisor
from rollout.episode.renderer import ChatRenderer, Message
from rollout.pool.pool import Pool
from sandbox.errors import EngineFailed, NotFound
from sandbox.paths import CHECKOUT

MODEL = CHECKOUT / ".prefix" / "models" / "SmolLM2-135M-Instruct"
TOLERANCE = 1e-3
LENGTH = 2048  # tokens of the longest trajectory
TURNS_MOST = 64
START = 900.0  # seconds for a server to start, or to take weights, on a machine that is busy
ASKED = ["List the files of this folder.", "Which of them is the largest?", "Write one line of shell that counts them."]


def main(arguments: list[str] | None = None) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--part", choices=["synthetic", "real", "all"], default="all")
    parser.add_argument("--live", type=int, default=2000, help="synthetic trajectories at once")
    parser.add_argument("--trajectories", type=int, default=64, help="real ones at once")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24, help="of an answer")
    parser.add_argument("--threads", type=int, default=1, help="of each server")
    parser.add_argument("--rounds", type=int, default=3, help="of the comparison with bare servers; 0: none")
    parser.add_argument(
        "--checked", type=int, default=64, help="trajectories whose log-probabilities are computed again"
    )
    parser.add_argument("--silence", type=float, default=60.0, help="seconds without a token until a server hangs")
    parser.add_argument("--home", type=Path, help="where the versions of the model are kept for the next time")
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    if options.part in ("synthetic", "all"):
        found |= asyncio.run(synthetic(options.live))
    if options.part in ("real", "all"):
        found |= asyncio.run(real(options))
    command.show(found, options)
    return 0


# --------------------------------------------------------------------------- synthetic


PIECE = 8  # tokens of one delta
PAUSE = 1.0  # seconds between two deltas of one answer
SERVERS = 8


class WaitingServer:
    """An engine server without an engine: it gives `PIECE` tokens every `PAUSE` seconds."""

    def __init__(self, slots: int):
        self.slots, self.alive, self.generated = slots, True, 0

    async def wait_serving(self) -> Any:
        while not self.alive:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.05)
        return self

    async def fetch(self, version: int) -> None:
        return None

    async def publish(self, folder: Path | str, version: int) -> Published:
        return Published(version=version, seconds=0.0, paused_s=0.0)

    def kill(self) -> None:
        self.alive = False

    async def version(self) -> int:
        return 0

    async def healthy(self) -> bool:
        return self.alive

    async def stream(
        self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "", priority: int = 0
    ) -> AsyncGenerator[Delta, None]:
        given = 0
        while given < sampling.max_tokens:
            await asyncio.sleep(PAUSE * random.uniform(0.5, 1.5))
            if not self.alive:
                raise EngineFailed("it is dead")
            count = min(PIECE, sampling.max_tokens - given)
            given += count
            self.generated += count
            last = given == sampling.max_tokens
            yield Delta(
                token_ids=list(os.urandom(count)),
                logprobs=[-1.0] * count,
                spans=[Span(0, 0, given)] if last else None,
                finish_reason="length" if last else None,
            )


async def _strike(servers: list[WaitingServer]) -> None:
    """Each dies for two seconds, one after the other."""
    for server in servers:
        await asyncio.sleep(6)
        server.alive = False
        await asyncio.sleep(2)
        server.alive = True


async def synthetic(live: int) -> dict[str, Any]:
    """`live` trajectories of four turns that grow from a prompt which eight of them share; two servers die."""
    servers = {f"s{n}": WaitingServer(live // SERVERS * 5 // 4) for n in range(SERVERS)}
    lags, busy = list[float](), list[float]()  # of these, while this process computed: the rest is the machine's
    calm()
    openings = [os.urandom(400) for _ in range(live // 8 + 1)]
    async with Pool(rules=RoutingRules(silence=30)) as pool:
        for name, server in servers.items():
            await pool.join(name, server)

        async def lag() -> None:
            while True:
                began, worked = time.perf_counter(), time.process_time()
                await asyncio.sleep(0.01)
                late = time.perf_counter() - began - 0.01
                lags.append(1000 * late)
                busy.append(1000 * min(late, time.process_time() - worked))

        async def play(number: int) -> int:
            ids = list(openings[number // 8])
            await asyncio.sleep(4 * random.random())
            kept = 0
            for _ in range(4):
                generation = await pool.generate(ids, Sampling(max_tokens=40))
                kept += len(generation.token_ids)
                ids += [*generation.token_ids, *os.urandom(60)]
            return kept

        quiet = asyncio.create_task(lag())  # what the machine itself does to a loop
        await asyncio.sleep(5)
        quiet.cancel()
        idle_lag, lags[:], busy[:] = _p99(lags), [], []
        used = time.process_time()
        watching, striking = asyncio.create_task(lag()), asyncio.create_task(_strike([servers["s1"], servers["s5"]]))
        began = time.monotonic()
        kept = await asyncio.gather(*(play(number) for number in range(live)))
        seconds = time.monotonic() - began
        watching.cancel()
        striking.cancel()
        generated = sum(server.generated for server in servers.values())
        found = pool.statistics()
        return {
            "synthetic_live": live,
            "synthetic_s": round(seconds, 1),
            "router_ms_p50": round(statistics.median(pool.slow_ms), 3),
            "router_ms_p99": round(_p99(pool.slow_ms), 3),
            "loop_lag_idle_ms_p99": round(idle_lag, 2),
            "loop_lag_ms_p50": round(statistics.median(lags), 2),
            "loop_lag_ms_p99": round(_p99(lags), 2),
            "loop_busy_ms_p99": round(_p99(busy), 2),
            "router_cpu_share": round((time.process_time() - used) / seconds, 3),
            "prefix_hit_share": round(float(found["prefix_hit_share"]), 4),  # type: ignore[arg-type]
            "failovers": pool.counts["moved"],
            "failover_tokens_kept": pool.counts["moved_tokens"],
            "failover_tokens_resampled": generated - sum(kept),
        }


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


# --------------------------------------------------------------------------- real


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


async def real(options: argparse.Namespace) -> dict[str, Any]:
    if not (MODEL / "config.json").exists():
        raise NotFound(f"no model at {MODEL}", remedy="run `make setup-models`")
    home = options.home or Path(tempfile.mkdtemp(prefix="pagurus-pools-"))
    try:
        return await _real(options, home)
    finally:
        if options.home is None:
            shutil.rmtree(home, ignore_errors=True)


async def _real(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    folders = await asyncio.to_thread(_versions, home, 4)
    renderer = await asyncio.to_thread(ChatRenderer.load, MODEL)
    launch = dataclasses.replace(vllm(slots=32, length=LENGTH, threads=options.threads), start_timeout=START)
    rules = RoutingRules(silence=options.silence, update=START)
    async with AsyncExitStack() as stack:
        servers = {name: EngineSupervisor(launch, home / "weights", 0, log=home / f"{name}.log") for name in "ab"}
        await asyncio.gather(*(stack.enter_async_context(server) for server in servers.values()))
        pool = await stack.enter_async_context(Pool(rules=rules))
        for name, server in servers.items():
            await pool.join(name, server)
        efficiency = 0.0 if not options.rounds else await _efficiency(pool, servers, renderer, options)
        began, played, over = time.monotonic(), [Played() for _ in range(options.trajectories)], asyncio.Event()
        tasks = [asyncio.create_task(_play(pool, renderer, n, each, options, over)) for n, each in enumerate(played)]
        disturbed = _Disturbed(pool, servers, folders, played, tasks)
        try:
            await disturbed.go()
        finally:
            over.set()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        lost = [each for each in ended if isinstance(each, BaseException)]
        seconds = time.monotonic() - began
        counts = dict(pool.counts)
    some = random.Random(0).sample(played, min(options.checked, len(played)))
    checked = await asyncio.to_thread(_check, some, folders)
    sampled = sum(len(generation.token_ids) for each in played for _, generation in each.answers)
    return {
        "servers": "2 x vLLM, SmolLM2-135M, fp32",
        "trajectories": options.trajectories,
        "turns": options.turns,
        "seconds": round(seconds, 1),
        "tokens_sampled": sampled,
        **disturbed.log,
        "engine_efficiency": round(efficiency, 3) or None,
        "trajectories_lost": len(lost),
        "why": sorted({f"{type(each).__name__}: {each}"[:200] for each in lost})[:3],
        "replayed": sum(each.replayed for each in played),
        "real_failover_tokens_resampled": counts.get("dropped_tokens", 0),  # heard while it took weights
        "retokenised": sum(isinstance(each, ValueError) for each in lost),  # a turn that is no exact extension
        "real_failovers": counts.get("moved", 0),
        "real_failover_tokens_kept": counts.get("moved_tokens", 0),
        "servers_lost": counts.get("lost", 0),
        "servers_hung": counts.get("hung", 0),
        "tokens_by_version": {str(v): sum(len(each.tokens_of(v)) for each in played) for v in range(len(folders))},
        "mixed_answers": sum(len(g.spans) > 1 for each in played for _, g in each.answers),
        **checked,
    }


def _versions(home: Path, count: int) -> list[Path]:
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
    folders = [home / f"v{version:06d}" for version in range(count)]
    for version, folder in enumerate(folders):
        put_together(store, folder, version)
    return folders


async def _play(
    pool: Pool,
    renderer: ChatRenderer,
    number: int,
    played: Played,
    options: argparse.Namespace,
    over: asyncio.Event | None = None,
) -> None:
    """A chat of some turns, and of more until it is `over`; each next prompt is an exact extension of the tokens."""
    messages: list[Message] = [{"role": "user", "content": f"Task {number}. {ASKED[number % len(ASKED)]}"}]
    played.ids = renderer.open(messages)
    sampling = Sampling(max_tokens=options.tokens, temperature=1.0, stop_token_ids=renderer.stops)
    for turn in range(TURNS_MOST):
        at, before = len(played.ids), list(played.ids)
        generation = await _hear(pool, before, sampling)
        played.answers.append((at, generation))
        played.ids += generation.token_ids
        if turn + 1 >= options.turns and (over is None or over.is_set()):
            return
        messages.append(renderer.parse(generation.token_ids, before).message())
        new: Message = {"role": "user", "content": f"It said {number + turn}. Go on."}
        longer = renderer.bridge(played.ids, messages, [new])
        if longer is None or longer[: len(played.ids)] != played.ids:
            raise ValueError(f"turn {turn} of trajectory {number} is no extension of its tokens")
        if len(longer) + options.tokens > LENGTH:
            return
        played.ids = longer
        messages.append(new)


async def _hear(pool: Pool, ids: list[int], sampling: Sampling) -> Generation:
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


@dataclass
class _Disturbed:
    """Weights, a kill, weights, a stop, weights, each while trajectories are under way."""

    pool: Pool
    servers: dict[str, EngineSupervisor]
    folders: list[Path]
    played: list[Played]
    tasks: list[asyncio.Task[None]]
    log: dict[str, Any] = field(default_factory=dict)

    async def go(self) -> None:
        every = max(1, len(self.played) // 2)  # answers between two of them
        for version in (1, 2, 3):
            await self._further(every)
            began = self._answers
            published = await self.pool.publish(self.folders[0].parent / "weights", version)
            self.log[f"update_{version}_s"] = round(published.seconds, 1)
            self.log[f"answers_meanwhile_{version}"] = self._answers - began
            await self._further(every)
            if version == 1:
                await self._strike("a", signal.SIGKILL, "lost")
            elif version == 2:
                await self._strike("b", signal.SIGSTOP, "hung")
        self.log["updates_in_flight"] = sum(not task.done() for task in self.tasks) and 3

    @property
    def _answers(self) -> int:
        return sum(len(each.answers) for each in self.played)

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Ends too when no trajectory is left."""
        while not condition() and not all(task.done() for task in self.tasks):  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def _further(self, count: int) -> None:
        wanted = self._answers + count
        await self._until(lambda: self._answers >= wanted)

    async def _strike(self, name: str, how: signal.Signals, found: str) -> None:
        """A server that works is hit, while the other one serves too; until the pool has noticed."""
        members = self.pool.members
        await self._until(
            lambda: all(member.state == "serving" for member in members.values()) and members[name].load > 0
        )
        pid = self.servers[name].pid
        assert pid is not None
        began, load, before = time.monotonic(), members[name].load, self.pool.counts[found]
        os.killpg(pid, how)
        await self._until(lambda: self.pool.counts[found] > before)
        self.log[found] = {"server": name, "its_requests": load, "noticed_s": round(time.monotonic() - began, 1)}


class _Bare:
    """The servers without a pool: requests in turn."""

    def __init__(self, clients: list[EngineClient]):
        self.clients, self.asked = clients, 0

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Generation:
        self.asked += 1
        return await self.clients[self.asked % len(self.clients)].generate(prompt_ids, sampling)


async def _efficiency(
    pool: Pool, servers: dict[str, EngineSupervisor], renderer: ChatRenderer, options: argparse.Namespace
) -> float:
    """The same requests bare, over the time of the stack: alternately, three times each, the medians."""
    clients = [await server.wait_serving() for server in servers.values()]
    stack_s, bare_s = [], []
    small = argparse.Namespace(turns=2, tokens=12)

    async def stacked() -> tuple[float, list[list[tuple[list[int], int]]]]:
        played = [Played() for _ in range(32)]
        began = time.perf_counter()
        await asyncio.gather(*(_play(pool, renderer, n, each, small) for n, each in enumerate(played)))
        took = time.perf_counter() - began
        return took, [[(each.ids[:at], len(g.token_ids)) for at, g in each.answers] for each in played]

    async def bare(trace: list[list[tuple[list[int], int]]]) -> float:
        engine = _Bare(clients)

        async def follow(requests: list[tuple[list[int], int]]) -> None:
            for ids, count in requests:
                await engine.generate(ids, Sampling(max_tokens=count, ignore_eos=True))

        began = time.perf_counter()
        await asyncio.gather(*map(follow, trace))
        return time.perf_counter() - began

    async def empty() -> None:
        for client in clients:
            await client._request("POST", "/reset_prefix_cache")

    for _ in range(options.rounds):
        await empty()
        took, trace = await stacked()
        stack_s.append(took)
        await empty()
        bare_s.append(await bare(trace))
    return statistics.median(bare_s) / statistics.median(stack_s)


def _check(played: list[Played], folders: list[Path]) -> dict[str, Any]:
    """Each sampled token's log-probability against a forward pass of the version that its span names."""
    import torch
    from transformers import AutoModelForCausalLM

    errors: dict[int, list[float]] = {}
    for version, folder in enumerate(folders):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
        for each in played:
            wanted = each.tokens_of(version)
            if not wanted:
                continue
            places = [at for at, _ in wanted]
            with torch.no_grad():  # only as far, and the head only where, it is asked for
                hidden = model.model(torch.tensor([each.ids[: max(places)]])).last_hidden_state[0]
                logprobs = torch.log_softmax(model.lm_head(hidden[[at - 1 for at in places]]).float(), dim=-1)
            seen = logprobs[range(len(places)), [each.ids[at] for at in places]].tolist()
            errors.setdefault(version, []).extend(
                abs(told - found) for (_, told), found in zip(wanted, seen, strict=True)
            )
    every = [error for found in errors.values() for error in found]
    return {
        "checked_trajectories": len(played),
        "checked_tokens_by_version": {str(version): len(found) for version, found in sorted(errors.items())},
        "logprob_error_max": max(every, default=None),
        "logprob_wrong": sum(error > TOLERANCE for error in every),
    }
