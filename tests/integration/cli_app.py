"""The app of the command line's tests."""

from __future__ import annotations

import os

from ackbone import App, Context, FinalError

app = App(name="cli-test")


@app.on("good")
async def good(ctx: Context) -> dict[str, int]:
    """Answers."""
    await ctx.reply(f"seen {ctx.payload}")
    return {"ok": 1}


@app.on("bad")
async def bad(ctx: Context) -> None:
    """Fails, unless the payload was mended."""
    if ctx.payload != {"mended": True}:
        raise FinalError("broken \x1b[31mred\x1b[0m")


@app.on("pays", retries=1)
async def pays(ctx: Context) -> None:
    """Nobody knows whether it did."""

    def charge() -> None:
        raise TimeoutError("no answer")

    await ctx.once("charge", charge)


@app.on("dies")
async def dies(ctx: Context) -> None:
    """Takes its worker with it."""
    os._exit(9)
