"""However many pages are open, what they show is found out once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from daemon.api import overview
from daemon.api.overview import Examination, Readings


async def test_the_control_groups_are_read_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def reading(running: list[Any]) -> list[Any]:
        read.append(len(running))
        return []

    monkeypatch.setattr(overview, "_read", reading)
    host: Any = SimpleNamespace(live_sandboxes={})
    readings = Readings()
    await asyncio.gather(*(readings.latest(host) for _ in range(50)))
    assert read == [0]
    monkeypatch.setattr(overview, "INTERVAL", -1.0)
    await readings.latest(host)
    assert read == [0, 0]


async def test_the_doctor_examines_once_for_all() -> None:
    examined: list[str] = []

    async def run(_: object, *, sandbox: str) -> list[Any]:
        examined.append(sandbox)
        await asyncio.sleep(0)
        return []

    host: Any = SimpleNamespace(services=SimpleNamespace(aside=SimpleNamespace(run=run)))
    examination = Examination()
    await asyncio.gather(*(examination.latest(host) for _ in range(50)))
    assert examined == ["doctor"]
