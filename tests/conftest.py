"""Fixtures that several test modules share, how tests run side by side, and how hypothesis runs here.

The files of the suite are spread over worker processes (`make test`). A test that is marked `alone` waits until no
other test runs, and lets none begin before it has ended.

Examples are derived from the test itself, so that a run on one machine is the run on every other; no time limit is
put on one, for a busy machine would be taken for a slow program. `--hypothesis-profile=search` looks for new ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from daemon.auth.access import CALLER
from sandbox import Client, Sandbox
from tests.support.checkpoint_support import bench
from tests.support.cluster import Cluster
from tests.support.container_support import either_hierarchy, maker, pool
from tests.support.daemon_host import IMAGE, Daemon, missing

__all__ = ["bench", "either_hierarchy", "maker", "pool"]  # fixtures

settings.register_profile(
    "suite", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("search", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

HERE = Path(__file__).parent
# Workers take these files first, in this order: who takes the last of all has little to do when the others have ended.
# One with tests that are `alone` leads, for at the beginning nobody has to come to an end for it. By the times of
# `make test`; `--durations` shows them.
LONGEST = (
    "coordinator/test_jobs.py",
    "rollout/test_paged.py",
    "daemon/store/test_images.py",
    "trainer/test_distributed.py",
    "trainer/test_run.py",
    "rollout/test_supervisor.py",
    "trainer/test_steps.py",
    "conformance/compose/test_compositions.py",
    "conformance/test_inspector.py",
    "daemon/store/test_retention.py",
    "coordinator/test_failover.py",
    "daemon/api/test_fuzz.py",
    "daemon/host/test_recovery.py",
    "ebpf/test_inspector.py",
    "hostile/test_acts.py",
    "daemon/gateway/test_agents.py",
    "rollout/test_verifiers.py",
    "pagurus/test_cli.py",
    "trainer/test_recorded.py",
    "trainer/test_handover.py",
    "trainer/test_chat_run.py",
    "trainer/test_policy.py",
    "rollout/test_pool.py",
    "rollout/test_engine.py",
    "rollout/test_evaluate.py",
    "sandbox/criu/test_held.py",
    "sandbox/criu/test_processes.py",
    "bench/test_tree_learning.py",
    "rollout/test_rewards.py",
    "rollout/test_agent_trains.py",
    "sandbox/criu/test_waits.py",
    "rollout/test_store.py",
    "examples/test_twin.py",
    "daemon/checkpoints/test_held_names.py",
    "trainer/test_weights_ranks.py",
)
STARTED = pytest.StashKey[bool]()  # of a session in which a daemon has started


@contextlib.contextmanager
def locked(path: Path, how: int) -> Iterator[None]:
    """A lock that all workers of this checkout share."""
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, how)
        yield
    finally:
        os.close(handle)


def pytest_configure() -> None:
    """Who ends a session with SIGTERM, as `timeout` does, has its daemons and mounts cleaned up as with Ctrl-C.

    A session in the background of a script was started with SIGINT ignored, as all that it starts would be: tests that
    send one to their programs would wait for ever.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A torture may take its hours; every other test has the limit of pyproject.toml. Long files come first."""
    rank = {HERE / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))
    for item in items:
        if item.get_closest_marker("long") is not None:
            item.add_marker(pytest.mark.timeout(0))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    """Many tests at a time, or one that is `alone`: it holds the door while those that run come to their end."""
    alone = item.get_closest_marker("alone") is not None
    with contextlib.ExitStack() as capacity:
        with locked(HERE, fcntl.LOCK_EX):  # the door
            capacity.enter_context(locked(HERE / "conftest.py", fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        return (yield)


@pytest.fixture(autouse=True)
def caller() -> Iterator[None]:
    """A test that acts as some caller leaves nobody as that caller to the tests after it."""
    before = CALLER.get()
    yield
    CALLER.set(before)


@pytest.fixture(scope="module")
def daemon(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for all tests of a module."""
    yield from _running(request.session, tmp_path_factory)


@pytest.fixture
def own(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon of one test alone: it may be killed, filled up, counted."""
    yield from _running(request.session, tmp_path_factory)


def _running(session: pytest.Session, factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    if reason := missing():
        pytest.skip(reason)
    daemon = Daemon(factory.mktemp("host"))
    try:
        try:
            daemon.start()
        except RuntimeError as error:
            if STARTED not in session.stash:
                session.shouldstop = f"no daemon starts on this host, so no more is tried: {error}"
            raise
        session.stash[STARTED] = True
        yield daemon
    finally:
        daemon.clean()


@pytest.fixture(scope="module")
def cluster(
    request: pytest.FixtureRequest, daemon: Daemon, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A coordinator over two daemons, for all tests of a module: the one that they share, and another."""
    other = _running(request.session, tmp_path_factory)
    second = next(other)
    made = Cluster(tmp_path_factory.mktemp("cluster"), "--lease", "15")  # a busy machine makes no host silent
    try:
        made.start()
        made.add("one", daemon)
        made.add("two", second)
        yield made
    finally:
        made.clean()
        other.close()


@pytest.fixture
async def host(daemon: Daemon) -> AsyncIterator[Client]:
    async with daemon.client() as client:
        yield client


@pytest.fixture
async def sb(host: Client) -> AsyncIterator[Sandbox]:
    async with host.create(IMAGE) as sandbox:
        yield sandbox
