"""What the tests of the API share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest

from tests.support.daemon_host import Daemon


@pytest.fixture
async def raw(daemon: Daemon) -> AsyncIterator[aiohttp.ClientSession]:
    """Plain HTTP over the daemon's socket."""
    connector = aiohttp.UnixConnector(str(daemon.socket))
    async with aiohttp.ClientSession("http://daemon", connector=connector) as session:
        yield session
