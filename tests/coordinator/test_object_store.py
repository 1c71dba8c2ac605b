"""States in a directory and in a bucket of a real S3 server: by content, whole or not there, as many as are needed."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from coordinator.decide import replicate
from coordinator.object_store import ObjectStore
from sandbox.errors import Invalid, NotFound, Protocol
from tests.sandbox.content.test_joined import content, pieces, stream

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The address of a server with a bucket `copies`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in KEYS.items():
            patch.setenv(name, value)
        running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        running.start()
        try:
            address = "http://{}:{}".format(*running.get_host_and_port())
            boto3.client("s3", endpoint_url=address).create_bucket(Bucket="copies")
            yield address
        finally:
            running.stop()


@pytest.fixture(params=["directory", "bucket"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "directory":
        return str(tmp_path / "store")
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("bucket"))
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    return f"s3://copies/{os.path.basename(tmp_path)}"


async def sent(data: bytes) -> AsyncIterator[bytes]:
    for piece in pieces(data):
        yield piece


async def keep(store: ObjectStore, number: int, since: int | None = None) -> None:
    base = "" if since is None else f"c-{since:06}"
    await store.take("s-000001", f"c-{number:06}", sent(stream(number, since)), base)


async def result(store: ObjectStore, number: int) -> bytes:
    async with store.given("s-000001", f"c-{number:06}", "") as parts:
        return b"".join([part async for part in parts])


async def test_a_state_is_made_of_what_was_sent_of_it_and_of_those_before(url: str) -> None:
    store = ObjectStore(url)
    await keep(store, 0)
    await keep(store, 1, since=0)
    await keep(store, 2, since=1)
    for reader in (store, ObjectStore(url)):  # the next coordinator finds the same
        for number in (1, 2):
            assert content(await result(reader, number)) == content(stream(number))
    await ObjectStore(url).discard("s-000001", "c-000002")
    with pytest.raises(NotFound):
        await result(ObjectStore(url), 0)


async def test_an_upload_that_breaks_off_was_never_there(url: str) -> None:
    store = ObjectStore(url)
    await keep(store, 0)
    for torn in (stream(1, since=0)[:-1], b""):
        with pytest.raises(Protocol):
            await store.take("s-000001", "c-000001", sent(torn), "c-000000")

    async def broken() -> AsyncIterator[bytes]:
        yield bytes(9 << 20)  # more than is sent at once
        raise ConnectionError("the host is gone")

    with pytest.raises(ConnectionError):
        await store.take("s-000001", "c-000001", broken(), "c-000000")
    with pytest.raises(NotFound):
        await result(ObjectStore(url), 1)
    with pytest.raises(NotFound):  # so nothing builds upon it
        await keep(store, 2, since=1)
    await keep(store, 1, since=0)
    assert content(await result(store, 1)) == content(stream(1))


async def test_a_state_that_nobody_came_to_name_is_overwritten(url: str) -> None:
    store = ObjectStore(url)
    await keep(store, 0)
    await keep(store, 1, since=0)
    await keep(store, 2, since=0)
    assert content(await result(store, 2)) == content(stream(2))
    with pytest.raises(NotFound):
        await result(store, 1)


async def test_many_streams_become_one(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicate, "LINKS", 3)
    store = ObjectStore(url)
    await keep(store, 0)
    for number in range(1, 8):
        await keep(store, number, since=number - 1)
        await store.discard("s-000001", f"c-{number - 1:06}")
        assert content(await result(store, number)) == content(stream(number))
    assert len(await store._listed("s-000001")) <= 4
    assert await store._listed("s-000001") == await ObjectStore(url)._listed("s-000001")


async def test_what_is_damaged_is_not_built_upon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicate, "LINKS", 1)
    store = ObjectStore(str(tmp_path))
    await keep(store, 0)
    (first,) = (tmp_path / "s-000001").iterdir()
    first.write_bytes(first.read_bytes()[:-1])
    await keep(store, 1, since=0)
    with pytest.raises(NotFound):
        await store.discard("s-000001", "c-000000")
    with pytest.raises(NotFound):
        await keep(store, 2, since=1)
    await keep(store, 2)
    assert content(await result(store, 2)) == content(stream(2))


async def test_ids_lead_nowhere_else(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path / "store"))
    for sandbox, checkpoint in (("../s-1", "c-000001"), ("s-000001", "../../c-1"), ("s-1/x", "c-000001")):
        with pytest.raises(Invalid):
            await store.take(sandbox, checkpoint, sent(stream(0)), "")
    with pytest.raises(Invalid):
        ObjectStore("ftp://somewhere")
