"""The app of the disk and clock tests: handlers that wait for a file to appear, fail, or answer.

ACKBONE_SIGNS is the folder where a test leaves its signs.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from ackbone import App, Context
from ackbone.core.errors import TemporaryError
from ackbone.core.retry import RetryPolicy

SIGNS = Path(os.environ["ACKBONE_SIGNS"])
RETRY_S = 3.0

app = App(name="patient")


@app.on("quick")
async def quick(ctx: Context) -> str:
    return "done"


@app.on("patient")
async def patient(ctx: Context) -> str:
    """Runs until the test lets it go, then sends one more message with a key that was used."""
    while not (SIGNS / "go").exists():  # noqa: ASYNC110 - the sign comes from another process
        await asyncio.sleep(0.02)
    await ctx.send("quick", {}, id="again", idempotency_key="used")
    return "let go"


@app.on("failing", retry=RetryPolicy(max_retries=3, base_delay=RETRY_S, jitter=0.0))
async def failing(ctx: Context) -> str:
    if ctx.attempt == 1:
        raise TemporaryError("not yet")
    return "at last"
