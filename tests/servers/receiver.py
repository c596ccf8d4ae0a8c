"""An HTTP server on loopback that notes what it gets, and answers as it is told."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

Answering = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Receiver:
    """`got` has headers and body of every request, `paths` what was asked for."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.paths: list[str] = []
        self.answer: Answering = self._yes
        self.port = 0

    async def _yes(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text="thanks")

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.got.append((dict(request.headers), await request.read()))
        self.paths.append(request.path_qs)
        return await self.answer(request)

    def says(self, status: int, text: str = "", **headers: str) -> None:
        async def answer(request: web.Request) -> web.StreamResponse:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return web.Response(status=status, text=text, headers=named)

        self.answer = answer

    def breaks(self) -> None:
        """Takes requests, and resets their connections."""
        self.answer = reset

    def url(self, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}/hook"


async def reset(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    raw = request.transport.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    request.transport.abort()
    return web.Response()


@asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", receiver.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        receiver.port = runner.addresses[0][1]
        yield receiver
    finally:
        await runner.cleanup()
