"""Two apps on one queue, each with a message type of its own. Every process that loads them writes
down how it was started."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from ackbone.app import App
from ackbone.engine.context import Context

HOME = Path(os.environ["ACKBONE_HOME"])


def make(side: str) -> App:
    app = App(name="faults")

    @app.on(side)
    async def work(ctx: Context) -> str:
        while True:
            if (HOME / "go").exists():
                return side
            await asyncio.sleep(0.05)

    return app


left = make("left")
right = make("right")
with (HOME / "starts").open("a") as file:
    file.write(" ".join(sys.argv[1:]) + "\n")
