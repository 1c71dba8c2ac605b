"""Images of environments that are built from directories, where the host has none of that name yet.

Names say the content, so what is there is right.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

from rollout.environments.base import Build, Environment
from sandbox import Client
from sandbox.errors import Invalid
from sandbox.messages import Network

log = logging.getLogger("pagurus.rollout")


def needed(environment: Callable[[], Environment], seeds: Iterable[int]) -> dict[str, Build]:
    """What is built for these seeds."""
    made = environment()
    builds = made.builds()
    target = {made.of(seed)[0].image for seed in seeds} if builds else ()
    return {name: build for name, build in builds.items() if name in target}


async def build_missing(
    client: Client, builds: Mapping[str, Build], *, report: Callable[[str], object] = log.info
) -> int:
    """Build those that are not there, one after another; how many they were. A build may reach the network. `report`
    hears of each before it begins."""
    if not builds:
        return 0
    there = {image.name for image in await client.images.list()}
    missing = {name: build for name, build in builds.items() if name not in there}
    for number, (name, build) in enumerate(missing.items(), 1):
        of = build.directory.parent.name
        report(f"builds image {number} of {len(missing)}, {name} of {of}, for {build.seconds:g} s at most")
        try:
            async with asyncio.timeout(build.seconds):
                await client.images.build(name, build.directory, network=Network.open(), replace=True)
        except TimeoutError:
            text = f"the image of {build.directory} was not built within {build.seconds:g} s"
            raise Invalid(text, hint="raise build_timeout_sec in its task.toml") from None
    return len(missing)
