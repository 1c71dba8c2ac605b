"""A model that answers by a script, and a sandbox whose agent asks it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from sandbox import Client, Sandbox
from sandbox.messages import Gateway
from sandbox.messages import Upstream as Address
from tests.support.daemon_host import IMAGE
from tests.support.gateway_upstream import Upstream


@pytest.fixture
async def upstream(host: Client) -> AsyncIterator[Upstream]:
    async with Upstream() as upstream:
        await host.gateway.put("scripted", Address(url=upstream.url))
        yield upstream


@pytest.fixture
async def inside(host: Client, upstream: Upstream) -> AsyncIterator[Sandbox]:
    async with host.create(IMAGE, gateway=Gateway(upstream="scripted")) as sandbox:
        yield sandbox
