"""What all plug-ins share, against the public fake: no tool is needed for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pagurus.integrations import common
from sandbox.messages.runs import RUN_LABEL
from sandbox.testing import FakeHost


@pytest.fixture
async def fake(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeHost]:
    async with FakeHost() as fake:
        monkeypatch.setenv("PAGURUS_HOST", fake.address)
        monkeypatch.setattr(common, "_runs", {})
        yield fake
        await asyncio.to_thread(common.leave_run)


def two_in_a_thread() -> Any:
    with common.connect_blocking() as host:
        return common.start_blocking(host, tool="two")


async def test_a_sandbox_belongs_to_the_run_of_its_process_unless_it_stays(fake: FakeHost) -> None:
    async with fake.client() as host:
        one = await common.start(host, tool="one")
        two = await asyncio.to_thread(two_in_a_thread)
        stays = await common.start(host, tool="one", keep=True)
        run = common.run_of_process()
        labels = {info.id: info.labels for info in await host.sandboxes()}
        assert labels[one.id] == {common.TOOL: "one", RUN_LABEL: run.id}
        assert labels[two.id] == {common.TOOL: "two", RUN_LABEL: run.id}
        assert labels[stays.id] == {common.TOOL: "one"}
        await common.let_stay(host, "one")
        labels = {info.id: info.labels for info in await host.sandboxes()}
        assert RUN_LABEL not in labels[one.id] and RUN_LABEL in labels[two.id]


async def test_a_run_is_named_and_bounded_by_variables(fake: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGURUS_RUN", "night-7")
    monkeypatch.setenv("PAGURUS_LEASE", "45")
    run = await asyncio.to_thread(common.run_of_process)
    assert (run.id, run.lease) == ("night-7", 45.0)
