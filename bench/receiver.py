"""A receiver of webhooks that does as little as it can: `python -m bench.receiver PORT SAMPLES`.

It answers 200 to everything, and writes for each request when it came (CLOCK_MONOTONIC) and the
number that its text begins with, if that is one: the moment at which it was sent off.
"""

from __future__ import annotations

import asyncio
import re
import struct
import sys
import time
from pathlib import Path
from typing import BinaryIO

ARRIVAL = struct.Struct("<qq")
"""When a request came, and the number in its text, or 0; nanoseconds."""
_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_SENT = re.compile(rb'"content":"(\d+)')


class Receiver(asyncio.Protocol):
    """One connection."""

    def __init__(self, samples: BinaryIO) -> None:
        self._samples = samples
        self._had = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        came = time.monotonic_ns()
        self._had += data
        while True:
            head, mark, rest = self._had.partition(b"\r\n\r\n")
            found = _LENGTH.search(head) if mark else None
            if found is None or len(rest) < int(found[1]):
                return
            body, self._had = rest[: int(found[1])], rest[int(found[1]) :]
            sent = _SENT.search(body)
            self._samples.write(ARRIVAL.pack(came, int(sent[1]) if sent else 0))
            self._samples.flush()
            if self._transport is not None:
                self._transport.write(_ANSWER)


async def serve(port: int, samples: BinaryIO) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Receiver(samples), "127.0.0.1", port, backlog=1024)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    with Path(sys.argv[2]).open("ab", buffering=0) as file:
        asyncio.run(serve(int(sys.argv[1]), file))
