"""All hostile acts, by room."""

from __future__ import annotations

from tests.hostile import (
    api,
    calls,
    copies,
    daemon,
    files,
    gateway,
    host,
    images,
    layouts,
    limits,
    network,
    owners,
    shared,
    tenants,
    trees,
)
from tests.hostile.act import ACTS
from tests.hostile.api import API_ACTS

ROOMS = (calls, files, host, images, network, limits, shared, trees)

DAEMON_ROOMS = (api, copies, daemon, gateway, layouts, owners, tenants)

__all__ = ["ACTS", "API_ACTS", "DAEMON_ROOMS", "ROOMS"]
