"""Two apps on one queue, each with handlers for types that the other one does not know."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from ackbone.app import App
from ackbone.engine.context import Context
from tests.faults.oracle import Oracle

TYPES = 20
"""Message types of each app."""
oracle = Oracle(Path(os.environ["ACKBONE_ORACLE"]))


def make(side: str) -> App:
    app = App(name="faults")

    async def work(ctx: Context) -> str:
        await asyncio.sleep(ctx.payload["seconds"])
        oracle.record(ctx.idempotency_key, ctx.message.id, ctx.attempt)
        return side

    for n in range(TYPES):
        app.on(f"{side}.{n}")(work)
    return app


left = make("left")
right = make("right")
