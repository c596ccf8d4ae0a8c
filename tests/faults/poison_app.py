"""The app of the poison tests: nothing but handlers, because workers load it hundreds of times."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time

from ackbone.app import App
from ackbone.engine.context import Context, SyncContext

app = App(name="faults")


@app.on("poison", retries=1)
async def poison(ctx: Context) -> None:
    """Good work, unless its payload says how to ruin the process."""
    match ctx.payload.get("kind"):
        case "exit":
            os._exit(1)
        case "segfault":
            ctypes.string_at(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.sleep(ctx.payload["seconds"])


@app.on("plain", retries=1)
def plain(ctx: SyncContext) -> None:
    """Work in a thread."""
    time.sleep(ctx.payload["seconds"])


@app.on("stuck", retries=1, timeout_s=0.5)
def stuck(ctx: SyncContext) -> None:
    """Never ends, and no thread can be stopped."""
    while True:
        time.sleep(1)
