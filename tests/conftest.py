"""Fixtures that several test modules share: a real daemon per module, a client of it, a sandbox per test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from sandbox import Client, Sandbox
from tests.daemon_host import IMAGE, Daemon, missing


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    if reason := missing():
        pytest.skip(reason)
    daemon = Daemon(tmp_path_factory.mktemp("host"))
    try:
        yield daemon.start()
    finally:
        daemon.clean()


@pytest.fixture
async def host(daemon: Daemon) -> AsyncIterator[Client]:
    async with daemon.client() as client:
        yield client


@pytest.fixture
async def sb(host: Client) -> AsyncIterator[Sandbox]:
    async with host.create(IMAGE) as sandbox:
        yield sandbox
