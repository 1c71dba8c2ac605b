"""An image is removed while sandboxes are made of it: each has all of its files, or is not made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from sandbox import Client, Sandbox
from sandbox.errors import PagurusError
from tests.support.daemon_host import until


async def test_an_image_stays_under_a_sandbox_that_is_being_made(host: Client) -> None:
    async with host.create("debian") as base:
        for attempt in range(4):
            await base.files.write("/srv/page", f"{attempt}\n")
            retained = await base.durable(await base.checkpoint())
            await host.images.commit(retained, f"passing{attempt}")
            making = [asyncio.ensure_future(host.create(f"passing{attempt}")._make()) for _ in range(4)]
            await asyncio.sleep(0.02 * attempt)  # until some have resolved the name
            await host.images.remove(f"passing{attempt}")
            for made in await asyncio.gather(*making, return_exceptions=True):
                if isinstance(made, Sandbox):
                    assert (await made.exec("cat /srv/page && ls /bin/sh")).text == f"{attempt}\n/bin/sh\n"
                    await made.remove()
                else:
                    assert isinstance(made, PagurusError), made
        await host.store.collect()


async def test_an_image_stays_under_a_checkpoint_that_is_being_imported(host: Client) -> None:
    async with host.create("debian") as base:
        await host.images.commit(await base.durable(await base.exec("echo there > /srv/page")), "passing")
    async with host.create("passing") as made:
        retained = await made.durable(await made.exec("head -c 8M /dev/urandom > /srv/much"))
        data = b"".join([bytes(part) async for part in host.store.stream(retained.id)])
    removed = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield data[: 4 << 20]
        await removed.wait()
        yield data[4 << 20 :]

    importing = asyncio.ensure_future(host.raw("POST", "/v1/checkpoints/import", slowly(), "application/octet-stream"))
    await until(lambda: _used(host, "passing"), "the import has begun")
    await host.images.remove("passing")
    removed.set()
    await importing
    async with (await host.fork(retained.id))[0].sandbox as back:
        assert (await back.exec("cat /srv/page")).text == "there\n"
    await host.store.remove(retained.id)
    await host.store.collect()


async def _used(host: Client, name: str) -> bool:
    return (await host.images.get(name)).used_by > 0
