"""A run directory for the page: ``pagurus view RUN``.

Owns: the routes below ``/v1/run``, which only `pagurus view` serves. Does not own: the run's files, which are only
read.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from sandbox.errors import NotFound

MAX_STEPS = 5000  # lines of metrics.jsonl, the newest


class RunRoutes:
    """The routes of one run directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.name = directory.resolve().name
        if not directory.is_dir():
            raise NotFound(f"no such run directory: {directory}", hint="name one, such as runs/latest")

    def add(self, app: web.Application) -> None:
        app.router.add_get("/v1/run/metrics", self._metrics)
        app.router.add_get("/v1/run/trajectories", self._trajectories)
        app.router.add_get("/v1/run/trajectories/{prompt}/{member:[0-9]+}", self._trajectory)

    async def _metrics(self, request: web.Request) -> web.Response:
        """What each step measured, and the summary of a run that has ended."""
        return _answer(await asyncio.to_thread(self._measured))

    def _measured(self) -> dict[str, Any]:
        lines: deque[dict[str, Any]] = deque(maxlen=MAX_STEPS)
        file, summary = self._directory / "metrics.jsonl", self._directory / "summary.json"
        if file.exists():
            with file.open() as text:
                lines.extend(value for line in text if isinstance(value := _parsed(line), dict))
        ended = _parsed(summary.read_text()) if summary.exists() else None
        return {"steps": list(lines), "summary": ended}

    async def _trajectories(self, request: web.Request) -> web.Response:
        """The trajectories that are kept: prompt, number in its group, status, reward."""
        return _answer(await asyncio.to_thread(self._listed))

    def _listed(self) -> list[dict[str, Any]]:
        with self._store() as store:
            names = ("prompt", "member", "status", "reward")
            return [dict(zip(names, row, strict=True)) for row in store.samples()]

    async def _trajectory(self, request: web.Request) -> web.Response:
        """One of them, with its tokens."""
        prompt, member = request.match_info["prompt"], int(request.match_info["member"])

        def read() -> Any:
            with self._store() as store:
                return store.sample(prompt, member)

        return _answer(await asyncio.to_thread(read))

    def _store(self) -> Any:
        from contextlib import closing

        from rollout.store.samples import SampleStore

        if not (self._directory / "rollout" / "samples.sqlite").exists():
            raise NotFound(f"{self.name} holds no rollouts", hint="name a run directory, such as runs/latest")
        return closing(SampleStore(self._directory / "rollout"))


def _parsed(text: str) -> Any:
    """None where it is no JSON: the last line of a run that writes may be half there."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _answer(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
