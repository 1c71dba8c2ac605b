"""Inspect's own checks of a provider, over a sandbox of ours. Its own Python runs it with pytest."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from inspect_ai.util import SandboxEnvironment
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from pagurus.integrations.inspect import PagurusConfig, PagurusSandboxEnvironment


@pytest.fixture
async def sandbox_env() -> AsyncIterator[SandboxEnvironment]:
    """Of a user who is not root: what a file's mode denies is denied to him."""
    config = PagurusConfig(user="nobody", workdir="/tmp")
    made = await PagurusSandboxEnvironment.sample_init("checks", config, {})
    try:
        yield made["default"]
    finally:
        await PagurusSandboxEnvironment.sample_cleanup("checks", config, made, False)
