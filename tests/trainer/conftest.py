"""A daemon that the processes of a run find by themselves."""

from __future__ import annotations

import pytest

from tests.support.daemon_host import Daemon


@pytest.fixture
def daemon(own: Daemon, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    monkeypatch.setenv("PAGURUS_RUN", str(own.run))
    return own
