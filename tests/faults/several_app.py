"""Handlers on queues of several brokers, in real worker processes. A message says where it goes on.

The id of a message is that of its root and how many queues are still to come.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from ackbone.app import App
from ackbone.engine.context import Context
from tests.faults.oracle import Oracle

app = App(name="faults")
oracle = Oracle(Path(os.environ["ACKBONE_ORACLE"]))


def serve(queue: str) -> None:
    @app.on("step", queue=queue, retries=3)
    async def step(ctx: Context) -> None:
        await asyncio.sleep(ctx.payload["seconds"])
        oracle.record(ctx.idempotency_key, ctx.message.id, ctx.attempt)
        if ctx.payload["then"]:
            following, *then = ctx.payload["then"]
            name = f"{ctx.payload['root']}-{len(then)}"
            await ctx.send("step", {**ctx.payload, "then": then}, queue=following, id=name)


for each in ("near", "far", "beside"):
    serve(each)
