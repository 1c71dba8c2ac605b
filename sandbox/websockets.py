"""Two WebSockets that are passed on to each other."""

from __future__ import annotations

import asyncio

from aiohttp import ClientWebSocketResponse, WSMsgType, web

WebSocket = web.WebSocketResponse | ClientWebSocketResponse


async def bridge(one: WebSocket, other: WebSocket) -> None:
    """Messages both ways, until one side ends or the caller is cancelled. Closes neither."""
    ways = [asyncio.ensure_future(_messages(one, other)), asyncio.ensure_future(_messages(other, one))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _messages(source: WebSocket, target: WebSocket) -> None:
    async for message in source:
        if message.type is WSMsgType.BINARY:
            await target.send_bytes(message.data)
        elif message.type is WSMsgType.TEXT:
            await target.send_str(message.data)
