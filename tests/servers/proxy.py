"""A TCP proxy that does to connections what networks do: they break, stall, lag and come back.

It runs in a thread of its own: tests with and without an event loop use it alike, and a test that
blocks its loop does not hold up the network as well. The server behind it listens on a port or on a
Unix socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any

_CHUNK = 65_536
_CHUNKS = 16
"""So many chunks may be on their way in each direction; then the sender has to wait."""
_ANSWERS_WITHIN_S = 10.0
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with no time: closing the socket sends RST instead of FIN."""


class Proxy:
    """Listens on `port` of 127.0.0.1 from its `with` on, and forwards all at first."""

    def __init__(self, server: int | Path) -> None:
        """`server` is a port of 127.0.0.1, or the path of a Unix socket."""
        self._server = server
        self._delay_s = 0.0
        self._listener: asyncio.Server | None = None
        self._live: set[asyncio.StreamWriter] = set()
        self._ways: set[asyncio.Task[None]] = set()
        self._flapping: asyncio.Task[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self.accepted = 0
        """Connections since the start."""

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._flows = asyncio.Event()
        self._place = _bind(0)
        self.port: int = self._place.getsockname()[1]
        self.forward()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def live(self) -> int:
        """Connections that are open now."""
        return len(self._live) // 2

    def forward(self, *, delay_s: float = 0.0) -> None:
        """Ends every fault. Each byte takes `delay_s` longer in each direction."""
        self._do(self._steady(self._forward, delay_s))

    def hold(self) -> None:
        """A half-open network: connections stay, new ones are taken, and no byte comes through.

        What was sent meanwhile arrives with the next `forward`, as after a cable is back.
        """
        self._do(self._steady(self._hold))

    def refuse(self) -> None:
        """As with no server: open connections are reset, new ones refused."""
        self._do(self._steady(self._refuse))

    def reset(self) -> None:
        """Open connections are reset at both ends; new ones fare as before."""
        self._do(self._reset())

    def flap(self, every_s: float) -> None:
        """Refuses for `every_s`, forwards for `every_s`, and so on."""
        self._do(self._steady(self._flap, every_s))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_ANSWERS_WITHIN_S)

    async def _steady(self, state: Callable[..., Awaitable[None]], *how: float) -> None:
        if self._flapping is not None:
            await _end(self._flapping)
            self._flapping = None
        await state(*how)

    async def _forward(self, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s
        self._flows.set()
        await self._listen()

    async def _hold(self) -> None:
        self._flows.clear()
        await self._listen()

    async def _refuse(self) -> None:
        if self._listener is not None:
            self._listener.close()  # and its socket with it
            self._listener = None
            # Bound, but not listening: the port stays ours, and connections to it are refused.
            self._place = _bind(self.port)
        await self._reset()

    async def _reset(self) -> None:
        for each in list(self._live):
            _break(each)
        # What is still on its way, or was let in and has not begun, breaks as well.
        for way in list(self._ways):
            await _end(way)

    async def _flap(self, every_s: float) -> None:
        async def flap() -> None:
            while True:
                await self._refuse()
                await asyncio.sleep(every_s)
                await self._forward()
                await asyncio.sleep(every_s)

        self._flapping = self._loop.create_task(flap())

    async def _listen(self) -> None:
        if self._listener is None:
            self._listener = await asyncio.start_server(self._accept, sock=self._place)

    async def _close(self) -> None:
        await self._steady(self._refuse)
        self._place.close()
        await asyncio.sleep(0)  # sockets that were broken close in the loop's next turn

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        way = self._loop.create_task(self._serve(reader, writer))
        self._ways.add(way)
        way.add_done_callback(self._ways.discard)

    async def _serve(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        ends = [client]
        end: Callable[[asyncio.StreamWriter], None] = _break
        self._live.add(client)
        try:
            await self._flows.wait()
            answers, server = await self._connect()
            ends.append(server)
            self._live.add(server)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._carry(reader, server))
                both.create_task(self._carry(answers, client))
            end = asyncio.StreamWriter.close  # after what is still to be sent
        except* OSError:
            pass  # one end broke: so does the other
        finally:
            for each in ends:
                self._live.discard(each)
                end(each)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self._server, int):
            return await asyncio.open_connection("127.0.0.1", self._server, limit=_CHUNK)
        return await asyncio.open_unix_connection(self._server, limit=_CHUNK)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction, until its end: that is passed on, and the other direction stays open."""
        way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_CHUNKS)
        async with asyncio.TaskGroup() as both:
            both.create_task(self._read(reader, way))
            while True:
                due, some = await way.get()
                await asyncio.sleep(due - self._loop.time())
                await self._flows.wait()
                if not some:
                    writer.write_eof()
                    return
                writer.write(some)
                await writer.drain()

    async def _read(
        self, reader: asyncio.StreamReader, way: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        while True:
            some = await reader.read(_CHUNK)
            await way.put((self._loop.time() + self._delay_s, some))
            if not some:
                return


def _bind(port: int) -> socket.socket:
    place = socket.socket()
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    place.bind(("127.0.0.1", port))
    return place


def _break(writer: asyncio.StreamWriter) -> None:
    """At once, and for the other side to see."""
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
