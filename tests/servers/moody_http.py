"""An HTTP receiver with moods, as a process: what a delivery meets there is written in its text.

    python -m tests.servers.moody_http PORT LOG

The text of a delivery is JSON: `n` (its place in its conversation), `moods` (one for each request
that comes for it, the last one again and again). Every request is a line of the log: when it came,
for what, which mood it met, and whether the receiver took it, whatever it answered.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

from aiohttp import web

TAKES = {"ok", "hang", "reset"}
"""Moods in which it has taken the delivery; in the last two it says so too late, or never."""
ANSWERS = {"429": 429, "500": 500, "400": 400, "410": 410, "302": 302, "503": 503}
HANG_S = 5.0


class Receiver:
    """Counts the requests of each delivery and answers by its moods."""

    def __init__(self, log: TextIO) -> None:
        self._log = log
        self._seen: Counter[str] = Counter()

    async def receive(self, request: web.Request) -> web.StreamResponse:
        came = time.time()
        data = (await request.json())["data"]
        text = json.loads(data["content"])
        delivery_id = request.headers["webhook-id"]
        moods = text["moods"]
        mood = moods[min(self._seen[delivery_id], len(moods) - 1)]
        self._seen[delivery_id] += 1
        self._write(
            at=came,
            id=delivery_id,
            conversation=data.get("conversation"),
            n=text["n"],
            mood=mood,
            taken=mood in TAKES,
        )
        if mood == "hang":
            await asyncio.sleep(HANG_S)
        if mood in ("hang", "reset"):
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=500)
        if mood == "ok":
            return web.Response(text="thank you")
        headers = {"Location": "/elsewhere"}
        if mood == "429":
            headers["Retry-After"] = "1"
        return web.Response(status=ANSWERS[mood], text=f"in the mood {mood}", headers=headers)

    def _write(self, **line: Any) -> None:
        self._log.write(json.dumps(line) + "\n")
        self._log.flush()


async def serve(port: int, log: TextIO) -> None:
    app = web.Application()
    app.router.add_post("/{tail:.*}", Receiver(log).receive)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    with Path(sys.argv[2]).open("a") as file:
        asyncio.run(serve(int(sys.argv[1]), file))
