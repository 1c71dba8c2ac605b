"""Images of environments that are built from folders, where the host has none of that name yet.

Owns: which are missing. Does not own: builds (sandbox.sdk.build). Names say the content, so what is there is right.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from rollout.environments.base import Build
from sandbox import Client
from sandbox.errors import Invalid
from sandbox.messages import Network

log = logging.getLogger("pagurus.rollout")


async def build_missing(client: Client, builds: Mapping[str, Build]) -> int:
    """Build those that are not there, one after another; how many they were. A build may reach the network."""
    if not builds:
        return 0
    there = {image.name for image in await client.images.list()}
    missing = {name: build for name, build in builds.items() if name not in there}
    for name, build in missing.items():
        log.info("building image %s of %s", name, build.folder.parent.name)
        try:
            async with asyncio.timeout(build.seconds):
                await client.images.build(name, build.folder, network=Network.open(), replace=True)
        except TimeoutError:
            text = f"the image of {build.folder} was not built within {build.seconds:g} s"
            raise Invalid(text, remedy="raise build_timeout_sec in its task.toml") from None
    return len(missing)
