"""A daemon for the tools of other people."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.daemon_host import Daemon, missing


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    if reason := missing():
        pytest.skip(reason)
    daemon = Daemon(tmp_path_factory.mktemp("host"))
    try:
        yield daemon.start()
    finally:
        daemon.clean()
