"""Frames between the pool and a worker: a length, then msgpack.

Guarantee: a peer that sends too much, or anything else than a frame, is an error of the reader's and nothing more.
"""

from __future__ import annotations

import asyncio

import msgspec

from rollout.rewards.messages import RewardMessage, ScorerFailed

MAX_FRAME = 64 << 20  # bytes of a frame
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(RewardMessage)


async def read(reader: asyncio.StreamReader) -> RewardMessage:
    """The next frame. Raises ScorerFailed when there is none."""
    try:
        size = int.from_bytes(await reader.readexactly(4), "big")
        if size > MAX_FRAME:
            raise ScorerFailed(f"it sent {size} bytes at once")
        return _decoder.decode(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError):
        raise ScorerFailed("its process died") from None
    except msgspec.MsgspecError as error:
        raise ScorerFailed(f"it wrote to the pool itself: {error}") from None


async def write(writer: asyncio.StreamWriter, frame: RewardMessage) -> None:
    raw = _encoder.encode(frame)
    try:
        writer.write(len(raw).to_bytes(4, "big") + raw)
        await writer.drain()
    except ConnectionError:
        raise ScorerFailed("its process died") from None
