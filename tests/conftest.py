"""Fixtures that several test modules share, and how hypothesis runs here.

Examples are derived from the test itself, so that a run on one machine is the run on every other; no time limit is
put on one, for a busy machine would be taken for a slow program. `--hypothesis-profile=search` looks for new ones.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from hypothesis import HealthCheck, settings

from sandbox import Client, Sandbox
from tests.support.checkpoint_support import bench
from tests.support.container_support import either_hierarchy, maker, pool
from tests.support.daemon_host import IMAGE, Daemon, missing

__all__ = ["bench", "either_hierarchy", "maker", "pool"]  # fixtures

settings.register_profile(
    "suite", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("search", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for all tests of a module."""
    yield from _running(tmp_path_factory)


@pytest.fixture
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon of one test alone: it may be killed, filled up, counted."""
    yield from _running(tmp_path_factory)


def _running(factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    if reason := missing():
        pytest.skip(reason)
    daemon = Daemon(factory.mktemp("host"))
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
