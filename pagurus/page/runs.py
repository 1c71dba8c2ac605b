"""A run directory for the page: ``pagurus view RUN``."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from pagurus.page.messages import (
    RunGrid,
    RunMember,
    RunPieces,
    RunRow,
    RunState,
    RunStates,
    RunTimes,
    TimePart,
    TimeShare,
)
from sandbox.errors import NotFound

if TYPE_CHECKING:
    from rollout.decide.blame import TrajectoryFailure
    from rollout.gantt.drawing import LaneGroup
    from rollout.store.samples import SampleStore
    from rollout.tokenizer import DirectoryTokenizer

MAX_STEPS = 5000  # lines of metrics.jsonl, the newest
MAX_BARS = 20_000  # of all lanes together, the newest
TIME_SHOWN = 600.0  # seconds of a run, the newest
_ONE = "/v1/run/trajectories/{prompt}/{member:[0-9]{1,9}}"


class RunRoutes:
    """The routes of one run directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._rollout = directory / "rollout"
        self.name = directory.resolve().name
        if not directory.is_dir():
            raise NotFound(f"no such run directory: {directory}", hint="name one, such as runs/latest")

    def add(self, app: web.Application) -> None:
        for path, read in (
            ("/v1/run/metrics", self._metrics),
            ("/v1/run/status", self._status),
            ("/v1/run/times", self._times),
            ("/v1/run/trajectories", self._trajectories),
            ("/v1/run/trajectories/{prompt}", self._group),
            (_ONE, self._trajectory),
            (f"{_ONE}/states", self._states),
            (f"{_ONE}/pieces", self._pieces),
        ):
            app.router.add_get(path, _answering(read))

    # ----------------------------------------------------------------- all of it

    def _metrics(self, request: web.Request) -> object:
        """What each step measured, and the summary of a run that has ended."""
        lines: deque[dict[str, object]] = deque(maxlen=MAX_STEPS)
        file, summary = self._directory / "metrics.jsonl", self._directory / "summary.json"
        if file.exists():
            with file.open() as text:
                lines.extend(value for line in text if isinstance(value := _parsed(line), dict))
        ended = _parsed(summary.read_text()) if summary.exists() else None
        return {"steps": list(lines), "summary": ended}

    def _status(self, request: web.Request) -> object:
        """What the rollout does, and why who waits."""
        from rollout.store.status import read_status

        return read_status(self._rollout)

    def _times(self, request: web.Request) -> RunTimes:
        """Where the newest time went: engines, trajectories, trainer."""
        from rollout.gantt.chart import COLOURS, read

        self._need_rollouts()
        time = read(self._rollout, TIME_SHOWN)
        left_out = max(0, sum(len(lane.bars) for part in time.parts for lane in part.lanes) - MAX_BARS)
        since = _oldest_shown(time.parts) if left_out else time.since
        parts = [_part(item, since, time.since, time.until) for item in time.parts]
        return RunTimes(since=since, until=time.until, parts=parts, colours=COLOURS, left_out=left_out)

    # ----------------------------------------------------------------- trajectories

    def _trajectories(self, request: web.Request) -> RunGrid:
        """The trajectories that are kept, and whose fault it was where one failed."""
        with self._store() as store:
            failures = store.failures()
            rows = [
                RunRow(prompt=prompt, member=member, status=status, reward=reward, **_blamed(failures, prompt, member))
                for prompt, member, status, reward in store.samples()
            ]
            return RunGrid(rows=rows, given_up=store.given_up())

    def _group(self, request: web.Request) -> list[RunMember]:
        """Those of one prompt, and which of them branched off which."""
        prompt = request.match_info["prompt"]
        with self._store() as store:
            return [
                RunMember(
                    prompt=prompt, member=one.index, status=one.status, reward=one.reward, start=one.start,
                    turns=len(one.turns), lineage=one.lineage,
                )
                for one in (store.sample(prompt, item.member) for item in store.finished(prompt))
            ]  # fmt: skip

    def _trajectory(self, request: web.Request) -> object:
        """One of them, with its tokens."""
        with self._store() as store:
            return store.sample(*_named(request))

    def _states(self, request: web.Request) -> RunStates:
        """Where a sandbox can continue from it."""
        from rollout.timetravel import visitable

        self._need_rollouts()
        try:
            visits = [origin.visit for origin in visitable(self._rollout, *_named(request))]
        except NotFound as error:
            return RunStates(reason=str(error))
        return RunStates(states=[RunState(turn=visit.turn, checkpoint=visit.checkpoint) for visit in visits])

    def _pieces(self, request: web.Request) -> RunPieces:
        """Its tokens as text."""
        with self._store() as store:
            tokens = store.sample(*_named(request)).tokens
        if self._tokenizer is None:
            return RunPieces(reason=f"{self.name} has no policy/tokenizer.json, or tokenizers are not installed here")
        return RunPieces(pieces=self._tokenizer.pieces(tokens))

    @cached_property
    def _tokenizer(self) -> DirectoryTokenizer | None:
        directory = self._directory / "policy"
        if not (directory / "tokenizer.json").exists():
            return None
        try:
            from rollout import tokenizer
        except ModuleNotFoundError:  # `make setup` has none
            return None
        return tokenizer.load(directory)

    def _need_rollouts(self) -> None:
        if not (self._rollout / "samples.sqlite").exists():
            raise NotFound(f"{self.name} holds no rollouts", hint="name a run directory, such as runs/latest")

    def _store(self) -> closing[SampleStore]:
        from rollout.store.samples import SampleStore

        self._need_rollouts()
        return closing(SampleStore(self._rollout, create=False))


def _blamed(failures: Mapping[tuple[str, int], TrajectoryFailure], prompt: str, member: int) -> dict[str, str]:
    from rollout.decide.blame import blame

    failure = failures.get((prompt, member))
    return {} if failure is None else {"blame": blame(failure), "cause": f"{failure.phase}/{failure.cause}"}


def _named(request: web.Request) -> tuple[str, int]:
    return request.match_info["prompt"], int(request.match_info["member"])


def _answering(read: Callable[[web.Request], object]) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """A handler that reads in a thread."""

    async def handle(request: web.Request) -> web.Response:
        value = await asyncio.to_thread(read, request)
        return web.Response(body=msgspec.json.encode(value), content_type="application/json")

    return handle


def _part(part: LaneGroup, since: float, full_since: float, until: float) -> TimePart:
    """`since`: of its bars. `full_since`: of the time whose shares are reported."""
    from rollout.gantt.drawing import Lane, shares

    lanes = [Lane(lane.name, [bar for bar in lane.bars if bar.end > since]) for lane in part.lanes]
    reported = [
        TimeShare(kind=kind, seconds=seconds, share=share) for kind, seconds, share in shares(part, full_since, until)
    ]
    return TimePart(title=part.title, lanes=lanes, shares=reported, said=part.said)


def _oldest_shown(parts: list[LaneGroup]) -> float:
    """The moment behind which `MAX_BARS` bars end."""
    ends = sorted((bar.end for part in parts for lane in part.lanes for bar in lane.bars), reverse=True)
    return ends[MAX_BARS]


def _parsed(text: str) -> object:
    """None where it is no JSON: the last line of a run that writes may be half there."""
    try:
        return json.loads(text)
    except ValueError:
        return None
