"""The app that the fault tests run in real worker processes. A message's payload says what to do.

Every handler tells the oracle what it did, at the moment it did it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

from ackbone.app import App
from ackbone.engine.context import Context, SyncContext
from tests.faults.oracle import Oracle

app = App(name="faults")
oracle = Oracle(Path(os.environ["ACKBONE_ORACLE"]))


def act(ctx: Context | SyncContext, key: str | None = None) -> None:
    oracle.record(key or ctx.idempotency_key, ctx.message.id, ctx.attempt)


def die() -> None:
    """Nothing that Python or the engine could still do about it."""
    os.kill(os.getpid(), signal.SIGKILL)


def result() -> dict[str, int]:
    """Who did it: a committed result must be the right worker's."""
    return {"pid": os.getpid()}


@app.on("work", retries=3)
async def work(ctx: Context) -> dict[str, int]:
    """Some seconds of work, one effect, one reply. `fail`: so many attempts fail first."""
    if ctx.retry_count < ctx.payload.get("fail", 0):
        raise RuntimeError(f"attempt {ctx.attempt} fails as planned")
    await asyncio.sleep(ctx.payload.get("seconds", 0))
    act(ctx)
    await ctx.reply(f"done by {os.getpid()}")
    return result()


@app.on("thread")
def in_a_thread(ctx: SyncContext) -> dict[str, int]:
    """The same in a thread, which nobody can stop."""
    time.sleep(ctx.payload["seconds"])
    act(ctx)
    return result()


@app.on("late")
async def late(ctx: Context) -> dict[str, int]:
    """Acts at once, ends when it is told to: by a file that the test makes."""
    act(ctx)
    while not Path(ctx.payload["until"]).exists():  # noqa: ASYNC110 - another process makes it
        await asyncio.sleep(0.02)
    return result()


@app.on("stubborn")
async def stubborn(ctx: Context) -> dict[str, int]:
    """Will not be cancelled: only the end of its process ends it."""
    act(ctx)
    end = asyncio.get_running_loop().time() + ctx.payload["seconds"]
    while (left := end - asyncio.get_running_loop().time()) > 0:
        try:
            await asyncio.sleep(left)
        except asyncio.CancelledError:
            continue
    return result()


@app.on("block")
async def block(ctx: Context) -> dict[str, int]:
    """Holds up the whole event loop, as careless code does."""
    act(ctx)
    if ctx.attempt <= ctx.payload.get("times", 1):
        time.sleep(ctx.payload["seconds"])
        while ctx.payload.get("spin"):
            pass
    return result()


@app.on("effect", retries=3)
async def effect(ctx: Context) -> Any:
    """A guarded effect with a kill before, inside or after it, for the first attempts."""
    dying = ctx.attempt <= ctx.payload["kills"]
    at = ctx.payload["at"]

    def charge(key: str) -> str:
        if dying and at == "before":
            die()
        act(ctx, key)
        if dying and at == "inside":
            die()
        return f"charged {key}"

    charged = await ctx.once("charge", charge, on_unknown=ctx.payload["policy"])
    if dying and at == "after":
        die()
    await ctx.reply(str(charged))
    return {"charged": charged, **result()}


@app.on("steps", retries=0)
async def steps(ctx: Context) -> dict[str, int]:
    """Guarded effects one after the other, each of which leaves its mark with the oracle."""

    def step(key: str) -> str:
        act(ctx, key)
        return key

    for n in range(ctx.payload["steps"]):
        await ctx.once(f"step-{n}", step)
        await asyncio.sleep(ctx.payload["pause"])
    return result()


@app.on("hang", retries=1, timeout_s=1.0)
async def hang(ctx: Context) -> None:
    """Never ends by itself. Only this handler has a time limit: every effect is synced on the
    event loop, so on a slow disk good work of the same limit would run out of time, too.
    """
    act(ctx)
    await asyncio.Event().wait()


@app.on("poison", retries=1)
async def poison(ctx: Context) -> dict[str, int]:
    """Good work, unless its payload says how to ruin it."""
    act(ctx)
    match ctx.payload.get("kind"):
        case "raise":
            raise RuntimeError("poison")
        case "exit":
            os._exit(1)
        case "segfault":
            ctypes.string_at(0)
        case "kill":
            die()
    await asyncio.sleep(ctx.payload.get("seconds", 0.05))
    await ctx.reply("fine")
    return result()
