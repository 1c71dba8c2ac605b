"""A sandbox goes on from a state of its own, never from another's: its owner would see that one's memory and files."""

from __future__ import annotations

import pytest

from sandbox import Client
from sandbox.errors import Conflict
from sandbox.messages import SandboxInfo
from sandbox.messages.cluster import ArriveRequest, Left


@pytest.mark.parametrize("ahead", [False, True])
async def test_nothing_arrives_from_another_ones_checkpoint(host: Client, ahead: bool) -> None:
    async with host.create("debian") as other:
        secret = await other.durable(await other.exec("echo secret > /srv/secret"))
        gone = await host.create("debian")
        own = await gone.durable(await gone.exec("echo own > /srv/own"))
        left = await host.call("POST", f"/v1/sandboxes/{gone.id}/left", Left)
        assert left.checkpoint == own.id
        wanted = ArriveRequest(id=gone.id)
        if ahead:  # a container and a pid 1 of its own wait for it
            prepare = ArriveRequest(id=gone.id, ahead=True)
            await host.call("POST", f"/v1/checkpoints/{own.id}/arrive", SandboxInfo, prepare)
        with pytest.raises(Conflict, match="of another sandbox"):
            await host.call("POST", f"/v1/checkpoints/{secret.id}/arrive", SandboxInfo, wanted)
        await host.call("POST", f"/v1/checkpoints/{own.id}/arrive", SandboxInfo, wanted)
        there = await host.get(gone.id)
        assert (await there.exec("ls /srv")).text == "own\n"
        await there.remove()
