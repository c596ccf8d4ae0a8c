"""An app whose handlers fail in the ways that users' handlers do."""

from __future__ import annotations

import json
import logging
import time

import msgspec

from ackbone import App, Context, ParkMessage, RetryPolicy

app = App(name="failing")
log = logging.getLogger("shop.orders")
SOON = RetryPolicy(max_retries=1, base_delay=0.05, jitter=0.0)


def price_of(order: dict[str, int]) -> int:
    """Where the error is."""
    return order["price"]


@app.on("order", retries=0)
async def order(ctx: Context) -> int:
    """Fails below a function of its own."""
    log.info("looking at %s", ctx.payload)
    return price_of(ctx.payload)


@app.on("isolated", retries=0, isolation="process")
async def isolated(ctx: Context) -> int:
    """The same in a child process."""
    return price_of(ctx.payload)


@app.on("threaded", retries=0)
def threaded(ctx: Context) -> int:
    """The same in a thread, below a library."""
    return len(json.loads(ctx.payload["text"]))


@app.on("leaks", retries=0)
async def leaks(ctx: Context) -> None:
    """Its error names a password."""
    raise ConnectionError("postgresql://shop:c4nary-s3cret-9f1b@db/shop is away")


@app.on("second-time", retry=SOON)
async def second_time(ctx: Context) -> dict[str, int]:
    """Succeeds after a retry."""
    if ctx.attempt == 1:
        raise TimeoutError("too slow")
    return {"attempts": ctx.attempt}


@app.on("parks")
async def parks(ctx: Context) -> None:
    """Waits for somebody."""
    raise ParkMessage("the shop is closed")


class Triage(msgspec.Struct):
    label: str


@app.on("struct")
async def struct(ctx: Context) -> Triage:
    """A result with a type of its own."""
    return Triage("spam")


@app.on("blocks")
async def blocks(ctx: Context) -> None:
    """Holds up the loop."""
    time.sleep(ctx.payload)
